"""The matrix-unit kernels, run by the emulation of `gpu_matmul_coopmat.slang` where the device has no matrix units.

What is shown is the wiring - packing, strides, tiles, ragged edges, epilogues; speed and the real instructions are for the
device benchmarks."""

from __future__ import annotations

import copy

import as_gpu
import numpy as np
import pytest
import torch
from agreement import Function
from torch import nn

import lapilli
from lapilli.codegen import gpu
from lapilli.compiler import compile_to_bytes
from lapilli.ir.dtype import DType
from lapilli.ir.integer import as_int
from lapilli.ir.node import Input
from lapilli.runtime.description import Description
from lapilli.schedule.contraction import Operand


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Plans for matrix units that any device accepts."""
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))


MODELS = {
    "first layer, ragged columns": (nn.Conv2d(3, 12, 3, 2, 1), (1, 3, 13, 11)),
    "pointwise, batch of 2": (nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 24, 1), nn.ReLU6()), (2, 3, 5, 7)),
    "3x3, stride and dilation": (
        nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 8, 3, 1, 2, dilation=2)), (1, 3, 9, 8)),
    "groups of 8 channels": (nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 3, 1, 1, groups=2)), (1, 3, 6, 5)),
    "groups, channels first": (nn.Conv2d(32, 48, 3, 2, groups=2), (1, 32, 10, 10)),
    "linear, several rows": (nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7)), (3, 24)),
    "patches": (nn.Sequential(nn.Conv2d(3, 40, 16, 16), nn.GELU(), nn.Conv2d(40, 8, 1)), (2, 3, 32, 48)),
    "patches of 196 pixels": (nn.Conv2d(1, 24, 14, 14), (3, 1, 28, 42)),
    "patches of 210, pixels left over": (nn.Conv2d(3, 17, (7, 10), (7, 10)), (2, 3, 23, 41)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_matrix_kernels_agree(emulated: None, name: str) -> None:
    torch.manual_seed(0)
    model, shape = MODELS[name]
    x = torch.randn(shape)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double()).float()
        half = copy.deepcopy(model).half()(x.half()).float()
    with lapilli.compile(model, (x,), precision="fp16", target="gpu-fp16-matrix") as program:
        result = program(x)
    error = ((result - exact).norm() / exact.norm()).item()
    # no worse than torch's own half precision; the floor is one unit of rounding, for models where torch rounds luckily
    assert error <= max(((half - exact).norm() / exact.norm()).item(), 2**-11), error
    assert np.isfinite(result.numpy()).all()


@pytest.mark.parametrize(("convolution", "shape", "wanted"), [
    (nn.Conv2d(3, 40, 16, 16), (2, 3, 32, 48), True),
    (nn.Conv2d(3, 40, 8, 8), (2, 3, 32, 48), True),
    (nn.Conv2d(3, 40, 4, 4), (2, 3, 32, 48), False),  # short: the kernel that gathers them is as fast
    (nn.Conv2d(3, 40, 16, 8), (2, 3, 32, 48), False),  # they overlap
    (nn.Conv2d(3, 40, 16, 16, padding=4), (2, 3, 32, 48), False),
    (nn.Conv2d(8, 40, 16, 16), (2, 8, 32, 48), False),
])  # fmt: skip
def test_large_patches_are_copied_to_rows(convolution: nn.Conv2d, shape: tuple[int, ...], wanted: bool) -> None:
    data = compile_to_bytes(convolution, (torch.zeros(shape),), precision="fp16", target="gpu-fp16-matrix")
    labels = [d.label for d in Description.of(data).methods[0].plans[0].run]
    assert ("pack patches" in labels) is wanted, labels


def test_patches_of_any_batch_and_place(emulated: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 16, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convolution(x[:, 1:, 2:].flip(0).transpose(2, 3)).flatten(2).transpose(1, 2)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4, 26, 17)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    sizes = [{0: torch.export.Dim("n", min=1, max=9)}]
    with lapilli.compile(model, (x,), precision="fp16", target="gpu-fp16-matrix", dynamic_shapes=sizes) as program:
        assert "pack patches" in [d.label for d in program.description.methods[0].plans[0].run]
        for n in (3, 1, 2):
            assert (program(x[-n:]) - exact[:n]).abs().max() <= 2**-9 * exact.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_matrix_kernels_in_bfloat16(emulated: None, name: str) -> None:
    """Of a model that is in bfloat16 itself: the weights keep their 16 bits, and inputs and results have as many."""
    torch.manual_seed(0)
    model, shape = MODELS[name]
    model, x = copy.deepcopy(model).bfloat16(), torch.randn(shape).bfloat16()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        theirs = model(x).double()
    with lapilli.compile(model, (x,), target="gpu-bf16-matrix") as program:
        result = program(x).double()
        kernels = [command.kernel for command in program.description.methods[0].plans[0].run]
    assert any(kernel.endswith("_matrix") for kernel in kernels), kernels
    error = ((result - exact).norm() / exact.norm()).item()
    assert error <= max(((theirs - exact).norm() / exact.norm()).item(), 2**-8), error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "size"), [(40, 40, 32), (37, 37, 64), (33, 50, 20), (1, 100, 64)])
def test_attention_in_bfloat16(emulated: None, rows: int, keys: int, size: int, causal: bool) -> None:
    """Weights are rounded to bfloat16, as torch rounds them; NaN in a row of queries stays there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, n, size).bfloat16() for n in (rows, keys, keys))
    q[0, 1, 0, 3] = torch.nan

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    exact, theirs = attention(q.double(), k.double(), v.double()), attention(q, k, v).double()
    with lapilli.compile(Function(attention), (q, k, v), target="gpu-bf16-matrix") as program:
        result = program(q, k, v).double()
        names = [command.kernel for command in program.description.methods[0].plans[0].run]
    assert any(name.startswith("attention") for name in names)
    assert torch.equal(result.isnan(), exact.isnan())
    result, exact, theirs = (x.nan_to_num(0) for x in (result, exact, theirs))
    error = ((result - exact).norm() / exact.norm()).item()
    assert error <= max(((theirs - exact).norm() / exact.norm()).item(), 2**-8), error


