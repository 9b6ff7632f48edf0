"""Maps on GPUs that store along another axis than they read along: a copy from channels first to channels last, say.

Whichever order invocations have, the one or the other goes to a place far away for each element, and a whole sector of memory is
fetched for it. So a work group computes a square tile in the order of what is read, and stores it in the order of the result.
Between the two it lies in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lapilli.codegen.emit import Emitter, KernelBuilder, converted, stored_as
from lapilli.codegen.kernel import KernelSource, finish, first_that_fits, linear_groups
from lapilli.ir.axes import unravel
from lapilli.ir.expr import cost, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, ceildiv, of, product
from lapilli.schedule.layout import Layout, estimate, in_memory, is_word, largest_read
from lapilli.schedule.task import Task
from lapilli.target import Target

_TILE = 32  # elements along either axis
_LINES = 8  # which a work group computes at once, if it may have so many invocations
_SHORTEST = 16  # axis: the tile's others are idle, and a sector has no more halves
_FEWEST = 1 << 14  # elements: fewer take no longer than a dispatch does


@dataclass(frozen=True)
class TurnedMap:
    """The axes of a map, outermost first. stored: those along which its result lies; read: those along which it reads; outer: all
    others.
    """

    outer: Sequence[Var]
    stored: Sequence[Var]
    read: Sequence[Var]


def turned_map(task: Task, layouts: Mapping[int, Layout], target: Target) -> TurnedMap | None:
    """How a map turns what it reads; None if it does not, or not enough of it for that to count."""
    if target.kind != "gpu" or task.reduction is not None or task.partial or task.within:
        return None
    if not task.value.dtype.is_float or not is_word(task.out.dtype, target.half) or task.out.dtype.size > 4:
        return None
    if 0 in task.out.shape or estimate(product([a.extent for a in task.axes])) < _FEWEST:
        return None
    main = largest_read(loads(task.value), layouts)
    if main is None:
        return None
    at, store = layouts[main.node.id].offset(main.index), layouts[task.out.id].offset(task.store)
    axes = [a for a in task.axes if a.extent != 1]
    if estimate(product(main.node.shape)) * 2 < estimate(product([a.extent for a in axes])):
        return None  # what is read again and again comes from a cache
    stored, read = _along(store, at, axes), _along(at, store, axes)
    if not stored or not read or set(stored) & set(read):
        return None
    if min(estimate(product([a.extent for a in some])) for some in (stored, read)) < _SHORTEST:
        return None
    outer = [a for a in in_memory(task.store, layouts[task.out.id]) if a not in stored and a not in read]
    return TurnedMap(outer, stored, read) if len(outer) + len(stored) + len(read) == len(axes) else None


def _along(first: Int, other: Int, axes: Sequence[Var]) -> list[Var]:
    """The axes that a place moves along, outermost first, as far as they are one axis for the other place, too. Along the
    innermost, the other place may move as it likes.
    """
    found: list[Var] = []
    step, pace = as_int(1), None
    while True:
        a = next((a for a in axes if a not in found and _step(first, a) == step), None)
        own = _step(other, a) if a is not None else None
        if a is None or (found and (own is None or own != pace)):
            return found
        found.insert(0, a)
        step, pace = step * a.extent, own * a.extent if own is not None else None


def _step(i: Int, a: Var) -> Int | None:
    """By how much a place moves along an axis, if by the same everywhere."""
    pace = i.substitute({a: of(a) + 1}) - i
    return None if a in pace.atoms() or any(isinstance(x, Var) for x in pace.atoms()) else pace


def write(task: Task, found: TurnedMap, layouts: Mapping[int, Layout], target: Target) -> KernelSource:
    """The kernel of a map that turns what it reads."""
    return first_that_fits(partial(_Writer, task, found, layouts, target, whole) for whole in (False, True))


class _Writer:
    lanes = 1

    def __init__(
        self, task: Task, found: TurnedMap, layouts: Mapping[int, Layout], target: Target, whole_sizes: bool
    ) -> None:
        self.task, self.found, self.target = task, found, target
        self.kernel = KernelBuilder(dict(layouts), target.half, target.texel, whole_sizes=whole_sizes)
        self.store = layouts[task.out.id].offset(task.store)
        self.lines = _LINES
        while self.lines > 1 and self.lines * _TILE > target.invocations:
            self.lines //= 2

    def write(self) -> KernelSource:
        kernel, found, out = self.kernel, self.found, self.task.out
        outer, stored, read = (product([a.extent for a in axes]) for axes in (found.outer, found.stored, found.read))
        down, across = ceildiv(stored, _TILE), ceildiv(read, _TILE)
        groups, group = linear_groups(outer * down * across, 1)
        g = Var("g", outer * down * across)
        e = Emitter(kernel, {g: "g"})
        e.line(f"int g = {group};")
        if groups[1] != 1:  # more than one row of work groups, of which the last may have too many
            e.line(f"if (g >= {kernel.param(outer * down * across)}) return;")
        e.line(f"int first_s = {e.integer(of(g) // across % down * _TILE)};")
        e.line(f"int first_r = {e.integer(of(g) % across * _TILE)};")
        self.outer = {a: as_int(0) for a in self.task.axes} | unravel(of(g) // (down * across), found.outer)
        end_s, end_r = kernel.param(stored), kernel.param(read)
        # All loads stand before the first store, so that they are under way together. Beyond an end the last element is computed.
        r = self._variable(e, "r", read, f"min(first_r + int(tid.x), {end_r} - 1)")
        computed: list[str] = []
        for k in range(0, _TILE, self.lines):
            s = self._variable(e, f"s{k}", stored, f"min(first_s + int(tid.y) + {k}, {end_s} - 1)")
            computed.append(e.value(rewrite(self.task.value, self._at(s, r))))
        for k, text in enumerate(computed):
            e.line(f"shared_tile[(int(tid.y) + {k * self.lines}) * {_TILE + 1} + int(tid.x)] = {text};")
        e.line("GroupMemoryBarrierWithGroupSync();")
        kind = stored_as(out.dtype, self.target.half)
        buffer = kernel.bind(out, kind, written=True)
        s = self._variable(e, "s", stored, "first_s + int(tid.x)")
        for k in range(0, _TILE, self.lines):
            r = self._variable(e, f"r{k + 1}", read, f"first_r + int(tid.y) + {k}")
            place = e.integer(self.store.substitute(self._at(s, r)))
            text = converted(kind, f"shared_tile[int(tid.x) * {_TILE + 1} + int(tid.y) + {k}]")
            e.line(f"if (s < {end_s} && r{k + 1} < {end_r}) {buffer}[{place}] = {text};")
        written = finish(kernel, self.task, e.text(), groups, (_TILE, self.lines, 1), "turned_map")
        written.declare_shared("float", "shared_tile", _TILE * (_TILE + 1))
        written.flops = product([a.extent for a in self.task.axes]) * max(cost(self.task.value), 1)
        return written

    def _variable(self, e: Emitter, name: str, extent: Int, value: str) -> Int:
        e.line(f"int {name} = {value};")
        made = Var(name, extent)
        e.names[made] = name
        return of(made)

    def _at(self, s: Int, r: Int) -> dict[Atom, Int]:
        """The axes at a place of the tile."""
        return self.outer | unravel(s, self.found.stored) | unravel(r, self.found.read)
