"""Transposed convolutions, gradients of convolutions and products of strided matrices: their kernels, and that they are right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import as_gpu
import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from taken_plan import taken_plan
from torch import Tensor, nn

import lapilli
from lapilli.capture import capture
from lapilli.codegen import tiles
from lapilli.ir.integer import Atom
from lapilli.ir.node import Reduce
from lapilli.legalize.passes import prepare
from lapilli.lower.graph import lower
from lapilli.lower.registry import LONG

BACKWARD = torch.ops.aten.convolution_backward


def kernels(program: lapilli.Program) -> list[str]:
    plan = taken_plan(program)
    return [d.kernel for d in plan.run]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "stride, padding, extra, dilation", [(1, 1, 0, 1), (2, 1, 1, 1), (2, 0, 0, 1), (1, 2, 0, 2), (3, 1, 2, 1)]
)
@pytest.mark.parametrize(
    "channels", [(8, 16), (64, 32)]
)  # the second: Winograd's kernels, of filters that are computed
def test_transposed_convolutions(
    channels: tuple[int, int], stride: int, padding: int, extra: int, dilation: int, groups: int
) -> None:
    torch.manual_seed(1)
    model = (
        nn.ConvTranspose2d(*channels, 3, stride, padding, extra, groups, dilation=dilation).eval().requires_grad_(False)
    )
    x = torch.randn(2, channels[0], 7, 9)
    program = lapilli.compile(model, (x,))
    assert relative_error(program(x), model.double()(x.double())) < FLOAT_BOUND
    if stride < 3:
        assert not any(name.startswith("generic") for name in kernels(program))


@pytest.mark.poor_device
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [1, 16, 24])
@pytest.mark.part(2)
def test_gradients_of_convolutions(batch: int, stride: int, groups: int) -> None:
    def gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spatial = ([stride] * 2, [1, 1], [1, 1], False, [0, 0])
        first, second, third = BACKWARD(g, x, w, [w.shape[0]], *spatial, groups, [True] * 3)
        return first, second, third

    torch.manual_seed(2)
    x, w = torch.randn(batch, 16, 30, 31), torch.randn(32, 16 // groups, 3, 3)
    g = torch.randn_like(torch.conv2d(x, w, None, stride, 1, 1, groups))
    program = lapilli.compile(Function(gradients), (g, x, w))
    wanted = gradients(g.double(), x.double(), w.double())
    for ours, theirs in zip(program(g, x, w), wanted, strict=True):
        assert relative_error(ours, theirs) < FLOAT_BOUND


LARGE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "rows that divide": ((1, 4, 256, 144), (8, 4, 3, 3), {"padding": (1, 1)}),
    "a stride and a part of a row more": ((1, 4, 261, 270), (8, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    "a prime number of rows": ((1, 4, 191, 193), (8, 4, 3, 3), {"padding": (1, 2), "dilation": (1, 2)}),
    "groups, far apart": ((1, 8, 288, 128), (16, 2, 3, 1), {"dilation": (3, 1), "groups": 4}),
    "one row of many": ((1, 4, 3, 20000), (4, 4, 2, 5), {}),
    "a line": ((1, 4, 40000), (8, 4, 7), {"padding": (3,)}),
    "a prime line": ((1, 4, 80018), (8, 4, 4), {"padding": (1,), "stride": (2,)}),
    "transposed": ((1, 8, 192, 200), (8, 4, 4, 4), {"stride": (2, 2), "padding": (1, 1), "transposed": True}),
    "a volume": ((1, 4, 24, 30, 64), (4, 4, 3, 2, 3), {"padding": (1, 0, 1)}),
}  # fmt: skip


@pytest.mark.part(3)
@pytest.mark.parametrize("name", LARGE)
def test_gradients_of_weights_over_many_positions(name: str) -> None:
    """An image has more than a sum may have terms, and is cut into bands."""
    shape, weight, given = LARGE[name]
    n = len(shape) - 2
    stride, padding, dilation = (
        given.get(key, (k,) * n) for key, k in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    options = [
        list(stride),
        list(padding),
        list(dilation),
        given.get("transposed", False),
        [0] * n,
        given.get("groups", 1),
    ]

    def gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = BACKWARD(g, x, w, None, *options, [False, True, False])[1]
        return found

    torch.manual_seed(4)
    x, w = torch.randn(shape), torch.randn(weight)
    g = torch.randn_like(torch.ops.aten.convolution(x, w, None, *options))
    assert max(g[0, 0].numel(), x[0, 0].numel()) > 1 << 15
    program = lapilli.compile(Function(gradient), (g, x, w))
    assert relative_error(program(g, x, w), gradient(g.double(), x.double(), w.double())) < FLOAT_BOUND
    plan = taken_plan(program)
    assert not any("pieces" in buffer.name for buffer in plan.buffers), "no tile kernel computes these"


@pytest.mark.parametrize("m, k, n", [(1, 5, 8), (33, 31, 30), (7, 4096, 9), (64, 64, 64), (5, 3, 2)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_of_strided_matrices(batch: tuple[int, ...], m: int, k: int, n: int) -> None:
    torch.manual_seed(3)
    a, b = torch.randn(*batch, k, m), torch.randn(*batch, k, n)
    program = lapilli.compile(Function(lambda a, b: a.mT @ b), (a, b))
    assert relative_error(program(a, b), a.double().mT @ b.double()) < FLOAT_BOUND


def test_reductions_of_open_sizes_end_where_the_size_does() -> None:
    sizes = (({0: torch.export.Dim("m", min=2), 1: torch.export.Dim("n", min=2)},),)
    program = lapilli.compile(Function(lambda x: x.sum(1)), (torch.rand(3, 4),), dynamic_shapes=sizes)
    for shape in ((2, 2), (5, 8192), (3, 8193), (2, 20_000), (1000, 16)):
        x = torch.rand(shape)
        assert relative_error(program(x), x.double().sum(1)) < FLOAT_BOUND
    graph = lower(prepare(capture(Function(lambda x: x.sum(1)), (torch.rand(3, 4),), sizes)))
    given: dict[Atom, int] = {atom: 16 for size in graph.symbols.values() for atom in size.atoms()}
    extents = [axis.extent for node in graph.nodes() if isinstance(node, Reduce) for axis in node.raxes]
    assert sorted(extent.evaluate(given) for extent in extents) == [1, 16]


@pytest.mark.long
def test_gradient_of_a_convolution_whose_sizes_are_all_open() -> None:
    """Its sums are as long as products of quotients of sizes. Written out wherever they come, they made kernels of nine megabytes,
    which the player refuses."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.conv3d(torch.conv3d(x, w, None, 2), v, None, 1, 1, 1, 2)

    torch.manual_seed(5)
    x, w, v = torch.randn(1, 2, 5, 4, 5), torch.randn(4, 2, 2, 3, 3), torch.randn(8, 2, 3, 3, 3)
    found = torch.compile(f, backend="vulkan", dynamic=True)(x, w, v.requires_grad_())
    g = torch.randn(found.shape)
    wide = v.detach().double().requires_grad_()
    wanted = torch.autograd.grad(f(x.double(), w.double(), wide), wide, g.double())
    assert relative_error(torch.autograd.grad(found, v, g), wanted) < FLOAT_BOUND


