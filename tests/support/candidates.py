"""The candidates for the tasks of a model, and the model compiled with any of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lapilli.codegen.select import schedule_of
from lapilli.codegen.template import Asked
from lapilli.compiler import collected, uncollected
from lapilli.ir.node import Graph
from lapilli.runtime.program import Program
from lapilli.schedule.plan import Schedule, realize_graph
from lapilli.target import TARGETS, Target
from lapilli.target.records import KernelRecord, Question, Records


def asked(graph: Graph, target: Target) -> list[Asked]:
    """The choices that are made for a graph, with all candidates."""
    found: list[Asked] = []
    schedule_of(graph, target, asked=found)
    return found


def naming(question: Question, *names: str) -> KernelRecord:
    """A record by which the first of the names wins."""
    times = {name: 0.5 + 0.01 * k for k, name in enumerate(names)}
    return KernelRecord.of(question, "what nobody would take", 10.0, times)


def deciding_for(asked: Asked, number: int) -> KernelRecord:
    """A record by which the candidate of that number wins, or the last."""
    name = asked.names[min(number, len(asked.names) - 1)]
    return naming(asked.question, *dict.fromkeys((name, asked.names[0])))


def with_candidate(graph: Graph, target: Target, number: int) -> Schedule:
    """The schedule with the candidate of that number of every task, or its last."""
    records = (deciding_for(a, number) for a in asked(graph, target))
    return schedule_of(graph, replace(target, records=Records(records)))


def programs(
    model: torch.nn.Module, args: tuple[Any, ...], target: str, precision: str = "fp32", **named: Any
) -> Iterator[tuple[str, Program]]:
    """The programs of a model, each with another candidate of every task, and their names."""
    given = replace(
        TARGETS[target], shared_memory=min(TARGETS[target].shared_memory, 1 << 15)
    )  # what software devices have
    with uncollected():
        first = collected(model, args, precision=precision, target=target, **named)
        (method,) = first.methods
        graph = realize_graph(method.graphs[given.half], given.half)
        found: list[Asked] = []
        schedule_of(graph, given, asked=found)
    for number in range(max((len(a.names) for a in found), default=1)):
        names = [a.names[min(number, len(a.names) - 1)] for a in found]
        with uncollected():
            compiler = collected(model, args, precision=precision, target=target, **named)
            records = Records(deciding_for(a, number) for a in found)
            compiler.targets = [replace(given, records=records)]
            data = compiler.finish({}, None)
        with Program(data) as program:
            yield ", ".join(names), program