class Product(nn.Module):
    """A product of matrices that lie by rows or by columns."""

    def __init__(self, left: bool, right: bool) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.mT if self.left else x, y.mT if self.right else y)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("sizes", [(2, 40, 24, 56), (1, 33, 21, 35)], ids=["eighths", "ragged"])
def test_operands_that_lie_transposed(
    emulated: None, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], left: bool, right: bool
) -> None:
    monkeypatch.setattr(gpu, "WORTH_PACKING", 0)
    torch.manual_seed(0)
    b, m, k, n = sizes
    x, y = torch.randn(b, m, k).half(), torch.randn(b, k, n).half()
    given = (x.mT.contiguous() if left else x).float(), (y.mT.contiguous() if right else y).float()
    with lapilli.compile(Product(left, right), given, precision="fp16", target="gpu-fp16-matrix") as program:
        result = program(*given)
    exact = x.double() @ y.double()
    assert ((result - exact).norm() / exact.norm()).item() <= 2**-11
    short = tuple(t.bfloat16() for t in given)
    with lapilli.compile(Product(left, right), short, target="gpu-bf16-matrix") as program:
        result = program(*short)
    exact = Product(left, right)(*(t.double() for t in short))
    assert ((result - exact).norm() / exact.norm()).item() <= 2**-8


@pytest.mark.parametrize(("m", "whole"), [(16, True), (9, False)])
def test_columns_are_read_whole(m: int, whole: bool) -> None:
    """Eight rows of a single column at once only where there are eight: reads beyond a buffer are the driver's choice."""
    x = Input((as_int(m), as_int(1)), DType.float16, "x", "input")
    rows = gpu.matmul_rows(Operand(x, as_int(0), (as_int(0), as_int(1), as_int(0))), as_int(m), as_int(1), gpu.SHORTS)
    assert (rows is not None) == whole


def test_products_with_one_column(emulated: None) -> None:
    model, x = torch.nn.Linear(1, 7), torch.randn(9, 1)
    with lapilli.compile(model, (x,), precision="fp16", target="gpu-fp16-matrix") as program:
        torch.testing.assert_close(program(x), model(x), rtol=2e-3, atol=2e-3)
