"""The schedule stage: a graph and a target in, kernels in order with their buffers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lapilli.ir.node import Graph, Map, Node, State
from lapilli.schedule.assign import assign
from lapilli.schedule.concatenate import Window, join
from lapilli.schedule.layout import Layout
from lapilli.schedule.order import Order, order
from lapilli.schedule.realize import Realized, realize
from lapilli.schedule.rows import fuse_rows
from lapilli.schedule.state import in_place, settle
from lapilli.schedule.task import Task, make_tasks
from lapilli.target import Target


@dataclass(frozen=True)
class Schedule:
    target: Target
    graph: Graph
    tasks: list[Task]
    layouts: dict[int, Layout]
    views: dict[int, Map]
    order: Order
    stored: dict[int, State]  # values that are new values of states, by id
    windows: dict[int, Window]  # values that lie in others, by id

    def memory(self, node: Node) -> Node:
        """The value in whose memory a value lies."""
        return memory_of(node, self.windows, self.stored)


def memory_of(node: Node, windows: Mapping[int, Window], stored: Mapping[int, State]) -> Node:
    """The value in whose memory a value lies: it may be a part of another, or the new value of a state."""
    if node.id in windows:
        return windows[node.id].whole
    return stored.get(node.id, node)


Choose = Callable[[list[Task], dict[int, Layout], dict[int, Map], Target], list[Task]]


def realize_graph(graph: Graph) -> tuple[Graph, Realized]:
    """What all targets share: states in place, and which values get memory of their own."""
    graph = in_place(graph)
    return graph, realize(graph)


def schedule(source: Graph | tuple[Graph, Realized], target: Target, choose: Choose, layout: str = "auto") -> Schedule:
    """source: a graph, or what `realize_graph` made of it; choose: gives tasks their kernel templates, and returns all tasks
    with those that templates need; layout: as for `assign`."""
    graph, realized = realize_graph(source) if isinstance(source, Graph) else source
    tasks = fuse_rows(make_tasks(realized, target), graph.results, target)
    layouts = assign(tasks, list(graph.inputs), graph.results, layout)
    tasks, windows = join(tasks, layouts, graph, target.half)
    tasks, stored = settle(graph.stores, choose(tasks, layouts, realized.views, target), layouts, target.half)
    ordered = order(tasks, graph.results, stored, windows)
    return Schedule(target, graph, tasks, layouts, realized.views, ordered, stored, windows)
