"""Products of several rows and codes of 4 bits on matrix units (kernels/gpu_rows_matrix.slang), which are emulated here."""

from __future__ import annotations

import as_gpu
import numpy as np
import pytest
import torch
from linear_chains import coded
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.codegen import gpu_matvec
from lapilli.llm.decoder import Weight


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setattr(gpu_matvec, "_WORK_GROUPS_ON_UNITS", 0)  # small matrices, too


class Matrices(nn.Module):
    def __init__(self, rows: tuple[int, ...], columns: int, block: int) -> None:
        super().__init__()
        r = np.random.default_rng(columns)
        self.weights = nn.ModuleList(Weight.of(coded(n, columns, block, False, r)) for n in (columns, *rows))

    def products(self, x: Tensor) -> list[Tensor]:
        """Of rows that are stored as halves, as a product before makes them."""
        first, *others = (w().to(x.dtype) if x.dtype is torch.float64 else w() for w in self.weights)
        y = F.linear(x, first)
        return [F.linear(y, w) for w in others]


class Linear(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        return self.products(x)[0] + 1


class Gate(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.products(x)
        return F.silu(gate) * up


class Rotation(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.products(x)[0].unflatten(-1, (-1, 2, 16)).unbind(-2)
        return torch.cat([first * 0.8 - second * 0.6, second * 0.8 + first * 0.6], -1)


def check(model: Matrices, rows: int, columns: int, taken: bool = True) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, columns).half().float()
    wanted = model.eval()(x.double())
    with lapilli.compile(model, (x,), precision="fp16", target="gpu-fp16-matrix", fallback="error") as program:
        got = program(x)
        names = [k.name for k in program.description.kernels]
    assert ("rows_matrix" in names) == taken, names
    assert (got.double() - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("rows", [7, 9, 16])
def test_rows(rows: int) -> None:
    check(Linear((80,), 576, 64), rows, 576)


@pytest.mark.parametrize("case", [(16, 64, 64), (40, 448, 64), (96, 640, 128)])
def test_sizes(case: tuple[int, int, int]) -> None:
    """Fewer columns than a work group has, terms that no chunk divides, scales for more than a group."""
    columns, terms, block = case
    check(Linear((columns,), terms, block), 9, terms)


@pytest.mark.parametrize("rows", [8, 15])
@pytest.mark.parametrize("kind", [Gate, Rotation])
def test_pairs(kind: type[Matrices], rows: int) -> None:
    check(kind((64, 64), 256, 64), rows, 256)


def test_what_tiles_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, and scales of fewer terms than sums have in a group; and fewer columns than keep a GPU busy."""
    check(Linear((64,), 256, 64), 17, 256, False)
    check(Linear((64,), 256, 32), 16, 256, False)
    monkeypatch.setattr(gpu_matvec, "_WORK_GROUPS_ON_UNITS", 2)
    check(Linear((64,), 256, 64), 16, 256, False)
