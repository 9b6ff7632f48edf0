"""Products and convolutions of codes by dot products of words, and on matrix units for bytes, which are emulated: with scales of 1
the results are the sums, to the last unit."""

from __future__ import annotations

import random
from typing import Any

import as_gpu
import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F

import lapilli
from lapilli.codegen import tiles

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")

decomposed = torch.ops.quantized_decomposed


class Sums(torch.nn.Module):
    """A linear layer, a convolution (geometry: stride, padding, dilation, groups) or a product of two inputs, of codes of steps
    of 1."""

    q: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor

    def __init__(
        self, shape: tuple[int, ...] | None, kind: torch.dtype, zero: int, geometry: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.kind, self.zero, self.geometry = kind, zero, geometry
        self.limits = (0, 255) if kind is torch.uint8 else (-128, 127)
        if shape is not None:
            self.register_buffer("q", torch.randint(-128, 128, shape, dtype=torch.int8))
            self.register_buffer("s", torch.ones(shape[0]))
            self.register_buffer("z", torch.zeros(shape[0], dtype=torch.int64))

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        q = decomposed.quantize_per_tensor(x, 1.0, self.zero, *self.limits, self.kind)
        result: torch.Tensor = decomposed.dequantize_per_tensor(q, 1.0, self.zero, *self.limits, self.kind)
        return result

    def combine(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "q"):
            return torch.bmm(x, w)
        if not self.geometry:
            return F.linear(x, w)
        return F.conv2d(x, w, None, *self.geometry)

    def forward(self, x: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        if other:
            return self.combine(self.codes(x), self.codes(other[0]))
        w = decomposed.dequantize_per_channel(self.q, self.s, self.z, 0, -128, 127, torch.int8)
        return self.combine(self.codes(x), w)

    def exact(self, x: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        given = [self.codes(v).double() for v in (x, *other)]
        return self.combine(*given) if other else self.combine(given[0], self.q.double())


def any_codes(model: Sums, *shape: int) -> torch.Tensor:
    """Numbers whose codes are all of a byte's, and some beyond."""
    low, high = model.limits
    return torch.randint(low - 3, high + 4, shape).float() - model.zero


def check(
    model: Sums, *given: torch.Tensor, plan: str = "gpu-fp32-dot", kernel: str = "_dot", there: bool = True
) -> None:
    """kernel: how the name of one ends, if there is one."""
    precision: Any = "fp16" if "fp16" in plan else "fp32"
    with lapilli.compile(model, given, target=plan, precision=precision, fallback="error") as program:
        got = program(*given)
        names = [k.name for k in program.description.kernels]
    wanted = model.exact(*given)
    assert got.shape == wanted.shape
    # Integers up to 2^24 are floats; beyond, the conversion rounds once.
    assert torch.equal(got, wanted.float())
    assert any(name.endswith(kernel) for name in names) is there, names


LINEAR = {
    "one column": (9, 8, 1), "a step": (33, 4, 17), "odd rows and columns": (131, 60, 67), "several chunks": (40, 1000, 36),
    "a sum of two parts": (20, 2048, 24), "a sum in 32-bit integers": (20, 16384, 12), "a tile": (128, 64, 128),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["gpu-fp32-dot", "gpu-fp16-dot"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, plan: str) -> None:
    torch.manual_seed(0)
    m, k, n = LINEAR[name]
    for kind, zero in ((torch.uint8, 0), (torch.int8, 0), (torch.int8, -77), (torch.uint8, 255)):
        model = Sums((n, k), kind, zero)
        check(model, any_codes(model, m, k), plan=plan, there=k < 16384)  # longer sums have 32-bit integers as operands


CONVOLUTIONS = {
    "3x3 with padding": ((12, 8, 3, 3), (2, 8, 9, 7), (1, 1, 1, 1)),
    "strides": ((5, 16, 3, 3), (1, 16, 13, 11), (2, 1, 1, 1)),
    "dilation": ((8, 4, 3, 2), (1, 4, 10, 9), (1, 2, 2, 1)),
    "1x1": ((36, 20, 1, 1), (2, 20, 6, 7), (1, 0, 1, 1)),
    "channels that are no multiple of four": ((8, 7, 3, 3), (1, 7, 8, 8), (1, 1, 1, 1)),
    "groups": ((32, 4, 3, 3), (2, 8, 6, 6), (1, 1, 1, 2)),
    "small images": ((16, 64, 3, 3), (3, 64, 5, 5), (1, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.poor_device
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    torch.manual_seed(0)
    shape, image, geometry = CONVOLUTIONS[name]
    for kind, zero in ((torch.uint8, 0), (torch.int8, 31)):
        model = Sums(shape, kind, zero, geometry)
        check(model, any_codes(model, *image), there=image[1] % 4 == 0)


@pytest.mark.part(8)
@pytest.mark.poor_device
@pytest.mark.parametrize("tile", [*tiles._DOT, *tiles._OTHER_DOT], ids=str)
def test_every_tile(tile: tiles.DotTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_DOT", (tile,))
    torch.manual_seed(0)
    model = Sums((70, 100), torch.uint8, 3)
    check(model, any_codes(model, 130, 100))
    model = Sums((68, 8, 3, 3), torch.int8, -128, (1, 1, 1, 1))
    check(model, any_codes(model, 1, 8, 12, 11))


@pytest.mark.poor_device
def test_two_activations() -> None:
    torch.manual_seed(0)
    model = Sums(None, torch.int8, 0)
    check(model, any_codes(model, 3, 20, 36), any_codes(model, 3, 36, 24))


def any_sums(seed: int, unit: int = 4) -> tuple[Sums, torch.Tensor]:
    """With multiples of a unit along the sum, as kernels read them."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    kind = r.choice((torch.int8, torch.uint8))
    low = 0 if kind is torch.uint8 else -128
    zero = r.choice((low, low + 255, low + r.randrange(256)))
    if r.random() < 0.4:
        k, n, m = unit * r.randrange(1, 320 // unit), r.randrange(1, 150), r.randrange(9, 150)
        model = Sums((n, k), kind, zero)
        return model, any_codes(model, m, k)
    groups = r.choice((1, 1, 1, 2, 3))
    channels, out = groups * unit * r.randrange(1, max(24 // unit, 4)), groups * r.randrange(8, 40)
    kernel = r.choice(((1, 1), (1, 3), (2, 2), (3, 3), (5, 4)))
    geometry = (r.choice((1, 1, 2, 3)), r.choice((0, 1, 2)), r.choice((1, 1, 2)), groups)
    model = Sums((out, channels // groups, *kernel), kind, zero, geometry)
    return model, any_codes(model, r.choice((1, 2, 5)), channels, r.randrange(9, 16), r.randrange(9, 16))


@pytest.mark.poor_device
@pytest.mark.parametrize("seed", range(12))
def test_any_sums(seed: int) -> None:
    model, x = any_sums(seed)
    check(model, x)


LINEAR_ON_UNITS = {
    "one column": (9, 16, 1), "odd rows and columns": (131, 48, 67), "several chunks": (40, 1008, 36),
    "a sum of two parts": (20, 2048, 24), "a tile": (128, 64, 128), "large tiles": (1030, 144, 600),
}  # fmt: skip
SIGNS = ((torch.uint8, 0), (torch.int8, 0), (torch.int8, -77), (torch.uint8, 255))


@pytest.mark.parametrize("plan", ["gpu-fp32-int8", "gpu-fp16-matrix-int8"])
@pytest.mark.parametrize("name", LINEAR_ON_UNITS)
def test_linear_on_units(name: str, plan: str) -> None:
    torch.manual_seed(0)
    m, k, n = LINEAR_ON_UNITS[name]
    for kind, zero in SIGNS:
        model = Sums((n, k), kind, zero)
        check(model, any_codes(model, m, k), plan=plan, kernel="_bytes")


CONVOLUTIONS_ON_UNITS = {
    "3x3 with padding": ((12, 16, 3, 3), (2, 16, 9, 7), (1, 1, 1, 1)),
    "strides": ((5, 32, 3, 3), (1, 32, 13, 11), (2, 1, 1, 1)),
    "dilation": ((8, 16, 3, 2), (1, 16, 10, 9), (1, 2, 2, 1)),
    "1x1": ((36, 48, 1, 1), (2, 48, 6, 7), (1, 0, 1, 1)),
    "channels that are no multiple of sixteen": ((8, 20, 3, 3), (1, 20, 8, 8), (1, 1, 1, 1)),
    "groups": ((32, 16, 3, 3), (2, 32, 6, 6), (1, 1, 1, 2)),
    "small images": ((16, 64, 3, 3), (3, 64, 5, 5), (1, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS_ON_UNITS)
def test_convolution_on_units(name: str) -> None:
    torch.manual_seed(0)
    shape, image, geometry = CONVOLUTIONS_ON_UNITS[name]
    for kind, zero in SIGNS:
        model = Sums(shape, kind, zero, geometry)
        check(model, any_codes(model, *image), plan="gpu-fp32-int8", kernel="_bytes", there=image[1] % 16 == 0)


class Rounded(Sums):
    """Whose result is rounded to codes again, which the program gives as they are."""

    def forward(self, x: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        low, high = self.limits
        result: torch.Tensor = decomposed.quantize_per_tensor(super().forward(x), 64.0, 3, low, high, self.kind)
        return result


@pytest.mark.parametrize("plan", ["gpu-fp32-int8", "gpu-fp32-dot", "gpu-fp32", "any-fp32"])
@pytest.mark.parametrize("columns", [36, 37])
def test_results_are_stored_as_bytes(columns: int, plan: str) -> None:
    """By the product itself where four neighbours are a word."""
    torch.manual_seed(columns)
    for kind, zero in SIGNS:
        model = Rounded((columns, 48), kind, zero)
        given = any_codes(model, 33, 48)
        with lapilli.compile(model, (given,), target=plan, fallback="error") as program:
            (plan_of_it,) = program.description.methods[0].plans
            assert torch.equal(program(given), model(given))
            names = [d.kernel for d in plan_of_it.run]
        assert ("map_packed" in names) is (columns % 4 != 0), names


FITTING = [t for t in (*tiles._MENU, *tiles._LARGE, *tiles._OTHERS) if tiles.byte_memory(t, True) <= as_gpu.SHARED]


@pytest.mark.part(18)
@pytest.mark.parametrize("tile", FITTING, ids=str)
def test_every_tile_on_units(tile: tiles.MatrixTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "byte_tiles", lambda *given: [tile])
    torch.manual_seed(0)
    model = Sums((70, 112), torch.uint8, 3)
    check(model, any_codes(model, 130, 112), plan="gpu-fp32-int8", kernel="_bytes")
    model = Sums((68, 16, 3, 3), torch.int8, -128, (1, 1, 1, 1))
    check(model, any_codes(model, 1, 16, 12, 11), plan="gpu-fp32-int8", kernel="_bytes")


def test_two_activations_on_units() -> None:
    torch.manual_seed(0)
    model = Sums(None, torch.int8, 0)
    check(model, any_codes(model, 3, 20, 48), any_codes(model, 3, 48, 24), plan="gpu-fp32-int8", kernel="_bytes")


@pytest.mark.parametrize("seed", range(12))
def test_any_sums_on_units(seed: int) -> None:
    model, x = any_sums(seed, 16)
    check(model, x, plan="gpu-fp32-int8", kernel="_bytes")
