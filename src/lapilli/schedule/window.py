"""The part of a state that a run changes: only that is computed and stored, not the whole cache for one new entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lapilli.ir.expr import Const, Expr, Index, Load, Op, Select, index, loads, rewrite, substitute
from lapilli.ir.integer import Atom, Indirect, Int, Var, as_int, maximum, minimum, of
from lapilli.ir.node import State
from lapilli.schedule.task import Task


def window(task: Task, state: State) -> Task | None:
    """The task over the elements that change, for a task that computes a state's new value in the state's memory and leaves
    the other elements what they were; None where it is of no such form."""
    if any(s != (0 if a.extent == 1 else of(a)) for s, a in zip(task.store, task.axes, strict=True)):
        return None
    if task.reduction is not None:
        return _entries(task, state)
    found = None
    while (inner := _slice(found or task, state)) is not None:  # slices of slices are nested
        found = replace(inner, whole=task)
    return found


def _slice(task: Task, state: State) -> Task | None:
    """new[i] if first <= i <= last else state[i]"""
    value = task.value
    if not isinstance(value, Select) or not _is_old(value.other, state, task):
        return None
    first: dict[Var, Int] = {a: as_int(0) for a in task.axes}
    last: dict[Var, Int] = {a: a.extent - 1 for a in task.axes}
    for guard in value.guards:
        axis = next((a for a in task.axes if a in guard.atoms()), None)
        if axis is None:
            return None
        if _is_fixed(bound := of(axis) - guard):
            first[axis] = maximum(first[axis], bound)
        elif _is_fixed(bound := guard + of(axis)):
            last[axis] = minimum(last[axis], bound)
        else:
            return None
    axes = tuple(
        a if first[a] == 0 and last[a] == a.extent - 1 else Var(a.name, maximum(last[a] - first[a] + 1, 0))
        for a in task.axes
    )
    mapping: dict[Atom, Int] = {
        a: first[a] + (0 if w.extent == 1 else of(w)) for a, w in zip(task.axes, axes, strict=True)
    }
    return _over(task, axes, mapping, value.then)


def _is_fixed(i: Int) -> bool:
    """Whether an integer depends on sizes alone."""
    return not any(isinstance(a, Var | Indirect) for a in i.atoms())


def _entries(task: Task, state: State) -> Task | None:
    """new[i] of the last entry r that goes to place[r] = i, else state[i]: entry by entry instead. (Of several entries for one
    place any may win, as in torch.)"""
    reduction, chosen = task.reduction, task.value
    assert reduction is not None and task.reduction_body is not None
    if (
        reduction.op != "max"
        or len(reduction.raxes) != 1
        or not _is_where(chosen)
        or not _is_where(task.reduction_body)
    ):
        return None
    (entry,) = reduction.raxes
    found, new, old = chosen.args
    same, number, none = task.reduction_body.args
    r = as_int(0) if entry.extent == 1 else of(entry)
    if not (_is_old(old, state, task) and _is_reached(found, task) and number is index(r) and _equals(none, -1)):
        return None
    place = _place(same, task)
    if place is None:
        return None
    axis, at = place
    axes = tuple(entry if a is axis else a for a in task.axes)
    value = rewrite(new, on_load=lambda ld: index(r) if ld.node is reduction else None)
    return replace(_over(task, axes, {axis: at}, value), within=((at, axis.extent),))


def _is_where(e: Expr) -> bool:
    return isinstance(e, Op) and e.op == "where"


def _is_old(e: Expr, state: State, task: Task) -> bool:
    """Whether an expression is what was there before, where the task stores."""
    return isinstance(e, Load) and e.node is state and reads_own(e, state, task.store)


def reads_own(value: Expr, state: State, at: Sequence[Int]) -> bool:
    """Whether an expression reads a state only where its result is stored."""
    return all(
        i == j or size == 1
        for ld in loads(value)
        if ld.node is state
        for i, j, size in zip(ld.index, at, state.shape, strict=True)
    )


def _equals(e: Expr, value: int) -> bool:
    return isinstance(e, Const) and e.value == value


def _is_reached(e: Expr, task: Task) -> bool:
    """Whether an expression asks if any entry goes to an element."""
    if not isinstance(e, Op) or e.op != "ge":
        return False
    return isinstance(e.args[0], Load) and e.args[0].node is task.reduction and _equals(e.args[1], 0)


def _place(e: Expr, task: Task) -> tuple[Var, Int] | None:
    """An axis and where it must be, from `place == axis`."""
    if isinstance(e, Op) and e.op == "and":
        a, b = e.args
        return _place(b, task) if isinstance(a, Const) and a.value is True else None
    if not isinstance(e, Op) or e.op != "eq":
        return None
    sides = [x.value for x in e.args if isinstance(x, Index)]
    for axis in task.axes:
        for place, other in zip(sides, reversed(sides), strict=True):
            if len(sides) == 2 and other == of(axis) and not place.atoms() & set(task.axes):
                return axis, place
    return None


def _over(task: Task, axes: tuple[Var, ...], mapping: Mapping[Atom, Int], value: Expr) -> Task:
    """The task over other axes."""
    store = tuple(substitute(i, mapping) for i in task.store)
    changed = rewrite(value, mapping)
    reason = "state, where it changes"
    return Task(task.out, axes, store, changed, origins=task.origins, reason=reason, whole=task)
