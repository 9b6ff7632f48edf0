"""Decides which values get memory of their own, and which are recomputed in their readers.

Views are always folded into their readers. A pointwise value is folded into its only reader if that repeats no costly work, and
into several if it is quicker computed than read, as a mask is that positions make. The rest - outputs, reductions, operands of
contractions, other values with several readers - is realised; `reasons` says why.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lapilli.ir.axes import index_of, reshape_index
from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Select, cast_to, cost, loads, rewrite, substitute, walk
from lapilli.ir.integer import Atom, Int, Quotient, Remainder, Var, as_int, of, product
from lapilli.ir.node import (
    Attention,
    AttentionGradient,
    Constant,
    Convolution,
    DepthwiseGradient,
    Graph,
    Input,
    Map,
    Matmul,
    Node,
    Reduce,
    Update,
    nbytes,
)
from lapilli.ir.recurrence import Recurrence
from lapilli.schedule.layout import estimate
from lapilli.schedule.pages import in_pages
from lapilli.schedule.roots import chase, is_affine


@dataclass
class Realized:
    """Values to realise, producers first, with bodies that only read realised values."""

    nodes: list[Map | Reduce]
    bodies: dict[int, Expr]
    users: dict[int, list[Node]]
    updates: dict[int, Update] = field(default_factory=dict)  # of states, by id: for these, no body counts
    reasons: dict[int, str] = field(default_factory=dict)
    origins: dict[int, list[str]] = field(default_factory=dict)  # operators that a body computes
    views: dict[int, Map] = field(default_factory=dict)  # views that vanished
    decoded: dict[int, Map] = field(default_factory=dict)  # computed from codes by all readers but contractions

    def loads(self, n: Node) -> Sequence[Load]:
        """The loads of a value's body, each element once."""
        return loads(self.bodies[n.id]) if n.id not in self.updates else self.updates[n.id].loads()

    def axes(self, n: Map | Reduce) -> tuple[Var, ...]:
        """The axes of the domain over which a value is computed, without reduction axes."""
        return n.axes if n.id not in self.updates else self.updates[n.id].axes

    def rewrite(self, n: Map | Reduce, on_load: Callable[[Load], Expr | None]) -> None:
        """Replaces loads in a value's body."""
        update = self.updates.get(n.id)
        if update is None:
            self.bodies[n.id] = rewrite(self.bodies[n.id], on_load=on_load)
            return
        place = tuple(substitute(i, on_load=on_load) for i in update.place)
        within = tuple((substitute(i, on_load=on_load), size) for i, size in update.within)
        value = rewrite(update.value, on_load=on_load)
        self.updates[n.id] = replace(update, place=place, within=within, value=value)


READS = 12  # the most buffers that a value and its reader may read together as one kernel, ...
MOST_READS = 24  # ... and the reader with all that vanishes into it
_FEW_STEPS = 8
"""Operations up to which each of several readers computes a value that is made of ..."""
_FEWER = 4
"""... so many times fewer elements than it has."""
_FEW_PARTS = 4
"""Parts up to which a concatenation computes them; of more, each is computed in its place of the result by a kernel of its own
(`schedule/concatenate.py`)."""


