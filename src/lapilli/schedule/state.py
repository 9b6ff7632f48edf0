"""Updates states in place where possible.

`lower` gives a state's new value as a Map of its own, a copy without readers. `in_place` drops the copy if the value itself can
be computed in the state's memory; its readers then read the state (a key-value cache is not copied in every run). `settle` adds
a temporary where a kernel would overwrite elements that it still has to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lapilli.ir.axes import fresh_axes
from lapilli.ir.expr import load, loads
from lapilli.ir.node import Graph, Map, Node, State, Update, operands
from lapilli.schedule.layout import Layout, is_word
from lapilli.schedule.slice_update import of_state, reads_own
from lapilli.schedule.task import Task


def in_place(graph: Graph, half: bool) -> Graph:
    """Updates a state in place if its old value is only read to compute the new one; if that replaces some elements
    (`ir.node.Update`), only these are computed. half: whether 16-bit elements can be stored.
    """
    if not graph.stores:
        return graph
    updates: dict[int, Update] = {}
    readers: dict[int, set[int]] = {}
    for node in graph.nodes():
        for read in operands(node):
            readers.setdefault(read.id, set()).add(node.id)
    outputs = {o.id for o in graph.outputs}
    taken: set[int] = set()
    stores: list[tuple[State, Node]] = []
    for state, copy in graph.stores:
        new = _copied(copy)
        if new is not None and new.id not in taken:
            readers[new.id].discard(copy.id)
            if readers.get(state.id, set()) <= _needed_by(new, readers, outputs):
                taken.add(new.id)
                stores.append((state, new))
                update = of_state(new, state) if is_word(state.dtype, half) else None
                if update is not None:
                    updates[new.id] = update
                continue
            readers[new.id].add(copy.id)
        stores.append((state, copy))
    return replace(graph, stores=stores, updates=updates)


def _needed_by(new: Node, readers: Mapping[int, set[int]], outputs: set[int]) -> set[int]:
    """The ids of a value and of all that only it needs."""
    within = {new.id}
    todo = [new]
    while todo:  # each value is met once for each of its readers
        for node in operands(todo.pop()):
            if node.id not in within and node.id not in outputs and readers[node.id] <= within:
                within.add(node.id)
                todo.append(node)
    return within


def _copied(copy: Node) -> Map | None:
    """The Map of which this Map is a plain copy; None if there is none."""
    source = copy.view_of if isinstance(copy, Map) else None
    if source is None or not isinstance(source.node, Map) or source.node.dtype is not copy.dtype:
        return None
    return source.node


def settle(
    stores: Sequence[tuple[State, Node]], tasks: Sequence[Task], layouts: dict[int, Layout]
) -> tuple[list[Task], dict[int, State]]:
    """The tasks, and the state that each result is stored in, by id. A task that reads its state at other places than it
    writes, or another state that changes, writes to a temporary, followed by a copy.
    """
    stored = {new.id: state for state, new in stores}
    result: list[Task] = []
    for task in tasks:
        state = stored.get(task.out.id)
        result.append(task)
        if state is None or task.partial or _may_overwrite(task, state, stored):
            continue
        axes, at = fresh_axes(task.out.shape)
        value = load(task.out, at)
        copy = Map(task.out.shape, task.out.dtype, f"{task.out.name}_kept", "copy", axes=axes, body=value)
        layouts[copy.id] = layouts[task.out.id]
        result.append(Task(copy, axes, at, value, origins=["copy"], reason="state whose old value is read elsewhere"))
        stored[copy.id] = stored.pop(task.out.id)
    return result, stored


def _may_overwrite(task: Task, state: State, stored: Mapping[int, State]) -> bool:
    """Whether a task may write directly to its state. Templates must not read the state: they may compute an element twice."""
    changing = {s.id for s in stored.values()}
    read = {r.id for r in task.reads()}
    if read & (changing - {state.id}):
        return False
    if task.template is not None or task.row is not None:
        return state.id not in read
    if task.reduction_body is not None and any(ld.node is state for ld in loads(task.reduction_body)):
        return False
    return reads_own(loads(task.value), state, task.store)
