"""Kernels for an open number of rows, and bounds of masks: what is decided, without a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import plan
from torch import nn

from lapilli.codegen import masks
from lapilli.codegen.open_rows import ranges
from lapilli.codegen.select import write_all
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, load
from lapilli.ir.integer import Int, Symbol, Var, as_int, of
from lapilli.ir.node import Constant, Input
from lapilli.schedule.order import commands
from lapilli.target import TARGETS, Target

LIKELY = -1
H100 = replace(TARGETS["gpu-fp16-matrix"], compute_units=132)


def rows(least: int, most: int | None) -> Int:
    return of(Symbol("rows", least, most))


@pytest.mark.parametrize(
    ("m", "wanted"),
    [
        (as_int(100), []),
        (rows(1, 10), []),
        (rows(1, 16), []),
        (rows(1, 17), [(16, 16), (64, LIKELY)]),
        (rows(1, 200), [(16, 16), (64, 64), (128, 128), (256, LIKELY)]),
        (rows(1, 1024), [(16, 16), (64, 64), (128, 128), (256, LIKELY), (1024, 512)]),
        (rows(1, None), [(16, 16), (64, 64), (128, 128), (256, LIKELY), (1024, 512), (None, 4096)]),
        (rows(129, 2000), [(256, LIKELY), (1024, 512), (None, 2000)]),
        (rows(300, None), [(1024, LIKELY), (None, 4096)]),
        (rows(5000, None), []),
    ],
)
def test_ranges_cover_what_may_be(m: Int, wanted: list[Any]) -> None:
    assert ranges(m, LIKELY, lambda count: count) == wanted


def test_neighbours_with_one_tile_are_one_range() -> None:
    assert ranges(rows(1, None), 1, lambda count: 1) == []
    assert ranges(rows(1, None), 1, lambda count: int(count < 1000)) == [(1024, 1), (None, 0)]


@pytest.mark.parametrize("target", [H100, TARGETS["gpu-fp32"]], ids=lambda t: t.name)
def test_one_kernel_has_work_for_each_number_of_rows(target: Target) -> None:
    model, x = nn.Linear(4096, 1024), torch.randn(3, 4096)
    schedule = plan(model, x, dynamic=({0: torch.export.Dim("rows")},), target=target)
    (task,) = schedule.order.run
    kernels = write_all(schedule)[task.out.id].every
    assert len(kernels) == task.commands == len(commands([task])[0]) > 2
    (symbol,) = (s for s in task.out.shape[0].atoms() if isinstance(s, Symbol))
    seen = set()
    for count in (0, 1, 2, 8, 9, 16, 17, 63, 64, 128, 129, 255, 256, 257, 1023, 1024, 1025, 100_000):
        groups = [[int(g.evaluate({symbol: count})) for g in w.groups] for w in kernels]
        busy = [k for k, (x, y, z) in enumerate(groups) if x * y * z > 0]
        assert len(busy) == min(count, 1), count
        seen.update(busy)
    assert seen == set(range(len(kernels)))
    assert any(w.name in ("matvec", "few_rows") for w in kernels)


def test_a_matrix_has_one_layout_for_few_rows_and_many() -> None:
    for target in (H100, TARGETS["gpu-fp32"], TARGETS["gpu-fp16"]):
        model, x = nn.Linear(256, 512), torch.randn(3, 256)
        schedule = plan(model, x, dynamic=({0: torch.export.Dim("rows")},), target=target)
        (task,) = (t for t in schedule.order.run if t.template is not None)
        assert task.commands > 2
        read = [n for n in task.reads() if isinstance(n, Constant) and n.value.ndim == 2]
        assert len(read) == 1


def test_invocations_on_a_cpu_follow_the_rows() -> None:
    """Four columns of a row each for up to three rows, then tiles of four rows, of 16 rows from 16 on: and never more of them."""
    model, shapes = nn.Linear(64, 64), ({0: torch.export.Dim("rows", min=1)},)
    s = plan(model, torch.zeros(5, 64), target=TARGETS["cpu-fp32"], dynamic=shapes)
    (written,) = [w for w in write_all(s).values() if w.name == "matmul"]
    (symbol,) = {a for g in written.groups for a in g.atoms() if isinstance(a, Symbol)}
    for count in range(1, 70):
        quads = -(-count // 4) if count < 16 else -(-count // 16)
        needed = count * 16 if count < 4 else quads * 4 * 8  # 16 vectors of columns, or 8 tiles of 8 columns
        groups = [int(g.evaluate({symbol: count})) for g in written.groups]
        assert groups == [-(-needed // written.local[0]), 1, 1], count


# -- bounds of masks


M, N = Var("m", as_int(100)), Var("n", as_int(1000))
PLACES, POSITIONS = (Input((as_int(size),), DType.int64, name) for name, size in (("places", 1000), ("positions", 100)))
N_, M_ = load(PLACES, [of(N)]), load(POSITIONS, [of(M)])


@pytest.mark.parametrize(
    ("conditions", "count", "others"),
    [
        ([binary("le", N_, M_)], 1, 0),
        ([binary("lt", N_, M_), binary("ge", N_, M_)], 2, 0),
        ([binary("and", binary("gt", M_, N_), binary("ne", N_, 3))], 1, 1),
        ([binary("eq", N_, M_)], 2, 0),
        ([binary("ne", N_, 3)], 1, 1),
        ([binary("ne", M_, 3)], 1, 0),
        ([binary("ne", N_, M_)], None, 0),
        ([binary("or", binary("le", N_, M_), binary("ne", N_, 3))], None, 0),
        ([binary("le", binary("add", N_, M_), 3)], None, 0),
        ([binary("le", N_, M_)] * 5, None, 0),
    ],
)
def test_bounds(conditions: list[Expr], count: int | None, others: int) -> None:
    found = masks.bounds(conditions, M, N)
    if count is None:
        assert found is None
    else:
        assert found is not None
        assert (len(found.rows), len(found.keys), len(found.others)) == (count, count, others)


class Attention(nn.Module):
    """With as many keys as a cache has, or as there are queries."""

    def __init__(self, size: int, places: int | None) -> None:
        super().__init__()
        self.keys = None if places is None else nn.Buffer(torch.randn(2, 8, places, size))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        keys = q if self.keys is None else self.keys
        return nn.functional.scaled_dot_product_attention(q, keys, keys)


@pytest.mark.parametrize("places", [1024, None])
@pytest.mark.parametrize("size", [64, 128, 160])
def test_attention_of_any_number_of_queries_has_kernels(size: int, places: int | None) -> None:
    """Whether there is a kernel must not depend on the number of rows that a range of an open number has."""
    for target in TARGETS.values():
        for most in (300, None):
            queries = {2: torch.export.Dim("queries", max=most)}
            made = plan(Attention(size, places), torch.randn(2, 8, 7, size), dynamic=(queries,), target=target)
            assert made.order.run, target.name
