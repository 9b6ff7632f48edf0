"""The schedule stage: from a graph and a target to ordered kernels with buffers. In between, `codegen/select.py` chooses the
kernel of each task, and `copies.py` creates the copies of operands that kernels declare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lapilli.ir.node import Graph, Map, Node, State
from lapilli.schedule.assign import assign
from lapilli.schedule.concatenate import Window, write_into_concat
from lapilli.schedule.fuse_reductions import fuse_rows
from lapilli.schedule.layout import Layout, is_row_major
from lapilli.schedule.order import Order, order
from lapilli.schedule.realize import Realized, realize
from lapilli.schedule.rounded_inputs import rounded_inputs
from lapilli.schedule.state import in_place, settle
from lapilli.schedule.task import Task, make_tasks
from lapilli.target import Target


@dataclass(frozen=True)
class Draft:
    """Tasks and the layouts of their values, before kernels are selected."""

    target: Target
    graph: Graph
    tasks: list[Task]
    layouts: dict[int, Layout]
    views: dict[int, Map]
    windows: dict[int, Window]  # values stored as parts of others, by id

    @property
    def kept(self) -> set[int]:
        """Values that are stored whatever the tasks read: results, and values in parts of others, by id."""
        results = {r.id for r in self.graph.results}
        return results | self.windows.keys() | {w.whole.id for w in self.windows.values()}

    def results(self) -> set[int]:
        """Values without readers among the tasks, by id."""
        return {t.out.id for t in self.tasks} - {r.id for t in self.tasks for r in t.reads()}


@dataclass(frozen=True)
class Schedule:
    target: Target
    graph: Graph
    tasks: list[Task]
    layouts: dict[int, Layout]
    views: dict[int, Map]
    order: Order
    stored: dict[int, State]  # values that are new values of states, by id
    windows: dict[int, Window]  # values stored as parts of others, by id
    rounded: frozenset[int] = frozenset()  # inputs rounded to float16, by id

    def memory(self, node: Node) -> Node:
        """The value whose memory holds a value."""
        return memory_of(node, self.windows, self.stored)


def memory_of(node: Node, windows: Mapping[int, Window], stored: Mapping[int, State]) -> Node:
    """The value whose memory holds a value, which may be a part of another, or the new value of a state."""
    if node.id in windows:
        return windows[node.id].whole
    return stored.get(node.id, node)


def realize_graph(graph: Graph, half: bool) -> tuple[Graph, Realized]:
    """The part that all targets share: in-place states, and which values get memory of their own. half: whether 16-bit elements
    can be stored.
    """
    graph = in_place(graph, half)
    return graph, realize(graph)


def draft(source: Graph | tuple[Graph, Realized], target: Target, layout: str = "auto") -> Draft:
    """Fusion and layouts. source: a graph, or the result of `realize_graph`; layout: as for `assign`."""
    graph, realized = realize_graph(source, target.half) if isinstance(source, Graph) else source
    tasks = fuse_rows(make_tasks(realized, target), graph.results, target)
    given = [*graph.inputs, *rounded_inputs(tasks, {r.id for r in graph.results})]
    layouts = assign(tasks, given, graph.results, layout)
    tasks, windows = write_into_concat(tasks, layouts, graph, target.half)
    return Draft(target, graph, tasks, layouts, realized.views, windows)


def finish(made: Draft, selected: Sequence[Task]) -> Schedule:
    """In-place states, the order of the tasks, and lifetimes. selected: the tasks with their kernels, and the tasks that these
    need.
    """
    tasks, stored = settle(made.graph.stores, list(selected), made.layouts)
    ordered = order(tasks, made.graph.results, stored, made.windows)
    elsewhere = {r.id for r in made.graph.results} | set(stored) | set(made.windows)
    rounded = frozenset(n.id for n in rounded_inputs(tasks, elsewhere) if is_row_major(made.layouts[n.id]))
    return Schedule(made.target, made.graph, tasks, made.layouts, made.views, ordered, stored, made.windows, rounded)
