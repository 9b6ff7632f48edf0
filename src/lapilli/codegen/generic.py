"""Kernels from the IR alone: pointwise maps and reductions of any form."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations

from lapilli.codegen.emit import (
    CODE,
    LANES,
    Emitter,
    KernelBuilder,
    NotVectorizable,
    converted,
    lane_steps,
    literal,
    stored_as,
    vector_of,
)
from lapilli.codegen.kernel import KernelSource, finish, first_that_fits, linear_groups
from lapilli.errors import CompileError
from lapilli.ir.axes import unravel
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Load, Select, cost, ints_of, loads, reads, rewrite, select, substitute, walk
from lapilli.ir.integer import Atom, Indirect, Int, Symbol, Var, as_int, ceildiv, minimum, of, product
from lapilli.ir.node import Convolution, Matmul, Reduce
from lapilli.runtime.description import GENERIC
from lapilli.schedule.layout import Layout, estimate, in_memory, is_word, largest_read, order_of_reads
from lapilli.schedule.task import Task
from lapilli.target import Target

_CHUNK = 256  # terms that are summed before they join the total: rounding errors grow with the logarithm, not the count


def write(task: Task, layouts: Mapping[int, Layout], target: Target, sizes_as_params: bool = False) -> KernelSource:
    """The kernel of a task, four elements an invocation where that is possible. sizes_as_params: sizes become parameters."""
    forms = [(True, False), (False, False), (False, True)][not sizes_as_params :]
    order = _other_order(task, layouts, target)
    ways = [(LANES, None), (1, None)] if order is None else [(1, order)]
    return first_that_fits(
        partial(_Writer, task, dict(layouts), target, lanes, as_params, whole, taken)
        for as_params, whole in forms
        for lanes, taken in ways
    )


_READS = 4
"""Terms of a reduction from which on what is read counts for more than how results are stored."""
_NEIGHBOURS = 16
"""Results whose terms lie side by side, from which on they are worth another order of results."""


def order_by_reads(task: Task, layouts: Mapping[int, Layout]) -> list[Var] | None:
    """The axes of a reduction's results in the order in which most of what is read lies; None if neighbours belong to the same
    result.
    """
    assert task.reduction is not None and task.reduction_body is not None
    order = order_of_reads(loads(task.reduction_body), layouts)
    if not order or order[-1] in task.reduction.raxes:
        return None
    place = {a: k for k, a in enumerate(order)}
    return sorted((a for a in task.axes if a.extent != 1), key=lambda a: place.get(a, -1))


def _other_order(task: Task, layouts: Mapping[int, Layout], target: Target) -> list[Var] | None:
    """In which order neighbouring invocations read neighbours, if results in the order of their memory do not, and much is read for
    each: the sum of a gradient's parts, which is stored as a weight is.
    """
    out, reduction = task.out, task.reduction
    if target.kind != "gpu" or reduction is None or task.partial or task.within:
        return None
    if _per_word(out.dtype, target.half) > 1 or estimate(product([a.extent for a in reduction.raxes])) < _READS:
        return None
    order, stored = order_by_reads(task, layouts), in_memory(task.store, layouts[out.id])
    if not order or not stored or order[-1] is stored[-1] or estimate(order[-1].extent) < _NEIGHBOURS:
        return None
    assert task.reduction_body is not None
    main = largest_read(loads(task.reduction_body), layouts)
    assert main is not None
    return order if layouts[main.node.id].offset(main.index).step(order[-1]) == 1 else None


_FULL, BUSY = 64 * 128, 512
"""Invocations that a reduction should have at least, and for each compute unit: they wait for memory most of the time."""
_RESIDENT = 16
"""Work groups for each compute unit that are started for what is rarely computed."""
_ROW, _SHARING = 256, 32
"""On GPUs, rows of so many elements are folded by so many invocations at least, which read them together."""
_OPEN = 64
"""What an open number of elements counts as on GPUs at least: there may be many, and little is lost if there are few."""


class _Writer:
    def __init__(
        self,
        task: Task,
        layouts: dict[int, Layout],
        target: Target,
        lanes: int,
        sizes_as_params: bool,
        whole_sizes: bool,
        order: Sequence[Var] | None,
    ) -> None:
        self.task, self.target, self.lanes, self.order = task, target, lanes, order
        self.kernel = KernelBuilder(layouts, target.half, target.texel, sizes_as_params, whole_sizes)
        self.layout = layouts[task.out.id]
        self.count = product([a.extent for a in task.axes])
        self.per_word = _per_word(task.out.dtype, target.half)
        self.codes = task.out.dtype is DType.code
        if lanes > 1 and ((self.per_word > 1 and not self.codes) or self.count % LANES != 0):
            raise NotVectorizable("the number of elements is not a multiple of 4")
        if self.count == 0 or 0 in task.out.shape:
            self.count = as_int(0)
        self.along = False  # whether the invocations that share a reduction are neighbours

    def write(self) -> KernelSource:
        if self.per_word > 1 and self.lanes == 1:
            return self._packed()
        work = self.count // self.lanes
        reduction = self.task.reduction
        rare = reduction is not None and self._is_rare(reduction)
        split = 1 if reduction is None or rare else self._split(reduction, work)
        # Neighbouring invocations take neighbouring elements: of a row that is folded, or of the results.
        self.along = reduction is not None and split > 1 and self._folds_rows(reduction)
        size = (
            (min(256, self.target.invocations) if self.target.kind == "any" else 128)
            if split == 1
            else max(1, 256 // split)
        )
        most = self.target.compute_units * _RESIDENT * size
        groups, group = linear_groups(minimum(work, most) if rare else work, size)
        v = Var("t", work)
        mapping, lane = self._axes(of(v))
        names: dict[Atom, str] = {v: "t"}
        local = (size, 1, 1) if split == 1 else (split, size, 1) if self.along else (size, split, 1)
        outer = Emitter(self.kernel, names, lane)
        place = f"{group} * {size} + int(tid.{'y' if self.along else 'x'})"
        if rare:
            outer.line(f"for (int t = {place}; t < {self.kernel.param(work)}; t += {most})")
            outer.line("{")
        else:
            outer.line(f"int t = {place};")
        e = outer.child() if rare else outer
        if split == 1 and not rare:
            e.line(f"if (t >= {self.kernel.param(work)}) return;")
        self._stay_within(e, mapping)
        value = rewrite(self.task.value, mapping)
        offset = self.layout.offset([substitute(i, mapping) for i in self.task.store])
        if reduction is not None:
            accumulator = self._reduce(e, reduction, mapping, split, size)
            e.values[reduction.id] = accumulator
        self._store(e, value, offset)
        if rare:
            outer.lines += e.lines
            outer.line("}")
        written = finish(self.kernel, self.task, outer.text(), groups, local, _name(reduction))
        per_element = cost(self.task.value)
        written.flops = self.count * max(per_element, 1)
        if reduction is not None:
            assert self.task.reduction_body is not None
            if split > 1:
                written.declare_shared(self._kind(self.task.reduction_body), "shared_values", size * split)
                if reduction.op.startswith("arg"):
                    written.declare_shared("int", "shared_places", size * split)
            written.flops = (
                self.count * product([a.extent for a in reduction.raxes]) * max(1, cost(self.task.reduction_body) + 1)
            )
        return written

    def _axes(self, v: Int) -> tuple[dict[Atom, Int], Int | None]:
        """The task's axes from the invocation's index, in memory order, or in that which was asked for."""
        lane = of(Var("lane", as_int(LANES))) if self.lanes > 1 else None
        # of an update, an axis may be seen in a computed place alone
        stored = list(self.task.axes) if self.task.partial else in_memory(self.task.store, self.layout)
        index = v * self.lanes + lane if lane is not None else v
        return {a: as_int(0) for a in self.task.axes} | unravel(index, self.order or stored), lane

    def _in_sequence(self, t: Var) -> dict[Atom, Int]:
        """The task's axes from an offset in memory, for results whose elements share words.

        Raises CompileError if no order of the axes enumerates memory element by element.
        """
        first, _ = self._axes(of(t))
        if self.count == 0:
            return first
        for mapping in (first, *self._other_orders(of(t))):
            place = self.layout.offset([substitute(i, mapping) for i in self.task.store])
            if place - of(t) == 0 or _counts(place, t, [a.extent for a in self.task.axes]):
                return mapping
        raise CompileError(
            f"{self.task.out.name} shares words between elements, and no order of its axes is that of its memory"
        )

    def _other_orders(self, v: Int) -> Iterator[dict[Atom, Int]]:
        moving = [a for a in self.task.axes if a.extent != 1]
        for axes in permutations(moving):
            yield {a: as_int(0) for a in self.task.axes} | unravel(v, axes)

    def _stay_within(self, e: Emitter, mapping: dict[Atom, Int]) -> None:
        """Skips computed indices that are out of range."""
        for place, size in e.places(self.task.within, mapping):
            e.line(f"if ({place} < 0 || {place} >= {size}) return;")

    def _store(self, e: Emitter, value: Expr, offset: Int) -> None:
        out = self.task.out
        kind = stored_as(out.dtype, self.target.half)
        text = e.value(value)
        if e.lane is not None:
            lane = next(iter(e.lane.atoms()))
            first = offset.substitute({lane: 0})
            if lane_steps(offset, lane) != [1, 2, 3] or first % LANES != 0:
                raise NotVectorizable("the result is not stored in sequence")
            if kind == "int2":
                raise NotVectorizable("64-bit integers are stored one by one")
            buffer = self.kernel.bind(out, vector_of(kind), written=True)
            e.line(
                f"{buffer}[{e.integer(first // LANES)}] = {converted(kind, text, LANES, self.kernel.number(out.least))};"
            )
            return
        buffer = self.kernel.bind(out, kind, written=True)
        e.line(f"{buffer}[{e.integer(offset)}] = {converted(kind, text)};")

    # -- reductions
    def _split(self, reduction: Reduce, work: Int) -> int:
        """Invocations that share one reduction: more if there are few results and long reductions."""
        if self.target.kind == "any" or reduction.op == "argpool":
            return 1
        extent = product([a.extent for a in reduction.raxes])
        length = estimate(extent)
        if self.target.kind == "gpu" and extent.value is None and (extent.bounds[1] or _OPEN) >= _OPEN:
            length = max(length, _OPEN)
        free = max(_FULL, self.target.compute_units * BUSY) // max(1, estimate(work))
        if self.target.kind == "gpu" and length >= _ROW and self._folds_rows(reduction):
            free = max(free, _SHARING)
        split = 1
        while split < 256 and split * 2 <= free and split * 8 <= length:
            split *= 2
        return split

    def _is_rare(self, reduction: Reduce) -> bool:
        """Whether the sum is computed only if a value says so: a few invocations find out, and each takes many elements then."""
        body = self.task.reduction_body
        assert body is not None
        return self.target.kind == "gpu" and not self.task.within and bool(_needed(reduction, body)[0])

    def _folds_rows(self, reduction: Reduce) -> bool:
        """Whether most of the data read is contiguous along the reduction."""
        body = self.task.reduction_body
        assert body is not None
        main = largest_read(loads(body), self.kernel.layouts)
        if main is None or all(a.extent == 1 for a in reduction.raxes):
            return False
        last = self._folded(reduction, body)[-1]
        return self.kernel.layouts[main.node.id].offset(main.index).step(last) == 1

    def _kind(self, body: Expr) -> str:
        return kind_of(body.dtype, self.lanes)

    def _initial(self, op: str, dtype: DType) -> str:
        return initial(op, dtype, self.lanes)

    def _update(self, e: Emitter, op: str, acc: str, x: str) -> None:
        update(e, op, acc, x, self.lanes > 1)

    def _reduce(self, e: Emitter, reduction: Reduce, mapping: dict[Atom, Int], split: int, size: int) -> str:
        """Writes the loops; returns the name of the result."""
        body = self.task.reduction_body
        assert body is not None
        if reduction.op.startswith("arg") and self.lanes > 1:
            raise NotVectorizable("positions are found one by one")
        kind = self._kind(body)
        e.line(f"{kind} acc = {self._initial(reduction.op, body.dtype)};")
        if reduction.op.startswith("arg"):
            e.line(f"int place = {-1 if reduction.op == 'argpool' or split > 1 else 0}; int step = 0;")
        needed, body = _needed(reduction, body)
        conditions = [f"{e.integer(substitute(g, mapping))} >= 0" for g in needed]
        if split > 1:
            conditions.append(f"t < {self.kernel.param(self.count // self.lanes)}")
        inner = e.child() if conditions else e
        if split > 1:
            self._strided_loop(inner, reduction, body, mapping, split)
        else:
            self._nested_loops(inner, reduction, body, mapping)
        if conditions:
            e.line(f"if ({' && '.join(conditions)})")
            e.line("{")
            e.lines += inner.lines
            e.line("}")
        if split > 1:
            self._combine(e, reduction.op, split, size)
        return "place" if reduction.op.startswith("arg") else "acc"

    def _folded(self, reduction: Reduce, body: Expr) -> list[Var]:
        """The axes of the reduction, in the order in which most of the data read is stored."""
        axes = [a for a in reduction.raxes if a.extent != 1]
        if reduction.op.startswith("arg"):
            return axes
        place = {a: k for k, a in enumerate(order_of_reads(loads(body), self.kernel.layouts))}
        return sorted(axes, key=lambda a: place.get(a, -1))

    def _limits(
        self, e: Emitter, reduction: Reduce, body: Expr, mapping: dict[Atom, Int]
    ) -> tuple[dict[Var, str], Expr]:
        """Where loops may end, as text, if that is the same for all elements of an invocation; and the rest of the body."""
        lane = next(iter(e.lane.atoms())) if e.lane is not None else None
        ends, body = _ends(reduction, body, lambda end: lane is None or not reads(substitute(end, mapping), lane))
        return {a: e.integer(substitute(end, mapping)) for a, end in ends.items()}, body

    def _nested_loops(self, e: Emitter, reduction: Reduce, body: Expr, mapping: dict[Atom, Int]) -> None:
        axes = self._folded(reduction, body)
        inner = e
        opened: list[Emitter] = []
        bound = dict(mapping)
        for a in reduction.raxes:
            if a.extent == 1:
                bound[a] = as_int(0)
        limits, body = self._limits(e, reduction, body, bound)

        def limit(a: Var) -> str:
            size = self.kernel.param(a.extent)
            return f"min({size}, {limits[a]})" if a in limits else size

        sums = reduction.op == "sum" and body.dtype is DType.float32
        last = axes[-1] if axes else None
        chunked = sums and last is not None and (last.extent.bounds[1] or 2**31) > 2 * _CHUNK
        for k, a in enumerate(axes):
            name = f"r{k}"
            inner.names[a] = name
            if sums and a is last and (len(axes) > 1 or chunked):
                if chunked:
                    inner.line(f"for (int c = 0; c < {limit(a)}; c += {_CHUNK})")
                    inner.line("{")
                    opened.append(inner)
                    inner = inner.child()
                inner.line(f"{self._kind(body)} part = {self._initial('sum', body.dtype)};")
            start, end = ("c", f"min(c + {_CHUNK}, {limit(a)})") if a is last and chunked else ("0", limit(a))
            inner.line(f"for (int {name} = {start}; {name} < {end}; ++{name})")
            inner.line("{")
            opened.append(inner)
            inner = inner.child()
        part = "part" if sums and axes and (len(axes) > 1 or chunked) else "acc"
        text = inner.value(rewrite(body, bound))
        self._update(inner, reduction.op, part, text)
        for depth, outer in enumerate(reversed(opened)):
            outer.lines += inner.lines
            outer.line("}")
            if depth == 0 and part == "part":
                outer.line("acc += part;")
            inner = outer

    def _strided_loop(self, e: Emitter, reduction: Reduce, body: Expr, mapping: dict[Atom, Int], split: int) -> None:
        total = product([a.extent for a in reduction.raxes])
        q = Var("q", total)
        axes = self._folded(reduction, body)
        bound = mapping | {a: as_int(0) for a in reduction.raxes} | unravel(of(q), axes)
        end = self.kernel.param(total)
        if len(axes) == 1:
            limits, body = self._limits(e, reduction, body, mapping)
            for limit in limits.values():
                end = f"min({end}, {limit})"
        e.line(f"int end = {end};")
        e.line(f"for (int q = int(tid.{'x' if self.along else 'y'}); q < end; q += {split})")
        e.line("{")
        inner = e.child()
        inner.names[q] = "q"
        x = inner.value(rewrite(body, bound))
        if reduction.op.startswith("arg"):
            better = f"({x} {'>' if reduction.op == 'argmax' else '<'} acc || is_nan({x})) && !is_nan(acc)"
            inner.line(f"if ({better} || place < 0) {{ acc = {x}; place = q; }}")
        else:
            self._update(inner, reduction.op, "acc", x)
        e.lines += inner.lines
        e.line("}")

    def _combine(self, e: Emitter, op: str, split: int, size: int) -> None:
        """A tree reduction over the invocations of a result, in a fixed order. Of equal extrema the first one is found."""
        position = op.startswith("arg")
        keep = "shared_values[li] = acc;" + (" shared_places[li] = place;" if position else "")
        e.line(keep)
        e.line("GroupMemoryBarrierWithGroupSync();")
        step = split // 2
        part, apart = ("tid.x", 1) if self.along else ("tid.y", size)
        while step:
            e.line(f"if ({part} < {step})")
            e.line("{")
            inner = e.child()
            x = inner.fresh()
            inner.line(f"let {x} = shared_values[li + {step * apart}];")
            if position:
                at = inner.fresh()
                inner.line(f"int {at} = shared_places[li + {step * apart}];")
                first, sign = f"{at} < place", ">" if op == "argmax" else "<"
                number = f"!is_nan(acc) && ({x} {sign} acc || ({x} == acc && {first}))"
                better = f"(is_nan({x}) ? (!is_nan(acc) || {first}) : ({number}))"
                inner.line(f"if ({at} >= 0 && (place < 0 || {better})) {{ acc = {x}; place = {at}; }}")
            else:
                self._update(inner, op, "acc", x)
            inner.line(keep)
            e.lines += inner.lines
            e.line("}")
            e.line("GroupMemoryBarrierWithGroupSync();")
            step //= 2
        e.line(f"if ({part} > 0 || t >= {self.kernel.param(self.count // self.lanes)}) return;")
        if position:
            e.line("place = max(place, 0);")

    # -- results of fewer than 32 bits where the device stores whole words only
    def _packed(self) -> KernelSource:
        task, per = self.task, self.per_word
        bits = 32 // per
        words = ceildiv(self.count, per)
        groups, group = linear_groups(words, 128)
        w = Var("w", words)
        e = Emitter(self.kernel, {w: "w"})
        e.line(f"int w = {group} * 128 + int(tid.x);")
        e.line(f"if (w >= {self.kernel.param(words)}) return;")
        e.line("uint packed = 0u;")
        e.line(f"for (int k = 0; k < {per}; ++k)")
        e.line("{")
        inner = e.child()
        t = Var("t", self.count)
        inner.names[t] = "t"
        inner.line(f"int t = w * {per} + k;")
        inner.line(f"if (t >= {self.kernel.param(self.count)}) break;")
        mapping = self._in_sequence(t)
        if task.reduction is not None:
            inner.values[task.reduction.id] = self._reduce(inner, task.reduction, mapping, 1, 1)
        text = inner.value(rewrite(task.value, mapping))
        raw = {
            DType.float16: f"half_bits({text})", DType.bool: f"({text} ? 1u : 0u)",
            DType.bfloat16: f"bfloat16_bits({text})", DType.code: converted(CODE, text, least=self.kernel.number(task.out.least)),
        }.get(task.out.dtype, f"(uint({text}) & {hex((1 << bits) - 1)}u)")  # fmt: skip
        inner.line(f"packed |= {raw} << (uint(k) * {bits}u);")
        e.lines += inner.lines
        e.line("}")
        buffer = self.kernel.bind(task.out, "uint", written=True)
        e.line(f"{buffer}[w] = packed;")
        return finish(self.kernel, task, e.text(), groups, (128, 1, 1), "map_packed")


def _counts(place: Int, t: Var, extents: Sequence[Int]) -> bool:
    """Whether an index equals t, checked with numbers where algebra does not show it. extents: of the axes, which sizes may make
    empty or negative, so that nothing is stored."""
    sizes = {a for i in (place, t.extent, *extents) for a in i.atoms() if isinstance(a, Symbol)}
    if any(not isinstance(a, Symbol) and a is not t for a in place.atoms() if isinstance(a, Var | Indirect)):
        return False
    tried = 0
    for values in _some_sizes(sorted(sizes, key=str)):
        try:
            if any(e.evaluate(values) < 1 for e in extents):
                continue
            count = min(int(t.extent.evaluate(values)), 200)
            if any(place.evaluate({**values, t: n}) != n for n in range(count)):
                return False
        except ZeroDivisionError:  # no such sizes
            continue
        tried += 1
        if tried == _ENOUGH:
            break
    return tried > 0


_ENOUGH = 9
"""Sizes for which an index is checked."""


def _some_sizes(symbols: Sequence[Symbol]) -> Iterator[dict[Atom, int]]:
    """Sizes within their bounds: all alike and larger from one to the next, then any."""
    for spread in range(9):
        yield {a: min(a.min + 1 + 3**spread + k, a.min + 99 if a.max is None else a.max) for k, a in enumerate(symbols)}
    draw = random.Random(1)
    for _ in range(400):
        yield {a: draw.randint(a.min, a.min + 40 if a.max is None else min(a.max, a.min + 40)) for a in symbols}


def _needed(reduction: Reduce, body: Expr) -> tuple[list[Int], Expr]:
    """Conditions on computed values that are constant over the sum, which is 0 unless they hold; and the rest of its body."""
    if (
        reduction.op != "sum"
        or not isinstance(body, Select)
        or not isinstance(body.other, Const)
        or body.other.value != 0
    ):
        return [], body
    needed = [g for g in body.guards if all(isinstance(a, Indirect) and _is_one(a.expr) for a in g.atoms())]
    return needed, select([g for g in body.guards if g not in needed], body.then, body.other) if needed else body


def _ends(reduction: Reduce, body: Expr, fits: Callable[[Int], bool]) -> tuple[dict[Var, Int], Expr]:
    """Where loops may end, since a sum has no terms beyond; and the rest of its body. fits: whether all elements of an invocation
    have such an end.
    """
    if (
        reduction.op != "sum"
        or not isinstance(body, Select)
        or not isinstance(body.other, Const)
        or body.other.value != 0
    ):
        return {}, body
    ends: dict[Var, Int] = {}
    used: list[Int] = []
    for g in body.guards:
        inside = [a for a in reduction.raxes if reads(g, a)]
        if len(inside) == 1 and inside[0] not in ends and g.step(inside[0]) == -1:
            end = g + of(inside[0]) + 1
            if not reads(end, inside[0]) and fits(end):
                ends[inside[0]] = end
                used.append(g)
    return ends, select([g for g in body.guards if g not in used], body.then, body.other) if used else body


def _is_one(e: Expr) -> bool:
    """Whether a value is the same wherever it is computed."""
    return all(not ints_of(part) or (isinstance(part, Load) and not part.node.shape) for part in walk(e))


def kind_of(dtype: DType, lanes: int) -> str:
    base = {DType.float32: "float", DType.int32: "int", DType.bool: "bool"}[dtype]
    return base if lanes == 1 else f"{base}{lanes}"


def _name(reduction: Reduce | None) -> str:
    """Contractions without a kernel of their own say so: they may be slow."""
    if reduction is None:
        return "map"
    for kind, name in ((Matmul, "product"), (Convolution, "convolution")):
        if isinstance(reduction.contraction, kind):
            return GENERIC + name
    return f"reduce_{reduction.op}"


def initial(op: str, dtype: DType, lanes: int) -> str:
    """The initial value of a reduction."""
    low = literal(float("-inf"), dtype) if dtype is DType.float32 else "(-2147483647 - 1)"
    high = literal(float("inf"), dtype) if dtype is DType.float32 else "2147483647"
    if dtype is DType.bool:
        low, high = "false", "true"
    one, zero = literal(1, dtype), literal(0, dtype)
    start = {
        "sum": zero, "prod": one, "max": low, "min": high, "any": "false", "all": "true", "argmax": low, "argmin": high,
        "argpool": low,
    }  # fmt: skip
    return start[op] if lanes == 1 else f"{kind_of(dtype, lanes)}({start[op]})"


def update(e: Emitter, op: str, acc: str, x: str, wide: bool) -> None:
    """Folds x into an accumulator; wide: both are vectors. NaN wins."""
    if op in ("sum", "prod"):
        e.line(f"{acc} {'+' if op == 'sum' else '*'}= {x};")
    elif op in ("any", "all"):
        sign = "||" if op == "any" else "&&"
        e.line(f"{acc} = {('or' if op == 'any' else 'and') + f'({acc}, {x})' if wide else f'{acc} {sign} {x}'};")
    elif op in ("max", "min"):
        e.line(f"{acc} = {op}_any({acc}, {x});")
    elif op == "argpool":
        e.line(f"if (({x} > {acc} && !is_nan({acc})) || is_nan({x})) {{ {acc} = {x}; place = step; }}")
        e.line("step++;")
    else:
        sign = ">" if op == "argmax" else "<"
        better = f"({x} {sign} {acc} || is_nan({x})) && !is_nan({acc})"
        e.line(f"if ({better} || step == 0) {{ {acc} = {x}; place = step; }}")
        e.line("step++;")


def _per_word(dtype: DType, half: bool) -> int:
    return 1 if is_word(dtype, half) else 4 // dtype.size
