"""Row fusion: reductions over the same row, and the maps along that row that read their results, become one kernel.

Softmax is a maximum, a sum and a map; layer norm two sums and a map. As separate kernels, each would read the whole row again
and wait for the one before. A reduction is fused with its only reader if both iterate over the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lapilli.ir.expr import Expr, Load, cost, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, of, product
from lapilli.ir.node import Node, Reduce
from lapilli.schedule.layout import estimate, is_word
from lapilli.schedule.realize import READS, as_var, invert
from lapilli.schedule.task import Task
from lapilli.target import Target

LONGEST_ROW = 8192
DEEPEST = 12  # values that are computed in the row through one another
_CHEAP = 4  # operations of a value that a kernel without registers for a row may compute again in every pass


@dataclass(frozen=True)
class Step:
    """A reduction inside a row: `reduction` folds `body` over the row; `value` is the result as readers of `out` see it."""

    out: Node
    reduction: Reduce
    body: Expr
    value: Expr


@dataclass(frozen=True)
class _Rows:
    """outer: axes that enumerate the rows; inner: axes along a row."""

    outer: tuple[Var, ...]
    inner: tuple[Var, ...]

    @property
    def count(self) -> Int:
        return product([a.extent for a in self.outer])

    @property
    def length(self) -> Int:
        return product([a.extent for a in self.inner])


@dataclass(frozen=True)
class RowFusion(_Rows):
    """Steps in order; a load of a step's result means its value in the same row. value, store: what the task stores, for every
    element of the row, or, if `whole`, once per row (the last step is then the task's own reduction). team: which of the kernel's
    work groups it gets (`codegen/rows.py`).
    """

    steps: tuple[Step, ...]
    value: Expr
    store: tuple[Int, ...]
    whole: bool
    team: float = 1


def fuse_rows(tasks: Sequence[Task], outputs: Sequence[Node], target: Target) -> list[Task]:
    """The tasks, with those of a row fused into the last of them."""
    by_out = {t.out.id: t for t in tasks}
    readers: dict[int, set[int]] = {}
    for t in tasks:
        for r in t.reads():
            readers.setdefault(r.id, set()).add(t.out.id)
    for o in outputs:
        readers.setdefault(o.id, set()).add(-1)
    gone: set[int] = set()
    made: dict[int, Task] = {}
    for t in reversed(tasks):  # the last reader takes all
        if t.out.id in gone or not can_end(t, target):
            continue
        found = _Group(t, by_out, readers, target).found()
        if found is not None:
            members = found.members()
            gone |= {m.out.id for m in members}
            origins = [o for m in (*members, t) for o in m.origins]
            reason = f"{t.reason}; reductions of its rows inside"
            made[t.out.id] = replace(t, origins=origins, reason=reason, row=found.row(), members=members)
    return [made.get(t.out.id, t) for t in tasks if t.out.id not in gone]


def _is_reduction(t: Task) -> bool:
    """Whether a reduction can be fused: no contraction, no arg-reduction."""
    return (
        t.reduction is not None
        and t.template is None
        and t.reduction.contraction is None
        and not t.reduction.op.startswith("arg")
    )


def can_end(t: Task, target: Target) -> bool:
    """Whether a task may be the last of a row."""
    return (
        is_word(t.out.dtype, target.half)
        and not t.partial
        and (t.reduction is None or _is_reduction(t))
        and 0 not in t.out.shape
    )


@dataclass(frozen=True)
class _Frame(_Rows):
    """Rows, and the axes of the last task expressed by them."""

    mapping: dict[Atom, Int]


class _Group:
    """The candidates for fusion with a task: reductions of its rows, and pointwise values read only in these rows."""

    def __init__(self, end: Task, by_out: Mapping[int, Task], readers: Mapping[int, set[int]], target: Target) -> None:
        self.end, self.by_out, self.readers, self.target = end, by_out, readers, target

    def found(self) -> _Collected | None:
        for frame in self._frames():
            found = self._in_frame(frame) if self._pays(frame) else None
            if found is not None:
                return found
        return None

    def _frames(self) -> list[_Frame]:
        t = self.end
        if t.reduction is not None:
            return [_Frame(t.axes, t.reduction.raxes, {})]
        found = []
        for ld in loads(t.value):
            s = self.by_out.get(ld.node.id)
            if s is not None and _is_reduction(s):
                assert s.reduction is not None
                mapping = invert(t.axes, ld.index, s.store, (*s.axes, *s.reduction.raxes))
                if mapping is not None:
                    found.append(_Frame(s.axes, s.reduction.raxes, mapping))
        return found

    def _pays(self, frame: _Frame) -> bool:
        """Whether fusion pays: rows fit one work group; if one invocation computes a row alone, rows are many or short."""
        longest = frame.length.bounds[1]
        if longest is None or longest > LONGEST_ROW or frame.length.value in (0, 1):
            return False
        return self.target.kind == "gpu" or estimate(frame.count) >= 32 or longest <= 512

    def _in_frame(self, frame: _Frame) -> _Collected | None:
        banned: set[int] = set()
        while True:
            found = _Collected(self, frame, banned)
            inside = {self.end.out.id, *found.places}
            bad = {i for i in found.places if not self.readers.get(i, set()) <= inside} | found.clashes
            if not bad and len(found.reads()) > READS:
                bad = set(found.producers)
            bindings = sum(map(self.target.parts, (self.end.out, *found.reads())))
            if not bad and found.steps and bindings > self.target.bindings:
                bad = {found.greediest()}
            if not bad:
                break
            banned |= bad
        return found if found.steps else None

    def is_producer(self, i: int, frame: _Frame) -> bool:
        """Whether a value may be computed inside the row: once if the row is kept in registers, else in every pass."""
        p = self.by_out.get(i)
        if p is None or p is self.end or p.reduction is not None or p.template is not None or p.partial:
            return False
        keeps = self.target.kind == "gpu" and frame.length.value is not None
        once = estimate(product(p.out.shape)) >= estimate(frame.count * frame.length)
        return once and (keeps or cost(p.value) <= _CHEAP)


class _Collected:
    """The closure of a task over reductions and producers. places: the index at which each is read; clashes: values that cannot
    be fused, because they are read at several indices or through too many others.
    """

    def __init__(self, group: _Group, frame: _Frame, banned: set[int]) -> None:
        self.group, self.frame, self.banned = group, frame, banned
        self.places: dict[int, tuple[Int, ...]] = {}
        self.clashes: set[int] = set()
        self.apart: set[int] = set()  # ids of values read from memory
        self.depth = 0
        self.steps: dict[int, Step] = {}
        self.producers: dict[int, Task] = {}
        end = group.end
        if end.reduction is not None:
            assert end.reduction_body is not None
            self.body: Expr | None = self._expand(end.reduction_body)
        self.value = self._expand(rewrite(end.value, frame.mapping))

    def _expand(self, e: Expr) -> Expr:
        """Inlines producers, and collects the reductions that are read."""
        at: dict[int, tuple[Int, ...]] = {}
        for ld in loads(e):  # all first: what clashes is not followed, and iterations (of eigenvalues, say) are long
            if at.setdefault(ld.node.id, ld.index) != ld.index and ld.node.id not in self.banned:
                self.clashes.add(ld.node.id)
        self.depth += 1
        expanded = rewrite(e, on_load=self._load)
        self.depth -= 1
        return expanded

    def _load(self, ld: Load) -> Expr | None:
        i = ld.node.id
        if i in self.banned or i in self.clashes:
            return None
        if self.places.get(i, ld.index) != ld.index or (self.depth > DEEPEST and i in self.group.by_out):
            self.clashes.add(i)
            return None
        if i not in self.places and (i in self.apart or not self._join(ld)):
            self.apart.add(i)  # wherever else it is read
            return None
        p = self.producers.get(i)
        return None if p is None else self._expand(rewrite(p.value, dict(zip(p.axes, ld.index, strict=True))))

    def _join(self, ld: Load) -> bool:
        i = ld.node.id
        s = self.group.by_out.get(i)
        if s is None or s is self.group.end:
            return False
        if self.group.is_producer(i, self.frame):
            self.places[i] = ld.index
            self.producers[i] = s
            return True
        mapping = _as_step(s, ld.index, self.frame.outer, self.frame.inner) if _is_reduction(s) else None
        if mapping is None:
            return False
        assert s.reduction is not None and s.reduction_body is not None
        self.places[i] = ld.index
        body, value = self._expand(rewrite(s.reduction_body, mapping)), self._expand(rewrite(s.value, mapping))
        self.steps[i] = Step(s.out, s.reduction, body, value)  # after those that it reads
        return True

    def reads(self) -> list[Node]:
        steps = self.row().steps
        bodies = [e for s in steps for e in (s.body, s.value)] + [self.value]
        inside = self.steps.keys() | {s.reduction.id for s in steps}
        return list({ld.node.id: ld.node for e in bodies for ld in loads(e) if ld.node.id not in inside}.values())

    def greediest(self) -> int:
        """The reduction that reads the most values."""
        return max(
            self.steps,
            key=lambda i: len({ld.node.id for e in (self.steps[i].body, self.steps[i].value) for ld in loads(e)}),
        )

    def row(self) -> RowFusion:
        end = self.group.end
        steps = list(self.steps.values())
        if end.reduction is not None:
            assert self.body is not None
            steps.append(Step(end.out, end.reduction, self.body, self.value))
        store = tuple(i.substitute(self.frame.mapping) for i in end.store)
        return RowFusion(self.frame.outer, self.frame.inner, tuple(steps), self.value, store, end.reduction is not None)

    def members(self) -> tuple[Task, ...]:
        return tuple(t for i, t in self.group.by_out.items() if i in self.places)


def _as_step(s: Task, index: Sequence[Int], outer: Sequence[Var], inner: Sequence[Var]) -> dict[Atom, Int] | None:
    """A reduction's axes expressed by the rows, for a read at `index`; None if it iterates over other rows."""
    assert s.reduction is not None
    mapping: dict[Atom, Int] = {a: as_int(0) for a in (*s.axes, *s.reduction.raxes) if a.extent == 1}
    reached: set[Var] = set()
    for place, i in zip(s.store, index, strict=True):
        own, there = as_var(place), as_var(i)
        if own is None:
            if i != place:
                return None
            continue
        if there is None or there not in outer or there in reached or there.extent != own.extent:
            return None
        mapping[own] = of(there)
        reached.add(there)
    if any(a not in reached and a.extent != 1 for a in outer) or any(a not in mapping for a in s.axes):
        return None
    along = [a for a in s.reduction.raxes if a.extent != 1]
    row = [a for a in inner if a.extent != 1]
    if [a.extent for a in along] != [a.extent for a in row]:
        return None
    return mapping | dict(zip(along, map(of, row), strict=True))
