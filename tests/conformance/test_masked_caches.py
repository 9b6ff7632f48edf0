"""Attention of many queries to a cache: keys that a mask takes out for all queries of a work group are not computed, wherever
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import random_masks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.target import TARGETS

pytestmark = pytest.mark.usefixtures("on_any_device")

HEADS, GROUPS, SIZE = 4, 2, 32


class Cached(nn.Module):
    """Queries at any positions see the places of a cache up to their own, at most `window` of them."""

    def __init__(self, context: int, window: int) -> None:
        super().__init__()
        self.keys, self.values = (nn.Buffer(torch.randn(1, GROUPS, context, SIZE).half()) for _ in range(2))
        self.places = nn.Buffer(torch.arange(context), persistent=False)
        self.window = window

    def forward(self, q: Tensor, positions: Tensor, new: Tensor) -> Tensor:
        self.keys[:, :, positions[:1]] = new
        self.values[:, :, positions[:1]] = new
        mask = (self.places <= positions[:, None]) & (self.places > positions[:, None] - self.window)
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)


ROWS: dict[str, tuple[int, int, list[int]]] = {  # context, window; positions
    "the beginning of a cache": (1100, 2000, list(range(40))),
    "its middle": (1100, 2000, list(range(500, 540))),
    "its end, not a whole tile": (1085, 2000, list(range(1045, 1085))),
    "a window": (1100, 64, list(range(700, 740))),
    "windows that lie apart": (1100, 32, [5, 900, *range(400, 430)]),
    "one place each": (600, 1, list(range(560, 600))),
    "less than a work group's keys": (96, 2000, list(range(20, 60))),
    "several work groups, the last not full": (900, 300, list(range(600, 900, 2))),
    "a query that sees nothing": (600, 2000, [-1, *range(30)]),
}


KERNELS = {"gpu-fp16-matrix": "attention_matrix", "gpu-fp16": "attention", "cpu-fp16": "attention"}


@pytest.fixture(params=KERNELS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plan that software drivers take."""
    name = str(request.param)
    monkeypatch.setitem(TARGETS, name, replace(TARGETS[name], shared_memory=32768))
    return name


@pytest.mark.part(8)
@pytest.mark.parametrize("name", ROWS)
def test_keys_in_front_of_and_behind_what_is_seen(name: str, plan: str) -> None:
    context, window, positions = ROWS[name]
    torch.manual_seed(len(positions))
    model = Cached(context, window)
    q = torch.randn(1, HEADS, len(positions), SIZE).half()
    args = (q, torch.tensor(positions), torch.randn(1, GROUPS, 1, SIZE).half())
    with lapilli.compile(model, args, target=plan, fallback="error") as program:
        got = program(*args)
        assert any(d.kernel == KERNELS[plan] for d in program.description.methods[0].plans[0].run)
    with torch.no_grad():
        wanted = model.double()(q.double(), args[1], args[2].double())
    # Weights and results are rounded to halves, and weights add up to 1.
    bound = 2**-9 * float(model.values.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=2**-10, atol=bound, equal_nan=True)


def test_the_mask_is_used(plan: str) -> None:
    """What is behind the queries' places is not read: NaN there would be NaN in every result."""
    torch.manual_seed(0)
    model = Cached(1100, 2000)
    model.values[:, :, 600:] = torch.nan
    args = (torch.randn(1, HEADS, 40, SIZE).half(), torch.arange(40), torch.randn(1, GROUPS, 1, SIZE).half())
    with lapilli.compile(model, args, target=plan, fallback="error") as program:
        assert program(*args).isfinite().all()


Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of places [keys], positions [queries, 1] and integers of places."""

MASKS: dict[str, Mask] = {
    "less than": lambda n, m, x: n < m,
    "greater than": lambda n, m, x: m > n,
    "from a place on": lambda n, m, x: n >= m,
    "behind a place": lambda n, m, x: m < n,
    "one place": lambda n, m, x: n == m,
    "of integers that are in no order": lambda n, m, x: x <= m,
    "and a property of keys": lambda n, m, x: (n <= m) & (x % 3 != 0),
    "and a property of queries": lambda n, m, x: (n <= m) & (m % 2 == 0),
    "a property of keys alone": lambda n, m, x: (x % 5 == 0).expand(m.shape[0], -1),
    "either of two": lambda n, m, x: (n <= m) & ((n > m - 20) | (n < 3)),
    "of both at once": lambda n, m, x: (n + m) % 7 == 0,
    "four comparisons": lambda n, m, x: (n <= m) & (n > m - 300) & (x <= m + 50) & (x > m - 400),
    "five comparisons": lambda n, m, x: (n <= m) & (n > m - 300) & (x <= m + 50) & (x > m - 400) & (2 * n != m),
    "the least integer": lambda n, m, x: n < torch.where(m > 0, m, -(2**31)),
}


class Masked(Cached):
    def __init__(self, context: int, mask: Mask) -> None:
        super().__init__(context, 0)
        self.integers = nn.Buffer(torch.randperm(context), persistent=False)
        self.mask = mask

    def forward(self, q: Tensor, positions: Tensor, new: Tensor) -> Tensor:
        self.keys[:, :, positions[:1]] = new
        self.values[:, :, positions[:1]] = new
        mask = self.mask(self.places, positions[:, None], self.integers)
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)


@pytest.mark.part(16)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_any_comparisons(name: str, plan: str) -> None:
    torch.manual_seed(len(name))
    model = Masked(700, MASKS[name])
    positions = torch.tensor([*range(330, 360), 0, 650])
    args = (torch.randn(1, HEADS, len(positions), SIZE).half(), positions, torch.randn(1, GROUPS, 1, SIZE).half())
    with lapilli.compile(model, args, target=plan, fallback="error") as program:
        got = program(*args)
    with torch.no_grad():
        wanted = model.double()(args[0].double(), positions, args[2].double())
    bound = 2**-9 * float(model.values.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=2**-10, atol=bound, equal_nan=True)


@pytest.mark.part(20)
@pytest.mark.parametrize("seed", range(24))
def test_random_masks(seed: int, plan: str) -> None:
    """Of few queries and of many."""
    random_masks.check(seed, plan)
