"""Additions at computed places that sort their entries first, as they do where there are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import as_gpu
import pytest
import torch
from agreement import Function
from taken_plan import taken_plan
from torch import Tensor

import lapilli
from lapilli.lower import scatter

INF, NAN = float("inf"), float("nan")
ATEN = torch.ops.aten


def entries(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def places(most: int, *shape: int) -> Tensor:
    """With negative ones, and with many that are equal."""
    found = torch.randint(-most, most, shape, generator=torch.Generator().manual_seed(2))
    found.view(-1)[: found.numel() // 3] = most // 2
    return found


def special() -> Tensor:
    """Infinities and NaN, which reach the elements only that they are added to; and -0."""
    x = entries(40, 6)
    x[3], x[5, 2], x[7, :3], x[9] = INF, NAN, -INF, -0.0
    return x


Call = tuple[Callable[..., Any], tuple[Tensor, ...]]
CASES: dict[str, Call] = {
    "rows": (lambda x, v, i: x.index_put([i], v, accumulate=True), (entries(9, 5), entries(40, 5), places(9, 40))),
    "elements": (
        lambda x, v, i, j: x.index_put([i, j], v, accumulate=True),
        (entries(9, 5), entries(40), places(9, 40), places(5, 40)),
    ),
    "a table of places": (
        lambda x, v, i: ATEN.index_put(x, [None, i], v, True), (entries(3, 9, 4), entries(3, 6, 7, 4), places(9, 6, 7)),
    ),
    "places apart": (
        lambda x, v, i, j: ATEN.index_put(x, [i, None, j], v, True),
        (entries(4, 3, 5), entries(20, 3), places(4, 20), places(5, 20)),
    ),
    "one value": (lambda x, v, i: x.index_put([i], v, accumulate=True), (entries(9, 5), torch.tensor(0.5), places(9, 40))),
    "special values": (
        lambda x, v, i: x.index_put([i], v, accumulate=True), (torch.full((50, 6), -0.0), special(), places(50, 40))),
    "slices": (lambda x, v, i: x.index_add(1, i, v, alpha=0.5), (entries(3, 9, 2), entries(3, 40, 2), places(9, 40).abs() % 9)),
    "integers": (
        lambda x, v, i: x.index_put([i], v, accumulate=True), (places(99, 9, 5), places(99, 40, 5), places(9, 40))),
    "halves": (
        lambda x, v, i: x.index_put([i], v, accumulate=True), (entries(9, 5).half(), entries(40, 5).half(), places(9, 40))),
    "an embedding": (
        lambda v, i: ATEN.embedding_dense_backward(v, i, 11, 3, False), (entries(5, 8, 6), places(11, 5, 8) % 11)),
    "one entry": (lambda x, v, i: x.index_put([i], v, accumulate=True), (entries(9, 5), entries(1, 5), places(9, 1))),
    "many of one place": (
        lambda x, v, i: x.index_put([i], v, accumulate=True), (entries(3, 2), entries(5000, 2), places(3, 5000))),
}  # fmt: skip


@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
@pytest.mark.parametrize("name", CASES)
def test_sorted_additions(name: str, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    for limit in ("_MANY_PAIRS", "_MANY"):
        monkeypatch.setattr(scatter, limit, 0)
    monkeypatch.setattr(scatter, "_FEW_PLACES", 0)
    f, args = CASES[name]
    with lapilli.compile(Function(f), args, target=target) as program:
        found = program(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    if found.is_floating_point():  # of 1,700 terms at most
        bound = 2**-10 if found.dtype is torch.float16 else 2e-5
        torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound, equal_nan=True)
    else:
        assert torch.equal(found, exact)


def test_few_entries_are_not_sorted() -> None:
    """What is stored for each place would be as large as the tensor."""
    x, i, v = torch.zeros(512, 512), torch.arange(100), torch.ones(100)
    f = Function(lambda x, i, v: x.index_put((i, i), v, accumulate=True))
    with lapilli.compile(f, (x, i, v), target="cpu-fp32") as program:
        assert len(taken_plan(program).run) <= 2
        assert program(x, i, v).trace() == 100


def test_many_entries_are_sorted() -> None:
    """Comparing 4,096 entries with each of 6 million elements would take hundreds of times as long."""
    grad, tokens = torch.ones(4096, 128), torch.zeros(4096, dtype=torch.long)
    f = Function(lambda v, i: ATEN.embedding_dense_backward(v, i, 50_257, -1, False))
    data = lapilli.compile(f, (grad, tokens))
    plan = next(p for p in data.description.methods[0].plans if p.name == data.plan)
    assert len(plan.run) > 3, [d.kernel for d in plan.run]
    assert (data(grad, tokens)[0] == 4096).all()
