"""Where the new values of states are computed: in the states' own memory wherever nobody needs the old value any more.

`lower` gives a state's new value as a Map of its own, a copy that nobody reads. `in_place` leaves the copy out where the value
itself may be computed in the state's memory, so that its readers read the state (a cache of keys and values is not copied in
every run). `settle` sends through memory of its own what would overwrite what it still has to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lapilli.ir.expr import Expr, load, loads
from lapilli.ir.integer import Int, of
from lapilli.ir.node import Graph, Map, Node, State, operands
from lapilli.lower.registry import fresh_axes
from lapilli.schedule.layout import Layout
from lapilli.schedule.task import Task


def in_place(graph: Graph) -> Graph:
    """The graph with new values in place of their copies, where only the new value itself reads the old one, each element
    where it is written."""
    if not graph.stores:
        return graph
    readers: dict[int, set[int]] = {}
    for node in graph.nodes():
        for read in operands(node):
            readers.setdefault(read.id, set()).add(node.id)
    taken: set[int] = set()
    stores: list[tuple[State, Node]] = []
    for state, copy in graph.stores:
        new = _copied(copy)
        if (
            new is not None
            and new.id not in taken
            and readers.get(state.id, set()) <= {new.id}
            and _reads_own(new.body, state, [of(a) for a in new.axes])
        ):
            taken.add(new.id)
            stores.append((state, new))
        else:
            stores.append((state, copy))
    return replace(graph, stores=stores)


def _copied(copy: Node) -> Map | None:
    """The Map that a Map is a plain copy of."""
    source = copy.view_of if isinstance(copy, Map) else None
    if source is None or not isinstance(source.node, Map) or source.node.dtype is not copy.dtype:
        return None
    return source.node


def settle(
    stores: Sequence[tuple[State, Node]], tasks: Sequence[Task], layouts: dict[int, Layout]
) -> tuple[list[Task], dict[int, State]]:
    """The tasks, and which of their results lie in which state. A task that reads its state at other places than it writes,
    or another state that changes, gets memory of its own; a copy follows."""
    stored = {new.id: state for state, new in stores}
    result = list(tasks)
    for task in tasks:
        state = stored.get(task.out.id)
        if state is None or _may_overwrite(task, state, stored):
            continue
        axes, at = fresh_axes(task.out.shape)
        value = load(task.out, at)
        copy = Map(task.out.shape, task.out.dtype, f"{task.out.name}_kept", "copy", axes=axes, body=value)
        layouts[copy.id] = layouts[task.out.id]
        result.append(Task(copy, axes, at, value, origins=["copy"], reason="state whose old value is read elsewhere"))
        stored[copy.id] = stored.pop(task.out.id)
    return result, stored


def _may_overwrite(task: Task, state: State, stored: Mapping[int, State]) -> bool:
    changing = {s.id for s in stored.values()}
    read = {r.id for r in task.reads()}
    if read & (changing - {state.id}):
        return False
    if task.template is not None and any(o is state for o in task.template.operands):
        return False
    if task.row is not None and state.id in read:
        return False
    if task.core_body is not None and any(ld.node is state for ld in loads(task.core_body)):
        return False
    return _reads_own(task.value, state, task.store)


def _reads_own(value: Expr, state: State, at: Sequence[Int]) -> bool:
    """Whether an expression reads a state only where its result is stored."""
    return all(
        i == j or size == 1
        for ld in loads(value)
        if ld.node is state
        for i, j, size in zip(ld.index, at, state.shape, strict=True)
    )
