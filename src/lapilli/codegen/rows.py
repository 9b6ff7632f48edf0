"""Kernels of row fusions: reductions over a row and the values that read them along it (schedule/fuse_reductions.py).

On GPUs a team of invocations processes a row. A row of known, moderate length is read once: the loops are unrolled, so that
values stay in registers from one pass to the next. Otherwise one invocation processes a row alone, in loops, without barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lapilli.codegen import choices, generic
from lapilli.codegen.emit import (
    LANES,
    Emitter,
    KernelBuilder,
    NotVectorizable,
    converted,
    lane_steps,
    stored_as,
    vector_of,
)
from lapilli.codegen.kernel import KernelSource, finish, first_that_fits, linear_groups
from lapilli.codegen.template import Context
from lapilli.ir.axes import unravel
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Select, cost, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, of, product
from lapilli.schedule.fuse_reductions import LONGEST_ROW, RowFusion, Step, can_end
from lapilli.schedule.layout import Layout, estimate, in_memory, order_of_reads
from lapilli.schedule.task import Task
from lapilli.target import Target

_UNROLLED = 16  # elements, or vectors of four, that an invocation keeps
_GROUP = 128  # invocations of a work group that holds several rows
_MOST_ACROSS = (
    8  # invocations of a team where elements of neighbouring rows lie side by side, if rows are enough for the device
)
_LARGE_GROUP = 512  # of a work group where they are not
_SIDE_BY_SIDE = 16  # such rows that a work group should have, so that it reads whole sectors of memory
_TEAM = 256  # at most, for one row
_OPEN_TEAM = 32  # the same, where an open row is nothing but a reduction: most are short
_SHORTEST = 16  # elements of a row that is nothing but a reduction
_MANY_ROWS = {True: ((16, 128, 256), (8, 128, 256)), False: ((16, 128, 2048), (8, 32, 1024))}
"""Of rows that are nothing but a reduction, and of others: what an invocation takes, of rows of how many elements at least, and how
many invocations each compute unit must have then."""
_TOGETHER = 4  # elements (or vectors) of a long row that an invocation asks for at once
_SHORT_BODIES = 200  # what is computed for each of them at most: it is written four times
_CHUNK = 256  # terms that are summed before they join the total, where one invocation sums many


def write(task: Task, layouts: Mapping[int, Layout], target: Target) -> KernelSource:
    assert task.row is not None
    return first_that_fits(
        partial(_Writer, task, task.row, dict(layouts), target, lanes, whole)
        for whole in (False, True)
        for lanes in (LANES, 1)
    )


_TEAMS = {
    "usual team": 1,
    "twice the team": 2,
    "half the team": 0.5,
    "four times the team": 4,
    "a quarter of the team": 0.25,
}
"""Of what the rule gives a row: invocations, or on drivers of type CPU rows of a work group. Without measuring, the first."""


def choose(task: Task, ctx: Context) -> None:
    """Chooses the work groups of a row's kernel."""
    row = task.row
    assert row is not None
    candidates = (choices.Candidate(name, factor) for name, factor in _TEAMS.items())
    team = choices.choose(task, choices.of_rows(task, row, ctx), candidates, ctx)
    if team is not None and team != row.team:
        task.row = replace(row, team=team)


def alone(task: Task, ctx: Context) -> RowFusion | None:
    """A reduction of contiguous rows of moderate length, on a GPU, as a row without anything else in it."""
    reduction, body = task.reduction, task.reduction_body
    if reduction is None or body is None or ctx.target.kind != "gpu" or not can_end(task, ctx.target) or task.within:
        return None
    if isinstance(body, Select):  # terms that are left out: generic kernels have loops that end before them
        return None
    most = product([a.extent for a in reduction.raxes]).bounds[1]
    if most is None or not _SHORTEST <= most <= LONGEST_ROW:
        return None
    order = order_of_reads(loads(body), ctx.layouts)
    if not order or order[-1] not in reduction.raxes:
        return None
    step = Step(task.out, reduction, body, task.value)
    return RowFusion(task.axes, reduction.raxes, (step,), task.value, task.store, True)


