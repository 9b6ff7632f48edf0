"""Kernels for an open number of rows. A tile for 64 rows takes twice as long as another for 4,096, so a task has a kernel for
each range of rows, and a run takes one of them by its sizes: the others have no work groups, and the player leaves them out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.ir.integer import Int, maximum, minimum
from lapilli.ir.node import Node
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import Target

_LIKELY = 256
_RANGES = ((16, 16), (64, 64), (128, 128), (_LIKELY, _LIKELY), (1024, 512), (None, 4096))
"""Up to how many rows, and for how many the kernel of this range is chosen."""

_FEW = 8
"""Rows for which a matrix is read once, by other kernels than tiles."""

T = TypeVar("T")


def likely_rows(m: Int) -> int:
    """How many rows an open number counts as, where one kernel is for all of them."""
    if m.value is not None:
        return estimate(m)
    most = m.bounds[1]
    return max(estimate(m), _LIKELY if most is None else min(_LIKELY, most))


def many_rows(m: Int) -> int:
    """How many rows an open number counts as where a layout is chosen for all of them, which matters most for many."""
    if m.value is not None:
        return estimate(m)
    most, many = m.bounds[1], _RANGES[-1][1]
    return many if most is None else min(most, many)


def may_be_few(m: Int, target: Target) -> bool:
    """Whether an open number of rows may be so small that tiles are slow, and gets other kernels then: one row, or a few where
    there are no matrix units.
    """
    return target.ranges and m.value is None and (m.bounds[0] or 0) <= (1 if target.cooperative_matrix else _FEW)


@dataclass(frozen=True)
class RowTemplate(KernelTemplate):
    """A template whose tile suits a number of rows."""

    by_rows: tuple[tuple[int | None, KernelTemplate], ...] = field(default=(), kw_only=True)
    """Of an open number: up to how many rows (None: any number), and the template for them."""

    @property
    @abstractmethod
    def own_operands(self) -> list[Node]:
        """Those of the tile."""

    @property
    def operands(self) -> list[Node]:
        others = (n for _, made in self.by_rows if not isinstance(made, RowTemplate) for n in made.operands)
        return list({n.id: n for n in (*self.own_operands, *others)}.values())

    @abstractmethod
    def row_count(self, task: Task) -> Int: ...

    @abstractmethod
    def for_rows(self, count: int, task: Task, ctx: Context) -> Sequence[Any]:
        """All tiles that fit, the one first that the cost model prefers for so many rows."""

    @abstractmethod
    def with_tile(self, tile: Any) -> RowTemplate: ...

    @abstractmethod
    def write_tile(self, task: Task, ctx: Context) -> KernelSource:
        """The kernel of one tile."""

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        m = self.row_count(task)
        for tile in self.for_rows(likely_rows(m), task, ctx):
            found = ranges(m, tile, lambda count: self.for_rows(count, task, ctx)[0]) if ctx.target.ranges else []
            by_rows = tuple((most, self.with_tile(other)) for most, other in found)
            yield replace(self.with_tile(tile), by_rows=by_rows)

    def with_few(self, few: Sequence[tuple[int, KernelTemplate]]) -> RowTemplate:
        """With other kernels for up to so many rows."""
        if not few:
            return self
        tiles = self.by_rows or ((None, self),)
        return replace(self, by_rows=(*few, *(pair for pair in tiles if pair[0] is None or pair[0] > few[-1][0])))

    @property
    def commands(self) -> int:
        return max(len(self.by_rows), 1)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        if not self.by_rows:
            return self.write_tile(task, ctx)
        return _joined(self.row_count(task), ((most, made.write(task, ctx)) for most, made in self.by_rows))


def ranges(m: Int, taken: T, choose: Callable[[int], T]) -> list[tuple[int | None, T]]:
    """Up to how many rows, and the tile for them; none if the number is fixed, or one tile is for all. taken: the tile for a likely
    number; choose(rows): that for another.
    """
    if m.value is not None:
        return []
    least, most = m.bounds
    likely, last = likely_rows(m), 0
    found: list[tuple[int | None, T]] = []
    for end, rows in _RANGES:
        if end is None or end >= (least or 0):
            tile = taken if last < likely <= (end or likely) else choose(max(least or 0, min(rows, most or rows)))
            if found and found[-1][1] == tile:
                found.pop()
            found.append((end, tile))
        if end is not None and most is not None and most <= end:
            break
        last = end or 0
    return found if len(found) > 1 else []


def _joined(m: Int, kernels: Iterable[tuple[int | None, KernelSource]]) -> KernelSource:
    least = 1  # no rows are no work
    made: list[KernelSource] = []
    for most, written in kernels:
        x, y, z = written.groups
        made.append(replace(written, groups=(x * _is_in(m, least, most), y, z)))
        least = (most or 0) + 1
    return replace(made[0], others=tuple(made[1:]))


def _is_in(m: Int, least: int, most: int | None) -> Int:
    """1 if least <= m <= most, else 0."""

    def positive(i: Int) -> Int:
        return minimum(maximum(i, 0), 1)

    above = positive(m - (least - 1))
    return above * positive(most + 1 - m) if most is not None else above
