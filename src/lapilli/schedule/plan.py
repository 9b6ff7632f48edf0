"""The schedule stage: a graph and a target in, kernels in order with their buffers out."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.ir.node import Graph
from lapilli.schedule.layout import Layout, assign
from lapilli.schedule.order import Order, order
from lapilli.schedule.realize import realize
from lapilli.schedule.target import Target
from lapilli.schedule.task import Task, make_tasks


@dataclass(frozen=True)
class Schedule:
    target: Target
    graph: Graph
    tasks: list[Task]
    layouts: dict[int, Layout]
    order: Order


def schedule(graph: Graph, target: Target) -> Schedule:
    tasks = make_tasks(realize(graph))
    layouts = assign(tasks, list(graph.inputs), graph.outputs)
    return Schedule(target, graph, tasks, layouts, order(tasks, graph.outputs))