@pytest.mark.parametrize(("length", "stride", "dilation"), [(7, 3, 3), (5, 3, 2), (9, 4, 4), (11, 3, 3)])
def test_weights_whose_result_has_few_places(length: int, stride: int, dilation: int) -> None:
    """How many there are is computed of sizes that are open, usual values of which would give none. Nothing but what is fast may
    depend on usual values."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv1d(x, w, None, stride, 1, dilation)

    torch.manual_seed(0)
    x, w = torch.randn(1, 3, length), torch.randn(1, 3, 3, requires_grad=True)
    found = torch.compile(f, backend="vulkan", dynamic=True)(x, w)
    g = torch.randn(found.shape)
    wide = w.detach().double().requires_grad_()
    wanted = torch.autograd.grad(f(x.double(), wide), wide, g.double())
    assert relative_error(torch.autograd.grad(found, w, g), wanted) < FLOAT_BOUND


WEIGHTS = [  # batch, channels, filters, image, kernel, stride, padding, dilation, groups
    (8, 16, 32, (14, 14), (3, 3), 1, 1, 1, 1),
    (4, 8, 16, (9, 11), (3, 3), 2, 1, 1, 1),
    (8, 16, 16, (7, 7), (1, 1), 1, 0, 1, 1),
    (2, 3, 64, (30, 30), (7, 7), 2, 3, 1, 1),  # few channels
    (8, 16, 32, (10, 10), (3, 3), 1, 1, 1, 2),
    (3, 8, 24, (13, 5), (3, 1), 1, 0, 2, 1),
    (8, 12, 20, (8, 8), (3, 3), 1, 1, 1, 1),  # no multiples of eight
    (4, 16, 32, (50,), (5,), 1, 2, 1, 1),
    (32, 8, 16, (20, 21), (3, 3), 1, 1, 1, 1),  # the batch in parts, whose gradients are added
    (1, 16, 32, (9, 9), (3, 3), 1, 1, 1, 1),  # one image
    (1, 16, 32, (9, 9), (3, 3), 1, 1, 1, 4),
    (3, 8, 24, (9, 7), (3, 3), 2, 1, 1, 2),
    (4, 3, 16, (61, 48), (3, 3), 1, 1, 1, 1),  # images in bands, so that there are more parts
    (5, 4, 16, (64, 40), (5, 3), 2, 2, 1, 1),  # of which some are zeros
    (1, 32, 32, (40, 40), (3, 3), 1, 1, 1, 2),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("target", ["gpu-fp32", "gpu-fp16-matrix", "cpu-fp32"])
def test_gradients_of_weights(
    target: str, case: Any, channels_last: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Implicit products, of matrices that lie channels last or are copied; on matrix units of halves."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setattr(tiles, "_MENU", tuple(t for t in tiles._MENU if t.shared(True) <= 32768))
    batch, channels, filters, image, kernel, stride, padding, dilation, groups = case
    rank, matrix = len(image), "matrix" in target
    r = torch.Generator().manual_seed(1)
    x = torch.randn(batch, channels, *image, generator=r)
    w = torch.zeros(filters, channels // groups, *kernel)
    f = nn.functional.conv2d if rank == 2 else nn.functional.conv1d
    grad = torch.randn(f(x, w, None, stride, padding, dilation, groups).shape, generator=r)
    if matrix:
        x, grad = x.half(), grad.half()
    if channels_last and rank == 2:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        how = ([stride] * rank, [padding] * rank, [dilation] * rank, False, [0] * rank, groups, [False, True, False])
        found: Tensor = BACKWARD(grad, x, w.to(x.dtype), None, *how)[1]
        return found

    with lapilli.compile(
        Function(gradient), (x, grad), target=target, precision="fp16" if matrix else "fp32"
    ) as program:
        found, names = program(x, grad), kernels(program)
    assert relative_error(found, gradient(x.double(), grad.double())) < (2**-11 if matrix else FLOAT_BOUND)
    assert not any(name.startswith("generic") for name in names), names
    if target != "cpu-fp32" and rank == 2 and channels_last and groups == 1 and channels % 8 == 0 and batch < 32:
        assert names[0].startswith("convolution"), f"{names}: nothing is copied"


def test_filters_that_are_infinite(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Zeros that are inserted do not meet them; with more results than the invocations that compute such a case."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    x, w = torch.ones(4, 8, 75, 80), torch.randn(8, 16, 3, 3)
    w[1, 2, 0, 0], w[3, 5, 2, 1] = torch.inf, -torch.inf
    f = Function(lambda x, w: nn.functional.conv_transpose2d(x, w, None, 1, 1))
    with lapilli.compile(f, (x, w), target="gpu-fp32") as program:
        for filters in (w, w.nan_to_num(posinf=2.0, neginf=-2.0)):
            torch.testing.assert_close(program(x, filters), f(x, filters), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [(11, 11), (12, 11), (31, 31), (1, 129), (40, 40)], ids=str)
def test_large_depthwise_kernels(kernel: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Taps are written out only where they are few: a weight's gradient has an image of them, which took minutes to compile."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    r = torch.Generator().manual_seed(6)
    x, w = torch.randn(2, 8, 21, 40, generator=r), torch.randn(8, 1, *kernel, generator=r)
    x[1, 5, 20, 39] = torch.inf

    def f(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.conv2d(x, w, padding=(kernel[0] // 2, kernel[1] // 2), groups=8)

    with lapilli.compile(Function(f), (x, w), target="gpu-fp32") as program:
        plan = taken_plan(program)
        program.save(tmp_path / "model.lap")
        size = (tmp_path / "model.lap").stat().st_size
        assert size < 150_000, "nothing but code"
        assert ("depthwise" in {d.kernel for d in plan.run}) == (kernel != (40, 40))
        found, wanted = program(x, w), f(x.double(), w.double())
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert relative_error(found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)) < FLOAT_BOUND


SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "an image": ((4, 8, 256, 256), (8, 8, 3, 3), 1),
    "a large kernel": ((1, 8, 1700, 1700), (8, 8, 15, 15), 1),
    "a volume": ((1, 8, 128, 128, 128), (8, 8, 3, 3, 3), 1),
    "rows of more than a sum": ((1, 4, 3, 300, 300), (4, 4, 1, 3, 3), 1),
    "one image in groups": ((1, 128, 56, 56), (128, 4, 3, 3), 32),
    "one small image in groups": ((1, 16, 6, 6), (16, 8, 3, 3), 2),
    "three images": ((3, 64, 57, 57), (64, 64, 3, 3), 1),
    "few channels": ((32, 3, 224, 224), (64, 3, 7, 7), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_what_parts_of_a_gradient_take(name: str) -> None:
    """A part is no longer than one kernel sums, nothing much is computed for nothing, and memory is in proportion."""
    shape, weight, groups = SIZES[name]
    n = len(shape) - 2
    how = [1] * n, [k // 2 for k in weight[2:]], [1] * n, False, [0] * n, groups

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        found: Tensor = BACKWARD(g, x, torch.empty(weight), None, *how, [False, True, False])[1]
        return found

    x = torch.empty(shape, device="meta")
    g = torch.empty(shape[0], weight[0], *shape[2:], device="meta")
    graph = lower(
        prepare(capture(Function(gradient), (torch.empty_like(g, device="cpu"), torch.empty_like(x, device="cpu"))))
    )
    sums = [node for node in graph.nodes() if isinstance(node, Reduce) and node.contraction is not None]
    count = sum(math.prod(int(str(a.extent)) for a in (*node.axes, *node.raxes)) for node in sums)
    assert sums and all(math.prod(int(str(a.extent)) for a in node.raxes) <= 2 * LONG for node in sums)
    wanted = shape[0] * math.prod(shape[2:]) * math.prod(weight)
    assert count <= (4.5 if "small" in name else 1.5) * wanted
    most = max(math.prod(int(str(i)) for i in node.shape) for node in graph.nodes())
    assert most <= max(1.5**2 * max(x.numel(), g.numel()), 1 << 21), "each of two cuts adds half of an image at most"


@pytest.mark.parametrize("target", ["gpu-fp32", "cpu-fp32"])
@pytest.mark.parametrize("shape, groups", [((5, 4, 64, 40), 1), ((1, 8, 9, 7), 2), ((3, 4, 131, 127), 1)], ids=str)
def test_infinities_in_bands_and_beside_zeros(
    shape: tuple[int, ...], groups: int, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """What images are filled with meets nothing but zeros."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    r = torch.Generator().manual_seed(7)
    x, g = torch.randn(shape, generator=r), torch.randn(shape[0], 16, *shape[2:], generator=r)
    x[-1, 1, -1, -1], x[0, 0, 3, 4], g[-1, 5, -1, 0], g[0, 12, 2, 2] = torch.inf, torch.nan, -torch.inf, torch.inf

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        w = torch.zeros(16, shape[1] // groups, 3, 3, dtype=x.dtype)
        how = [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False]
        found: Tensor = BACKWARD(g, x, w, None, *how)[1]
        return found

    with lapilli.compile(Function(gradient), (g, x), target=target) as program:
        found = program(g, x)
    torch.testing.assert_close(found, gradient(g.double(), x.double()).float(), rtol=1e-4, atol=1e-3, equal_nan=True)