def realize(graph: Graph) -> Realized:
    nodes = graph.nodes()
    forced = _operand_copies(nodes)
    attended = {x.id for n in nodes for x in _attended(n)}
    outputs = {o.id for o in graph.results}
    apart = {ld.node.id for u in graph.updates.values() if u.apart for ld in loads(u.value)}
    views = {
        n.id: n for n in nodes if isinstance(n, Map) and n.view_of is not None and n.id not in outputs | forced | apart
    }
    result = Realized([], {}, {}, dict(graph.updates), views=views)

    def inline(n: Map, at: Load) -> Expr:
        value = rewrite(result.bodies[n.id], dict(zip(n.axes, at.index, strict=True)))
        return cast_to(value, at.dtype)  # bools are stored as integers

    kept: list[Map | Reduce] = []
    for n in nodes:
        if isinstance(n, Map | Reduce):
            result.bodies[n.id] = n.body
            result.rewrite(n, lambda ld: inline(views[ld.node.id], ld) if ld.node.id in views else None)
            if n.id not in views:
                kept.append(n)

    users: dict[int, list[Node]] = defaultdict(list)
    for n in kept:
        for read in {ld.node.id: ld.node for ld in result.loads(n)}.values():
            users[read.id].append(n)

    result.users = users
    inlined: dict[int, Map] = {}
    reads = {n.id: {ld.node.id for ld in result.loads(n)} for n in kept}  # with what has vanished into them so far
    for n in kept:
        here = inlined if _is_contraction(n) else inlined | result.decoded
        swallowed = dict.fromkeys(ld.node.id for ld in result.loads(n) if ld.node.id in here)
        result.origins[n.id] = [o for i in swallowed for o in result.origins[i]] + [n.origin]
        result.rewrite(n, lambda ld, here=here: inline(here[ld.node.id], ld) if ld.node.id in here else None)  # type: ignore[misc]
        if isinstance(n, Map) and n.id not in outputs and _expands_constants(n, result):
            result.decoded[n.id] = n
            if not any(map(_is_contraction, users[n.id])):
                continue
            reason: str | None = "weights of a contraction"
        elif n.id in attended:
            reason = "operand of attention"
        elif n.id in apart:
            reason = "read before its state changes"
        else:
            reason = _reason(n, result, outputs, forced, reads)
        if reason is None:
            assert isinstance(n, Map)
            inlined[n.id] = n
            for reader in users[n.id]:
                reads[reader.id] = (reads[reader.id] - {n.id}) | reads[n.id]
        else:
            result.nodes.append(n)
            result.reasons[n.id] = reason
    # users of realised values, after inlining
    final: dict[int, list[Node]] = defaultdict(list)
    for real in result.nodes:
        for read in {ld.node.id: ld.node for ld in result.loads(real)}.values():
            final[read.id].append(real)
    result.users = final
    return result


def _reason(
    n: Map | Reduce, found: Realized, outputs: set[int], forced: set[int], together: dict[int, set[int]]
) -> str | None:
    """Why a value is realised; None if it is folded into its readers. together: what each value reads, including through folded
    values.
    """
    if n.id in found.updates:
        return "state, where it changes"
    if n.id in outputs:
        return "output"
    if isinstance(n, Reduce):
        return "reduction"
    if n.id in forced:
        return "operand of a contraction, not strided"
    body = found.bodies[n.id]
    readers = found.users[n.id]
    reads = loads(body)
    if not reads:
        return None
    if len(readers) > 1:
        return None if _is_quick(n, body, readers, together) else f"read by {len(readers)}"
    if not readers:
        return "output"
    reader = readers[0]
    assert isinstance(reader, Map | Reduce)
    both = {ld.node.id for ld in reads} | {ld.node.id for ld in found.loads(reader)}
    if len(both) > READS or len(together[n.id] | together[reader.id]) > MOST_READS:
        return f"its reader would read more than {READS} buffers"
    at = {ld.index for ld in found.loads(reader) if ld.node is n}
    over = found.axes(reader)
    aligned = len(at) == 1 and _reads_once(n, next(iter(at)), over)
    if any(_is_core(ld, n, found.users) for ld in reads):  # the epilogue of a reduction
        if isinstance(reader, Map) and aligned:
            return None
        return "epilogue"
    work = cost(body) + _guards(body)
    if isinstance(reader, Reduce):
        if reader.contraction is not None:
            return "operand of a contraction"
        repeats = estimate(product([a.extent for a in reader.axes + reader.raxes])) / max(1, estimate(product(n.shape)))
        return None if repeats <= 1 or work <= 2 else "would be computed repeatedly by a reduction"
    grows = estimate(product([a.extent for a in over])) > estimate(product(n.shape)) or len(at) > 1
    parts = _guards(body) + _guards(found.bodies[reader.id]) + 1
    if grows and len(at) == 1 and parts <= _FEW_PARTS and _is_part(next(iter(at)), over):
        return None
    return None if not grows or work <= 2 else "would be computed repeatedly by a broadcast"


