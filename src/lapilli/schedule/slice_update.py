"""Updates only the part of a state that a run changes, not, for example, a whole cache for one new entry.

Lowerings annotate values that are old ones with some elements replaced (`ir.node.Update`). Here such a value becomes an update of
the state itself: views of slices are traced back to the state, if the stored elements depend on no other elements of the state
than those that they replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lapilli.ir.axes import fresh_axes, index_of
from lapilli.ir.expr import Expr, Load, cast_to, index, load, loads, rewrite, substitute
from lapilli.ir.integer import Atom, Int, of, product
from lapilli.ir.node import Map, Node, State, Update, operands
from lapilli.schedule.layout import estimate
from lapilli.schedule.roots import chase

_LONGEST = 64
"""Reads of maps, between a state and its update, that are followed."""


def of_state(new: Map, state: State) -> Update | None:
    """A state's new value as an update of the state; None if it cannot be computed in the state's memory."""
    at = fresh_axes(new.shape)[1]
    update = _noted(new, at)
    while update is not None and _stores_what_is_there(update):
        update = _noted(update.old, at)
    if update is None or not _is_part(update.old, at, state, at):
        return None
    while (inner := _inner(update, state)) is not None:  # slices of slices are nested
        update = inner
    update = replace(update, old=state)
    return update if _needs_own(update, state) else _apart(update, state, new)


def _apart(update: Update, state: State, new: Map) -> Update | None:
    """An update whose new elements are computed before any is stored, as for entries that move within a cache. None if that takes
    as much memory as a new value of the state.
    """
    placed = _maps_of(state, [ld.node for i in update.place for ld in loads(index(i))])
    if any(ld.node.id in placed for i in update.place for ld in loads(index(i))):
        return None
    shape = tuple(a.extent for a in update.axes)
    if estimate(product(shape)) >= estimate(product(state.shape)):
        return None
    axes, at = fresh_axes(shape)
    body = rewrite(update.value, dict(zip(update.axes, at, strict=True)))
    moved = Map(shape, new.dtype, f"{new.name}_moved", new.origin, axes=axes, body=body)
    return replace(update, value=load(moved, [of(a) for a in update.axes]), apart=True)


def _noted(node: Node, at: tuple[Int, ...]) -> Update | None:
    """The update that a value is, through views that change nothing (slices of whole dimensions). at: an index of axes."""
    root, index_ = chase(node, at)
    same = index_ == at and root.shape == node.shape and root.dtype is node.dtype
    return root.update if same and isinstance(root, Map) else None


def _stores_what_is_there(update: Update) -> bool:
    """Whether an update changes nothing, as torch exports the end of `cache[1:] += x`."""
    value = update.value
    return isinstance(value, Load) and chase(value.node, value.index) == (update.old, update.place)


def _inner(update: Update, state: State) -> Update | None:
    """An update whose new elements are a slice of the state with some of its elements replaced, as an update of fewer elements."""
    value = update.value
    at = tuple(map(index_of, update.axes))
    inner = _noted(value.node, at) if isinstance(value, Load) and value.index == at else None
    if inner is None or not isinstance(value, Load) or not _is_part(inner.old, at, state, update.place):
        return None
    mapping: dict[Atom, Int] = dict(zip(update.axes, inner.place, strict=True))
    place = tuple(substitute(i, mapping) for i in update.place)
    within = tuple((substitute(i, mapping), n) for i, n in update.within)
    return Update(state, inner.axes, place, inner.value, (*inner.within, *within))


def _is_part(node: Node, at: Sequence[Int], state: State, place: Sequence[Int]) -> bool:
    """Whether the value at the index `at` is the state at the index `place`, for all values of the axes in both."""
    root, index_ = chase(node, tuple(at))
    return root is state and _same(index_, place, state)


def _same(a: Sequence[Int], b: Sequence[Int], state: State) -> bool:
    return all(i == j or n == 1 for i, j, n in zip(a, b, state.shape, strict=True))


def reads_own(read: Iterable[Load], state: State, at: Sequence[Int]) -> bool:
    """Whether those of these loads that read a state read it at the index at which the result is stored."""
    return all(_same(ld.index, at, state) for ld in read if ld.node is state)


def _needs_own(update: Update, state: State) -> bool:
    """Whether new elements depend only on those elements of the state that they replace, in all values computed in one kernel with
    them. (Other kernels read the state before.)"""
    read_first = {ld.node.id: ld.node for ld in update.loads()}
    through = _maps_of(state, list(read_first.values()))
    followed: list[int] = []  # also those that are met again

    def expanded(ld: Load) -> Expr | None:
        n = ld.node
        if n.id not in through or not isinstance(n, Map) or len(followed) > _LONGEST:
            return None
        followed.append(n.id)
        value = rewrite(n.body, dict(zip(n.axes, ld.index, strict=True)))
        return cast_to(rewrite(value, on_load=expanded), ld.dtype)

    if not through & read_first.keys():
        return True
    placed = [ld for i in update.place for ld in loads(index(i)) if ld.node.id in through]
    read = loads(rewrite(update.value, on_load=expanded))
    return not placed and len(followed) <= _LONGEST and reads_own(read, state, update.place)


def _maps_of(state: State, read: Sequence[Node]) -> set[int]:
    """The ids of a state, and of those of these values and of what they are computed from that are maps of it, or of maps of it."""
    found: dict[int, bool] = {state.id: True}
    stack: list[Node] = list(read)
    while stack:
        node = stack[-1]
        inner = operands(node) if isinstance(node, Map) else []
        unknown = [n for n in inner if n.id not in found] if node.id not in found else []
        if unknown:
            stack += unknown
        else:
            found.setdefault(node.id, any(found[n.id] for n in inner))
            stack.pop()
    return {id for id, is_map in found.items() if is_map}
