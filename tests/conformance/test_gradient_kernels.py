"""Transposed convolutions, gradients of convolutions and products of strided matrices: their kernels, and that they are right."""

from __future__ import annotations

import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from torch import Tensor, nn

import lapilli
from lapilli.capture import capture
from lapilli.ir.integer import Atom
from lapilli.ir.node import Reduce
from lapilli.legalize.passes import prepare
from lapilli.lower.graph import lower

BACKWARD = torch.ops.aten.convolution_backward


def kernels(program: lapilli.Program) -> list[str]:
    plan = next(p for p in program.description.methods[0].plans if p.name == program.plan)
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
