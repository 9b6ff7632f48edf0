"""Caches that are read and changed where they lie: products with a few rows on CPUs, and entries that move within a state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapilli


class Attending(nn.Module):
    """A new entry in each batch of a cache [batch, n, k], and products with its lines, and with its columns."""

    def __init__(self, batch: int, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.randn(batch, n, k).to(dtype))

    def forward(self, x: Tensor, y: Tensor, new: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        self.cache[:, place] = new[:, None]
        return x @ self.cache.transpose(1, 2), y @ self.cache


CASES = [
    (1, 1, 4, 4),
    (3, 2, 8, 64),
    (2, 3, 96, 64),
    (5, 8, 100, 12),
    (1, 4, 1000, 32),
    (2, 9, 16, 16),
    (2, 3, 10, 7),
    (1, 5, 8, 6),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("batch, rows, n, k", CASES)
def test_a_few_rows_against_a_state(batch: int, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Up to eight rows of fours are read where the state lies; other shapes are right, too."""
    torch.manual_seed(n)
    model = Attending(batch, n, k, dtype)
    x, y = torch.randn(batch, rows, k).to(dtype), torch.randn(batch, rows, n).to(dtype)
    new = torch.randn(batch, k).to(dtype)
    half = dtype is torch.float16
    target = "cpu-fp16" if half else "cpu-fp32"
    args = (x, y, new, torch.tensor([n // 2]))
    program = lapilli.compile(model, args, target=target, precision="fp16" if half else "fp32")
    if rows <= 8 and k % 4 == 0 and n % 4 == 0 and n * k * rows >= 4096:
        kernels = [d.kernel for d in program.description.methods[0].plans[0].run]
        labels = [d.label for d in program.description.methods[0].plans[0].run]
        assert kernels.count("lying") == 2 and not any("pack" in label for label in labels), kernels
    for _ in range(2):
        found = program(*args)
        wanted = model.double()(x.double(), y.double(), new.double(), args[-1])
        model.to(dtype)
        for a, b, terms in zip(found, wanted, (k, n), strict=True):
            # rounding of sums of so many terms of about 1; of halves also that of the result, 2 ** -11
            bound = 4 * terms**0.5 * (2**-11 if half else 2**-22)
            torch.testing.assert_close(a.double(), b.double(), rtol=2**-11 if half else 2**-20, atol=bound)


def test_nan_and_infinity_stay_where_they_are() -> None:
    torch.manual_seed(0)
    model = Attending(2, 64, 64, torch.float32)
    model.cache[0, 3, 5], model.cache[1, 9, 0] = math.nan, math.inf
    args = (torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.randn(2, 64), torch.tensor([1]))
    program = lapilli.compile(model, args, target="cpu-fp32")
    for a, b in zip(program(*args), model(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, equal_nan=True)


class Moving(nn.Module):
    """scale: new entries are the old ones times it, plus 1."""

    def __init__(self, scale: float, dims: int) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.arange(2 * 24 * 4, dtype=torch.float32).view(2, 24, 4).clone())
        self.scale, self.dims = scale, dims

    def forward(self, source: Tensor, target: Tensor) -> None:
        if self.dims == 1:
            moved = self.cache.index_select(1, source)
            self.cache.index_copy_(1, target, moved if self.scale == 1 else moved * self.scale + 1)
        else:
            moved = self.cache[source // 24, source % 24]
            self.cache[target // 24, target % 24] = moved if self.scale == 1 else moved * self.scale + 1


@pytest.mark.parametrize("target", ["cpu-fp32", pytest.param("any-fp32", marks=pytest.mark.poor_device)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dims", [1, 2])
def test_entries_move_within_a_state(dims: int, scale: float, target: str) -> None:
    """All are read before one is written, exchanges too; what does not move costs nothing."""
    count = 24 * dims
    model, number = Moving(scale, dims), torch.export.Dim("number", min=2, max=count)
    at = torch.arange(4)
    program = lapilli.compile(model, (at, at), dynamic_shapes=({0: number}, {0: number}), target=target)
    commands = program.description.methods[0].plans[0].run
    assert len(commands) <= 4 and not any("reduce" in d.kernel for d in commands)
    r = np.random.default_rng(0)
    for n in (2, 3, 7, 12, count - 1, count):
        source = torch.from_numpy(r.permutation(count)[:n])
        targets = source.flip(0) if n % 2 == 0 else torch.from_numpy(r.permutation(count)[:n])
        model(source, targets)
        program(source, targets)
        assert torch.equal(model.cache, torch.from_numpy(next(iter(program.state().values()))))
