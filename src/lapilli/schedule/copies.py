"""Copies of operands in layouts that kernels want: templates declare them, and this pass makes their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lapilli.ir.integer import as_int, of
from lapilli.ir.node import Map
from lapilli.schedule.task import Task


@dataclass(eq=False, repr=False)
class Packed(Map):
    """A copy of an operand, declared by the kernel that reads it: no task computes it before `insert_copies`."""


def insert_copies(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each after those that its kernel needs: copies of operands that are declared, and steps of its own."""
    made: set[int] = set()

    def steps(task: Task) -> Iterator[Task]:
        for step in task.template.steps if task.template is not None else ():
            yield from with_steps(step)
        for node in task.reads():
            if isinstance(node, Packed) and node.id not in made:
                made.add(node.id)
                yield from with_steps(_copy(node))

    def with_steps(task: Task) -> Iterator[Task]:
        yield from steps(task)
        yield task

    return [t for task in tasks for t in with_steps(task)]


def _copy(node: Packed) -> Task:
    at = tuple(as_int(0) if a.extent == 1 else of(a) for a in node.axes)
    return Task(node, node.axes, at, node.body, origins=[node.origin], reason="packed operand")


def without_unread(tasks: Sequence[Task], results: set[int]) -> list[Task]:
    """Without tasks that nothing reads any more, because a kernel took over their work. results: what is read outside."""
    wanted = set(results)
    kept: list[Task] = []
    for task in reversed(tasks):
        if task.out.id in wanted:
            wanted |= {r.id for r in task.reads()}
            kept.append(task)
    return kept[::-1]