def _is_quick(n: Map, body: Expr, readers: Sequence[Node], together: dict[int, set[int]]) -> bool:
    """Whether a value, broadcast from few elements by few operations, is sooner computed by each of its readers than read."""
    reads = {ld.node.id: ld.node for ld in loads(body)}
    given = sum(estimate(product(r.shape)) for r in reads.values())
    if given * _FEWER > estimate(product(n.shape)) or cost(body) + _guards(body) > _FEW_STEPS:
        return False
    if any(isinstance(r, Reduce) for r in readers):  # which may read an element many times
        return False
    return all(len(together[n.id] | together[r.id]) <= READS for r in readers)


def _is_contraction(n: Node) -> bool:
    return isinstance(n, Reduce) and n.contraction is not None


def _expands_constants(n: Map, found: Realized) -> bool:
    """Whether a value is computed from constants alone (or parts of weights that are given), codes of bytes, and larger than they
    are. It has no memory: whatever reads it computes it, and kernels of contractions decode it.
    """
    read = {ld.node.id: ld.node for ld in loads(found.bodies[n.id])}.values()
    if not any(r.dtype in (DType.int8, DType.uint8) for r in read) or not all(map(is_weight, read)):
        return False
    size = nbytes(n).value
    return size is not None and size > sum(nbytes(r).value or 0 for r in read)


def is_weight(node: Node) -> bool:
    """Whether it is a constant, or a part of a quantized weight."""
    return isinstance(node, Constant) or (isinstance(node, Input) and node.decoded)


def _attended(n: Node) -> list[Node]:
    """The operands of attention in memory, before batch dimensions are broadcast, seen through views."""
    note = n.contraction if isinstance(n, Reduce) else None
    if not isinstance(note, Attention | AttentionGradient):
        return []
    operands = (note.q, note.k, note.v, *((note.grad,) if isinstance(note, AttentionGradient) else ()))
    roots = [chase(x, (as_int(0),) * x.rank)[0] for x in operands]
    return [root for root in roots if isinstance(root, Map)]


def _is_core(ld: Load, n: Map, users: dict[int, list[Node]]) -> bool:
    return isinstance(ld.node, Reduce) and len(users[ld.node.id]) == 1 and _reads_once(ld.node, ld.index, n.axes)


def _reads_once(node: Map | Reduce, index: tuple[Int, ...], axes: Sequence[Var]) -> bool:
    """Whether a reader over some axes reads each element of a value exactly once, in any order and any shape."""
    place = [*map(index_of, node.axes)]
    return is_permutation(node, index, axes) or invert(axes, index, place, node.axes) is not None


def is_permutation(node: Node, index: tuple[Int, ...], axes: Sequence[Var]) -> bool:
    """Whether a reader over some axes reads each element of a value exactly once: every index is one of the axes with the same
    extent, or 0 in a dimension of size 1, and no axis is left out.
    """
    seen: set[Var] = set()
    for i, size in zip(index, node.shape, strict=True):
        if i == 0 and size == 1:
            continue
        atom = as_var(i)
        if atom is None or atom in seen or atom not in axes or atom.extent != size:
            return False
        seen.add(atom)
    return all(a in seen or a.extent == 1 for a in axes)


def _guards(e: Expr) -> int:
    return sum(isinstance(x, Select) for x in walk(e))


def _is_part(index: tuple[Int, ...], axes: Sequence[Var]) -> bool:
    """Whether a reader over some axes reads each element at most once, moved by constants: a part of a concatenation, as the
    halves of a rotation are. Its guards keep the others from being computed.
    """
    seen: set[Var] = set()
    for i in index:
        atom = as_var(i - i.const)
        if i.value is None and (atom is None or atom in seen or atom not in axes):
            return False
        seen |= {atom} if atom is not None else set()
    return all(a in seen or a.extent == 1 for a in axes)


