"""Kernels of recurrent layers: a loop over the steps of a sequence (ir/recurrence.py).

A team of invocations computes a sequence, each invocation its own units. The hidden state is double-buffered in shared memory,
so that each step needs one barrier. Weights are read four terms at a time, in order of units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lapilli.codegen.emit import LANES, Emitter, KernelBuilder
from lapilli.codegen.kernel import KernelSource, finish, linear_groups
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, cast_to, load, loads, rewrite
from lapilli.ir.integer import Int, Var, as_int, of
from lapilli.ir.node import Node
from lapilli.ir.recurrence import MOST_UNITS, TEAM, TERMS, Recurrence
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import QUADS

_GROUP = 64
"""Invocations of a work group that holds several sequences."""
_ROWS, _ROWS_IF_OPEN = 4, 2
"""Sequences of an invocation on drivers of type CPU; the second where their number varies, and may be 1."""


def choose(task: Task, note: Recurrence, ctx: Context) -> None:
    """Selects the template for the task of a recurrence."""
    gates = len(note.sums)
    units, width = note.unit.extent, note.initial[0].shape[1]
    weight = _packed(ctx, "steps", note.weight, width, gates, units)
    projection = None if note.projection is None else _packed(ctx, "steps", note.projection, units, 1, width)
    batch, column = of(note.batch), Var("column", width)
    initial = [ctx.seen(load(n, [batch, of(v)])) for n, v in zip(note.initial, (column, note.unit), strict=False)]
    task.template = _Loop(
        note, weight, projection, column, tuple(cast_to(e, DType.float32) for e in initial), ctx.seen(note.carried),
        None if note.hidden is None else ctx.seen(note.hidden), None if note.live is None else ctx.seen(note.live),
    )  # fmt: skip


def _packed(ctx: Context, name: str, w: Node, terms: Int, gates: int, units: Int) -> Node:
    """Weights [gates * units, terms] as [terms / 4, gates, units, 4], zero-padded."""

    def body(k4: Int, g: Int, j: Int, k: Int) -> tuple[list[Int], Expr]:
        term = k4 * LANES + k
        return [terms - 1 - term], cast_to(ctx.read(w, [g * units + j, term]), DType.float32)

    shape = (-(-(terms.value or 0) // LANES), gates, units, LANES)
    return ctx.packed(name, w, shape, body)


@dataclass(frozen=True)
class _Loop(KernelTemplate):
    note: Recurrence
    weight: Node
    projection: Node | None
    column: Var
    initial: tuple[Expr, ...]
    carried: Expr
    hidden: Expr | None
    live: Expr | None

    @property
    def operands(self) -> list[Node]:
        note = self.note
        stand_ins = {n.id for n in (*note.sums, note.old, note.new)}
        exprs = [*self.initial, *(e for e in (self.carried, self.hidden, self.live) if e is not None)]
        read = [ld.node for e in exprs for ld in loads(e) if ld.node.id not in stand_ins]
        return list({n.id: n for n in (*self.fixed, *read)}.values())

    @property
    def fixed(self) -> list[Node]:
        return [self.weight, *([self.projection] if self.projection is not None else [])]

    def reading(self, on_load: Callable[[Load], Expr | None]) -> _Loop:
        def new(e: Expr | None) -> Expr | None:
            return None if e is None else rewrite(e, on_load=on_load)

        return replace(
            self, initial=tuple(rewrite(e, on_load=on_load) for e in self.initial), carried=rewrite(self.carried, on_load=on_load),
            hidden=new(self.hidden), live=new(self.live),
        )  # fmt: skip

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return _Writer(self, task, ctx).write()


class _Writer:
    def __init__(self, loop: _Loop, task: Task, ctx: Context) -> None:
        self.loop, self.note, self.task, self.ctx = loop, loop.note, task, ctx
        self.kernel = KernelBuilder(ctx.layouts, ctx.target.half, ctx.target.texel)
        units, width = self.note.unit.extent.value, self.note.initial[0].shape[1].value
        assert units is not None and width is not None
        self.units, self.width = units, width
        self.team = min(TEAM, -(-max(units, width) // 8) * 8)
        self.quads = ctx.target.texel  # where quads are, and reading what is shared is slow
        self.rows = self._rows()
        self.slots = max(1, min(_GROUP // self.team, estimate(self.note.batch.extent) // self.rows))
        self.room = -(-width // LANES) * LANES  # of a hidden state, with zeros at the end
        self.unit_room = -(-units // LANES) * LANES if loop.projection is not None else 0
        self.turns = -(-units // self.team)

    def _rows(self) -> int:
        """Sequences per invocation, which share the weights that it reads. GPUs have enough invocations for one each."""
        if self.ctx.target.kind == "gpu":
            return 1
        batch = self.note.batch.extent.value
        rows = _ROWS_IF_OPEN if batch is None else _ROWS if batch > 2 else batch
        while rows > 1 and rows * max(self.width, self.units) > MOST_UNITS:  # work groups share little memory
            rows //= 2
        return max(rows, 1)

    def write(self) -> KernelSource:
        note, kernel = self.note, self.kernel
        per_group = self.slots * self.rows
        e = Emitter(kernel, {note.step: "s", note.unit: "j", self.loop.column: "k"})
        groups, group = linear_groups(note.batch.extent, per_group)
        count = kernel.param(note.batch.extent)
        e.line(f"int slot = int(li) / {self.team};")
        e.line(f"int member = int(li) % {self.team};")
        for r in range(self.rows):  # nobody leaves: there are barriers ahead
            e.line(f"int place{r} = {group} * {per_group} + slot * {self.rows} + {r};")
            e.line(f"bool mine{r} = place{r} < {count};")
            e.line(f"int row{r} = mine{r} ? place{r} : {count} - 1;")
        e.line(f"int from = slot * {self.rows * self.room};")
        e.line(f"int to = from + {per_group * self.room};")
        self._begin(e)
        e.line(f"for (int s = 0; s < {kernel.param(note.step.extent)}; ++s)")
        with _block(e) as body:
            self._step(body)
        size = (self.team * self.slots, 1, 1)
        written = finish(kernel, self.task, e.text(), groups, size, "recurrence")
        shared = per_group * (2 * self.room + self.unit_room)
        written.declare_shared("float", "shared_states", shared)
        if self.quads:
            written.needs = QUADS
        terms = self.width * len(note.sums) * self.units + self.unit_room * self.width
        written.flops = note.step.extent * note.batch.extent * 2 * terms
        return written

    @contextmanager
    def _row(self, e: Emitter, r: int) -> Iterator[Emitter]:
        """A block for one of the sequences of an invocation."""
        with _block(e) as inner:
            inner.names[self.note.batch] = f"row{r}"
            yield inner

    def _begin(self, e: Emitter) -> None:
        """Loads the initial states."""
        loop = self.loop
        e.line(f"for (int n = member; n < {self.room}; n += {self.team})")
        with _block(e) as each:
            each.line(f"int k = min(n, {self.width - 1});")
            for r in range(self.rows):
                with self._row(each, r) as inner:
                    text = inner.value(loop.initial[0])
                    inner.line(f"shared_states[from + {r * self.room} + n] = n < {self.width} ? {text} : 0.0f;")
                    inner.line(f"shared_states[to + {r * self.room} + n] = 0.0f;")
        if loop.projection is not None:
            first, count = 2 * self.slots * self.rows * self.room, self.rows * self.unit_room
            e.line(f"int shown = {first} + slot * {count};")
            e.line(f"for (int n = member; n < {count}; n += {self.team}) shared_states[shown + n] = 0.0f;")
        for turn in range(self.turns):
            for r in range(self.rows):
                e.line(f"float carried{turn}_{r} = 0.0f;")
                with self._row(e, r) as inner:
                    self._place(inner, turn, self.units)
                    inner.names[loop.column] = "j"
                    inner.line(f"carried{turn}_{r} = {inner.value(loop.initial[-1])};")
        e.line("GroupMemoryBarrierWithGroupSync();")

    def _place(self, e: Emitter, turn: int, count: int) -> None:
        """The unit of an iteration; surplus iterations repeat the last unit, and store nothing."""
        at = "member" if turn == 0 else f"member + {turn * self.team}"
        full = (turn + 1) * self.team <= count
        e.line(f"bool there = {'true' if full else f'{at} < {count}'};")
        e.line(f"int j = {at if full else f'min({at}, {count - 1})'};")

    def _step(self, e: Emitter) -> None:
        loop = self.loop
        if loop.live is not None:
            for r in range(self.rows):
                e.line(f"bool live{r} = false;")
                with self._row(e, r) as inner:
                    inner.line(f"live{r} = {inner.value(loop.live)};")
        for turn in range(self.turns):
            with _block(e) as inner:
                self._place(inner, turn, self.units)
                sums = self._sums(inner, loop.weight, "from", self.room, self.width, len(self.note.sums), self.units)
                for r in range(self.rows):
                    with self._row(inner, r) as own:
                        self._update(own, turn, r, sums[r])
        e.line("GroupMemoryBarrierWithGroupSync();")
        if loop.projection is not None:
            for turn in range(-(-self.width // self.team)):
                with _block(e) as inner:
                    self._place(inner, turn, self.width)
                    sums = self._sums(inner, loop.projection, "shown", self.unit_room, self.units, 1, self.width)
                    for r in range(self.rows):
                        with self._row(inner, r) as own:
                            own.line(f"float shown_now = {sums[r][0]};")
                            self._show(own, r, "shown_now")
            e.line("GroupMemoryBarrierWithGroupSync();")
        e.line("int other = from; from = to; to = other;")

    def _update(self, e: Emitter, turn: int, r: int, sums: Sequence[str]) -> None:
        """The new states of one unit of a sequence."""
        loop, note = self.loop, self.note
        carried = f"carried{turn}_{r}"
        e.values.update({n.id: text for n, text in zip(note.sums, sums, strict=True)})
        e.values[note.old.id] = carried
        e.line(f"float next = {e.value(loop.carried)};")
        if loop.hidden is None:
            self._show(e, r, "next")
            e.line(f"{carried} = next;")
            return
        e.values[note.new.id] = "next"
        e.line(f"float seen = {e.value(loop.hidden)};")
        self._keep(e, r, "next", carried, as_int(self.width) + of(note.unit))
        e.line(f"{carried} = next;")
        if loop.projection is None:
            self._show(e, r, "seen")
        else:
            e.line(f"if (there) shared_states[shown + {r * self.unit_room} + j] = seen;")

    def _show(self, e: Emitter, r: int, name: str) -> None:
        """The new hidden state's value, in a variable."""
        self._keep(e, r, name, f"shared_states[from + {r * self.room} + j]", of(self.note.unit))
        e.line(f"if (there) shared_states[to + {r * self.room} + j] = {name};")

    def _keep(self, e: Emitter, r: int, name: str, old: str, column: Int) -> None:
        """Stores a new state, or the old one if the sequence has ended."""
        if self.loop.live is not None:
            e.line(f"{name} = live{r} ? {name} : {old};")
        at = self.ctx.layouts[self.task.out.id].offset([of(self.note.step), of(self.note.batch), column])
        buffer = self.kernel.bind(self.task.out, "float", written=True)
        e.line(f"if (there && mine{r}) {buffer}[{e.integer(at)}] = {name};")

    def _sums(
        self, e: Emitter, weight: Node, start: str, room: int, terms: int, gates: int, units: int
    ) -> list[list[str]]:
        """Products of packed weights and states in shared memory for unit j, by sequence and gate. room: size of a state."""
        vectors = -(-terms // LANES)
        names = [[e.fresh() for _ in range(gates)] for _ in range(self.rows)]
        for name in (n for of_row in names for n in of_row):
            e.line(f"float4 {name} = 0.0f;")

        def add(inner: Emitter, at: str) -> None:
            weights = [inner.fresh() for _ in range(gates)]
            for g, w in enumerate(weights):
                inner.line(
                    f"float4 {w} = {self.kernel.read_vector(weight, f'(({at}) * {gates} + {g}) * {units} + j')};"
                )
            for r, of_row in enumerate(names):
                state = inner.fresh()
                first = f"{start} + {r * room} + ({at}) * {LANES}"
                if self.quads:  # a quad reads four numbers, one each
                    own = inner.fresh()
                    inner.line(f"float {own} = shared_states[{first} + (int(li) & 3)];")
                    parts = ", ".join(f"QuadReadLaneAt({own}, {k})" for k in range(LANES))
                else:
                    parts = ", ".join(f"shared_states[{first} + {k}]" for k in range(LANES))
                inner.line(f"float4 {state} = float4({parts});")
                for name, w in zip(of_row, weights, strict=True):
                    inner.line(f"{name} += {state} * {w};")

        step = TERMS // LANES
        looped = vectors // step * step
        if looped:
            e.line(f"for (int v = 0; v < {looped}; v += {step})")
            with _block(e) as inner:
                for k in range(step):
                    add(inner, f"v + {k}")
        for k in range(looped, vectors):
            add(e, str(k))
        return [[f"(({n}.x + {n}.y) + ({n}.z + {n}.w))" for n in of_row] for of_row in names]


@contextmanager
def _block(e: Emitter) -> Iterator[Emitter]:
    inner = e.child()
    e.line("{")
    yield inner
    e.lines += inner.lines
    e.line("}")