@dataclass(frozen=True)
class _Shape:
    """team: invocations per row; rows: rows per work group; turns: elements (or vectors) per invocation, None for a loop;
    across: whether neighbouring invocations have neighbouring rows.
    """

    team: int
    rows: int
    turns: int | None
    across: bool

    @property
    def size(self) -> int:
        return self.team * self.rows


class _Writer:
    def __init__(
        self, task: Task, row: RowFusion, layouts: dict[int, Layout], target: Target, lanes: int, whole_sizes: bool
    ) -> None:
        self.task, self.row, self.target, self.layouts, self.lanes = task, row, target, layouts, lanes
        self.kernel = KernelBuilder(layouts, target.half, target.texel, whole_sizes=whole_sizes)
        self.outer, self.inner, across = self._axes_in_memory()
        wide = lanes > 1
        if wide and across and target.kind == "gpu" and not self._is_long():
            raise NotVectorizable("neighbouring rows are read by neighbouring invocations")
        self.across_lanes = wide and across
        self.count = row.count // lanes if self.across_lanes else row.count
        self.steps = row.length // lanes if wide and not across else row.length  # elements or vectors of a row
        if wide and (row.count if across else row.length) % LANES != 0:
            raise NotVectorizable("the number of elements is not a multiple of 4")
        self.shape = self._shape(across)
        self.shared: dict[str, int] = {}

    def _is_long(self) -> bool:
        """Whether a row is read again in every pass: the fewer loads for that, the better."""
        length = self.row.length.value
        return length is not None and length > _UNROLLED * _MOST_ACROSS

    # -- the shape of a work group
    def _axes_in_memory(self) -> tuple[list[Var], list[Var], bool]:
        """Outer and inner axes in the memory order of what is stored, or read, outermost first; and whether neighbouring
        elements belong to different rows.
        """
        if self.row.whole:
            read = [ld for s in self.row.steps for ld in loads(s.body)]
            order = order_of_reads(read, self.layouts)
        else:
            order = in_memory(self.row.store, self.layouts[self.task.out.id])
        outer = [a for a in self.row.outer if a.extent != 1]
        inner = [a for a in self.row.inner if a.extent != 1]
        place = {a: k for k, a in enumerate(order)}
        outer.sort(key=lambda a: place.get(a, -1))
        inner.sort(key=lambda a: place.get(a, -1))
        return outer, inner, bool(order) and order[-1] in outer

    def _shape(self, across: bool) -> _Shape:
        known = self.steps.value
        if self.target.kind == "any":
            turns = known if known is not None and known <= 4 else None
            return _Shape(1, max(1, int(32 * self.row.team)), turns, True)
        length = known if known is not None else self.steps.bounds[1] or _TEAM
        team = 1
        each = 4 if across else self._each_takes(length)
        most = self._most_across() if across else _OPEN_TEAM if known is None and self.alone else _TEAM
        while team < most and team * each <= length:
            team *= 2
        team = max(1, min(int(team * self.row.team), self.target.invocations, _TEAM))
        beside = self._beside if across else 1
        rows = max(1, min(max(_GROUP // team, beside), estimate(self.count)))
        rows = min(rows, max(self.target.invocations // team, 1))
        turns = -(-known // team) if known is not None and -(-known // team) <= _UNROLLED else None
        return _Shape(team, rows, turns, across)

    def _most_across(self) -> int:
        """Invocations for one of the rows whose elements lie side by side: few, unless too few rows are there for the device."""
        wanted, most = self.target.compute_units * generic.BUSY // max(1, estimate(self.count)), _MOST_ACROSS
        while 2 * most <= wanted and 2 * most * self._beside <= min(self.target.invocations, _LARGE_GROUP):
            most *= 2
        return most

    @property
    def _beside(self) -> int:
        """How many of the rows whose elements lie side by side a work group takes at least."""
        return -(-_SIDE_BY_SIDE // (self.lanes if self.across_lanes else 1))

    @property
    def alone(self) -> bool:
        """Whether the row is nothing but a reduction."""
        return self.row.whole and len(self.row.steps) == 1

    def _each_takes(self, length: int) -> int:
        """How many elements (or vectors) an invocation takes, from half of that on. Few are fastest, unless rows are so many that
        all compute units are busy anyway: larger teams only have more to put together then.
        """
        work, units = estimate(self.count) * length, self.target.compute_units
        for each, shortest, busy in _MANY_ROWS[self.alone]:
            if length * self.lanes >= shortest and work >= each * busy * units:
                return each
        return 4

    # -- the kernel
    def write(self) -> KernelSource:
        s = self.shape
        lane = of(Var("lane", as_int(LANES))) if self.lanes > 1 else None
        r, w = Var("row", self.count), Var("w", as_int(s.team))
        e = Emitter(self.kernel, {r: "row", w: "w"}, lane)
        groups, group = linear_groups(self.count, s.rows)
        slot, member = (
            (f"int(li) % {s.rows}", f"int(li) / {s.rows}")
            if s.across
            else (f"int(li) / {s.team}", f"int(li) % {s.team}")
        )
        count = self.kernel.param(self.count)
        if s.team == 1:
            e.line(f"int row = {group} * {s.rows} + int(li);")
            e.line(f"if (row >= {count}) return;")
        else:  # nobody leaves: there are barriers ahead
            e.line(f"int slot = {slot};")
            e.line(f"int w = {member};")
            e.line(f"bool mine = {group} * {s.rows} + slot < {count};")
            e.line(f"int row = mine ? {group} * {s.rows} + slot : 0;")
        self.w = of(w) if s.team > 1 else as_int(0)
        self.mapping = unravel(
            of(r) * self.lanes + lane if self.across_lanes and lane is not None else of(r), self.outer
        )
        self.lane = lane
        for step in self.row.steps:
            self._step(e, step)
        self._finish(e)
        written = finish(
            self.kernel, self.task, e.text(), groups, (s.size, 1, 1), f"row_{self.row.steps[-1].reduction.op}"
        )
        for kind, size in self.shared.items():
            written.declare_shared(kind, f"shared_{kind}", size)
        per_element = sum(cost(step.body) + 1 for step in self.row.steps) + (
            0 if self.row.whole else cost(self.row.value)
        )
        written.flops = self.row.count * self.row.length * per_element
        return written

    def _at(self, place: Int) -> dict[Atom, Int]:
        """The axes of the row's element (or vector) number `place`."""
        if self.lane is not None and not self.across_lanes:
            place = place * LANES + self.lane
        rest: dict[Atom, Int] = {a: as_int(0) for a in (*self.row.outer, *self.row.inner)}
        return rest | self.mapping | unravel(place, self.inner)

    # -- passes over the row
    def _each(self, e: Emitter, visit: Callable[[Emitter, dict[Atom, Int], str], None]) -> None:
        """Calls visit(emitter, axes, condition) for every element of an invocation. The condition says whether the element
        exists (empty: always); if it does not, the axes are those of the last element.
        """
        s = self.shape
        if s.turns is None:
            e.line("{")
            inner = e.child()
            inner.line(f"int q = {'w' if s.team > 1 else '0'};")
            for count in (_TOGETHER, 1) if self._loads_together() else (1,):
                self._loop(inner, count, visit)
            e.lines += inner.lines
            e.line("}")
            return
        total = self.steps.value
        assert total is not None
        for k in range(s.turns):
            if (k + 1) * s.team <= total:
                visit(e, self._at(self.w + k * s.team), "")
                continue
            name = f"q{k}"
            q = self._ragged(e, name, k, total)
            visit(e, self._at(of(q)), f"w + {k * s.team} < {total}")

    def _loads_together(self) -> bool:
        """Whether an invocation asks for several elements before it computes with the first: with a loop that waits for each, a
        long row takes as long as the memory does to answer, once for each turn.
        """
        team, length = self.shape.team, self.steps.value
        if self.target.kind != "gpu" or team == 1 or length is None or length < 2 * _TOGETHER * team:
            return False
        bodies = [*(step.body for step in self.row.steps), *([] if self.row.whole else [self.row.value])]
        return sum(map(cost, bodies)) <= _SHORT_BODIES

    def _loop(self, e: Emitter, count: int, visit: Callable[[Emitter, dict[Atom, Int], str], None]) -> None:
        """From q on, as long as an invocation has `count` elements."""
        team, end = self.shape.team, self.kernel.param(self.steps)
        ahead = f" + {(count - 1) * team}" if count > 1 else ""
        e.line(f"for (; q{ahead} < {end}; q += {count * team})")
        e.line("{")
        inner = e.child()
        for k in range(count):
            name = f"q{k}" if k else "q"
            q = Var(name, self.steps)
            inner.names[q] = name
            if k:
                inner.line(f"int {name} = q + {k * team};")
            visit(inner, self._at(of(q)), "")
        e.lines += inner.lines
        e.line("}")

    def _ragged(self, e: Emitter, name: str, k: int, total: int) -> Var:
        for a, text in e.names.items():
            if text == name and isinstance(a, Var):
                return a
        q = Var(name, as_int(total))
        e.names[q] = name
        e.line(f"int {name} = min(w + {k * self.shape.team}, {total - 1});")
        return q

    def _step(self, e: Emitter, step: Step) -> None:
        op, dtype = step.reduction.op, step.body.dtype
        acc = e.fresh()
        kind = generic.kind_of(dtype, self.lanes)
        e.line(f"{kind} {acc} = {generic.initial(op, dtype, self.lanes)};")
        chunked = self.shape.turns is None and self.shape.team == 1 and op == "sum" and dtype is DType.float32
        if chunked and (self.steps.bounds[1] or 0) > 2 * _CHUNK:
            self._in_chunks(e, step, acc, kind)
        else:
            self._each(e, lambda inner, at, exists: self._fold(inner, step, acc, at, exists))
        if self.lanes > 1 and not self.across_lanes:
            acc = self._over_lanes(e, op, dtype, acc)
        if self.shape.team > 1:
            acc = self._over_team(e, op, dtype, acc)
        uniform = self.lanes > 1 and not self.across_lanes
        e.values[step.reduction.id] = acc
        if uniform:
            e.uniform |= {step.reduction.id, step.out.id}
        value = rewrite(step.value, self._at(as_int(0)))
        e.values[step.out.id] = e.scalar(value) if uniform else e.value(value)

    def _fold(self, e: Emitter, step: Step, acc: str, at: dict[Atom, Int], exists: str) -> None:
        x = e.value(rewrite(step.body, at))
        if exists:
            y = e.fresh()
            dtype = step.body.dtype
            kind = generic.kind_of(dtype, self.lanes)
            e.line(f"{kind} {y} = {exists} ? {x} : {generic.initial(step.reduction.op, dtype, self.lanes)};")
            x = y
        generic.update(e, step.reduction.op, acc, x, self.lanes > 1)

    def _in_chunks(self, e: Emitter, step: Step, acc: str, kind: str) -> None:
        """Partial sums, so that rounding errors grow with the logarithm of the length, not with the length."""
        q = Var("q", self.steps)
        total = self.kernel.param(self.steps)
        e.line(f"for (int c = 0; c < {total}; c += {_CHUNK})")
        e.line("{")
        outer = e.child()
        outer.line(f"{kind} part = {kind}(0.0f);")
        outer.line(f"for (int q = c; q < min(c + {_CHUNK}, {total}); ++q)")
        outer.line("{")
        inner = outer.child()
        inner.names[q] = "q"
        self._fold(inner, step, "part", self._at(of(q)), "")
        outer.lines += inner.lines
        outer.line("}")
        outer.line(f"{acc} += part;")
        e.lines += outer.lines
        e.line("}")

    def _over_lanes(self, e: Emitter, op: str, dtype: DType, acc: str) -> str:
        result = e.fresh()
        e.line(f"{generic.kind_of(dtype, 1)} {result} = {acc}.x;")
        for lane in "yzw":
            generic.update(e, op, result, f"{acc}.{lane}", False)
        return result

    def _over_team(self, e: Emitter, op: str, dtype: DType, acc: str) -> str:
        """Combines the team's results through shared memory, in two stages and a fixed order. (Each stage has its own memory,
        so that the barrier of the next reduction protects what is read here.)
        """
        s = self.shape
        wide = self.across_lanes
        kind = generic.kind_of(dtype, self.lanes if wide else 1)
        first = 1
        while first * first < s.team:
            first *= 2
        second = s.team // first if s.team > 8 else s.team
        first = s.team // second
        shared = f"shared_{kind}"
        self.shared[kind] = max(self.shared.get(kind, 0), s.rows * (s.team + (second if first > 1 else 0)))
        e.line(f"{shared}[slot * {s.team} + w] = {acc};")
        e.line("GroupMemoryBarrierWithGroupSync();")
        base = f"slot * {s.team}"
        if first > 1:
            e.line(f"if (w < {second})")
            e.line("{")
            inner = e.child()
            for k in range(1, first):
                generic.update(inner, op, acc, f"{shared}[{base} + w + {k * second}]", wide)
            inner.line(f"{shared}[{s.rows * s.team} + slot * {second} + w] = {acc};")
            e.lines += inner.lines
            e.line("}")
            e.line("GroupMemoryBarrierWithGroupSync();")
            base = f"{s.rows * s.team} + slot * {second}"
        result = e.fresh()
        e.line(f"{kind} {result} = {shared}[{base}];")
        for k in range(1, second):
            generic.update(e, op, result, f"{shared}[{base} + {k}]", wide)
        if first == 1:
            e.line("GroupMemoryBarrierWithGroupSync();")
        return result

    # -- results
    def _finish(self, e: Emitter) -> None:
        team = self.shape.team > 1
        if self.row.whole:
            uniform = self.lanes > 1 and not self.across_lanes
            text = e.values[self.row.steps[-1].out.id]
            self._store(e, text, self._at(as_int(0)), "mine && w == 0" if team else "", wide=not uniform)
            return

        def element(inner: Emitter, at: dict[Atom, Int], exists: str) -> None:
            text = inner.value(rewrite(self.row.value, at))
            guards = [g for g in ("mine" if team else "", exists) if g]
            self._store(inner, text, at, " && ".join(guards))

        self._each(e, element)

    def _store(self, e: Emitter, text: str, at: dict[Atom, Int], guard: str, wide: bool = True) -> None:
        out = self.task.out
        kind = stored_as(out.dtype, self.target.half)
        offset = self.layouts[out.id].offset([i.substitute(at) for i in self.row.store])
        condition = f"if ({guard}) " if guard else ""
        if self.lanes > 1 and wide:
            assert self.lane is not None
            lane = next(iter(self.lane.atoms()))
            first = offset.substitute({lane: 0})
            if lane_steps(offset, lane) != [1, 2, 3] or first % LANES != 0 or kind == "int2":
                raise NotVectorizable("the result is not stored in sequence")
            buffer = self.kernel.bind(out, vector_of(kind), written=True)
            e.line(f"{condition}{buffer}[{e.integer(first // LANES)}] = {converted(kind, text, LANES)};")
            return
        if self.lanes > 1:
            assert self.lane is not None
            offset = offset.substitute({next(iter(self.lane.atoms())): 0})
        buffer = self.kernel.bind(out, kind, written=True)
        e.line(f"{condition}{buffer}[{e.integer(offset)}] = {converted(kind, text)};")