def invert(
    axes: Sequence[Var], index: Sequence[Int], place: Sequence[Int], space: Sequence[Var]
) -> dict[Atom, Int] | None:
    """Expresses a map's axes by the axes `space` of the value that it reads, so that `index`, at which it reads, becomes
    `place`; None if it does not read each element of the space exactly once. Axes that are not plain indices are matched by
    number of elements, as in a reshape with or without a transposition, or divided first, as where images are made of smaller ones.
    """
    found = _matched(axes, index, place, space)
    return found if found is not None else _divided(axes, index, place, space)


_NEIGHBOURS = 4
"""Columns that kernels of products and convolutions store at once."""


def _divided(
    axes: Sequence[Var], index: Sequence[Int], place: Sequence[Int], space: Sequence[Var]
) -> dict[Atom, Int] | None:
    """The same with each axis that is only read as a / n and a % n for axes of its own. Neighbours of the space that would be apart
    then are left to kernels that gather.
    """
    sizes: dict[Var, set[int]] = {}
    for part in (p for i in index for monomial, _ in i.terms for p in monomial):
        if isinstance(part, Quotient | Remainder) and (a := as_var(part.x)) is not None and a in axes:
            sizes.setdefault(a, set()).add(part.y.value or 0)
    parts: dict[Var, tuple[Var, Var, int]] = {}
    for a, found in sizes.items():
        n = found.pop()
        if found or n < 2 or a.extent // n * n != a.extent:
            return None
        parts[a] = Var(f"{a.name}_quotient", a.extent // n), Var(f"{a.name}_remainder", as_int(n)), n
    if not parts:
        return None
    whole: dict[Atom, Int] = {a: of(first) * n + of(second) for a, (first, second, n) in parts.items()}
    read = [i.substitute(whole) for i in index]
    remainders = [second for _, second, _ in parts.values()]
    if any((i.step(r) or 0) % _NEIGHBOURS for i in read for r in remainders):
        return None
    inner = [v for a in axes for v in (parts[a][:2] if a in parts else (a,))]
    mapping = _matched(inner, read, place, space)
    if mapping is None:
        return None
    return {a: whole[a].substitute(mapping) if a in parts else mapping[a] for a in axes}


def _matched(
    axes: Sequence[Var], index: Sequence[Int], place: Sequence[Int], space: Sequence[Var]
) -> dict[Atom, Int] | None:
    """As `invert`, without dividing axes."""
    mapping: dict[Atom, Int] = {a: as_int(0) for a in axes if a.extent == 1}
    used: set[Var] = set()
    for i, p in zip(index, place, strict=True):
        a, o = as_var(i), as_var(p)
        if (
            a is not None
            and o is not None
            and a in axes
            and a not in mapping
            and a.extent == o.extent
            and o not in used
        ):
            mapping[a] = of(o)
            used.add(o)
    rest = [a for a in axes if a not in mapping]
    left = [o for o in space if o not in used and o.extent != 1]
    if product([a.extent for a in rest]) != product([o.extent for o in left]):
        return None
    for order, walked in _orders(rest, dict(zip(place, index, strict=True)), left):
        at = reshape_index([of(o) for o in walked], [o.extent for o in walked], [a.extent for a in order])
        found = mapping | dict(zip(order, at, strict=True))
        if [i.substitute(found) for i in index] == list(place):
            return found
    return None


def _orders(axes: list[Var], read: Mapping[Int, Int], space: list[Var]) -> Iterator[tuple[list[Var], list[Var]]]:
    """Axes and the space in the orders in which one may be a reshape of the other: as they come, or with a transposition after it
    or before. read: by axis of the space, the index at which it is read.
    """
    yield axes, space
    if any(of(o) not in read for o in space):
        return
    index = [read[of(o)] for o in space]
    flat = as_int(0)
    for i, o in zip(index, space, strict=True):
        flat = flat * o.extent + i
    steps = {a: flat.step(a) for a in axes}
    if None not in steps.values() and (walked := sorted(axes, key=lambda a: -(steps[a] or 0))) != axes:
        yield walked, space
    counts = [_count_of(i, axes, space) for i in index]
    if None not in counts:
        yield axes, [o for _, o in sorted(zip(counts, space, strict=True), key=lambda pair: pair[0] or (0, 0))]


def _count_of(index: Int, axes: list[Var], space: list[Var]) -> tuple[int, int] | None:
    """Which axis an index counts, and minus how many of its steps it takes to go on by one; None if that is not known."""
    read = [k for k, a in enumerate(axes) if a in index.atoms()]
    if len(read) != 1 or any(o.extent.value is None for o in space):
        return None
    sizes = [o.extent.value or 1 for o in space]
    possible = {math.prod(some) for n in range(len(sizes)) for some in itertools.combinations(sizes, n)}
    for count in sorted(possible):
        if index.substitute({axes[read[0]]: count}) != 0:
            return read[0], -count
    return None


def as_var(i: Int) -> Var | None:
    """The axis variable, if the expression is one."""
    if i.const == 0 and len(i.terms) == 1 and i.terms[0][1] == 1 and len(i.terms[0][0]) == 1:
        atom = i.terms[0][0][0]
        return atom if isinstance(atom, Var) else None
    return None


def operand_indices(r: Reduce) -> list[tuple[Node, tuple[Int, ...]]]:
    """The operands of a contraction with the indices at which it reads them (for images: fresh ones)."""
    contraction = r.contraction
    if isinstance(contraction, Matmul):
        return [(contraction.lhs, contraction.lhs_index), (contraction.rhs, contraction.rhs_index)]
    if isinstance(contraction, Recurrence | Sampling):
        return []  # which are read as they lie
    if isinstance(contraction, DepthwiseGradient):
        images = [contraction.wide, contraction.narrow]
    else:
        assert isinstance(contraction, Convolution)
        images = [contraction.x]
    return [(x, tuple(of(Var(f"x{d}", size)) for d, size in enumerate(x.shape))) for x in images]


def _operand_copies(nodes: list[Node]) -> set[int]:
    """Views of a contraction's operands that strides cannot describe, and computed filters: these get memory."""
    forced: set[int] = set()
    paged = {x for n in nodes for x in _of_pages(n)}
    for n in nodes:
        if isinstance(n, Reduce) and n.contraction is not None:
            if isinstance(n.contraction, Convolution):
                weight = n.contraction.weight
                root, _ = chase(weight, tuple(as_int(0) for _ in weight.shape))
                if isinstance(root, Map):  # a view is read where it is packed
                    forced.add(root.id)
            for operand, index in operand_indices(n):
                root, at = chase(operand, index)
                if (
                    operand.id not in paged
                    and operand is not root
                    and (not is_affine(at) or any(_scaled(i) for i in at))
                ):
                    forced.add(operand.id)
    return forced


def _of_pages(n: Node) -> set[int]:
    """The operands of attention that lie in pages of a cache: its kernels read them there."""
    if not isinstance(n, Reduce) or not isinstance(n.contraction, Attention) or in_pages(n.contraction) is None:
        return set()
    scores, _ = chase(n.contraction.scores, (as_int(0),) * n.contraction.scores.rank)
    products = [ld.node for ld in loads(scores.body)] if isinstance(scores, Map) else [scores]
    notes = [x.contraction for x in (n, *products) if isinstance(x, Reduce) and isinstance(x.contraction, Matmul)]
    return {note.rhs.id for note in notes}


def _scaled(i: Int) -> bool:
    """Whether an index has a negative stride, which no kernel template supports."""
    return any(c < 0 for _, c in i.terms)
