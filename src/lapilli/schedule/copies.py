"""Copies operands into the layouts that kernels need: templates declare the copies, and this pass creates their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lapilli.ir.axes import index_of
from lapilli.ir.node import Map
from lapilli.schedule.task import Task, Template


@dataclass(eq=False, repr=False)
class Packed(Map):
    """A copy of an operand, declared by the kernel that reads it; `insert_copies` creates its task. template: of the kernel that
    makes it, if that is not a generic one.
    """

    template: Template | None = None


def insert_copies(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each preceded by those its kernel needs: declared copies of operands, and its own steps."""
    made: set[int] = set()

    def steps(task: Task) -> Iterator[Task]:
        for step in task.template.steps if task.template is not None else ():
            if step.out.id not in made:  # several kernels may need one
                made.add(step.out.id)
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
    at = tuple(map(index_of, node.axes))
    return Task(node, node.axes, at, node.body, origins=[node.origin], reason="packed operand", template=node.template)


def without_unread(tasks: Sequence[Task], results: set[int]) -> list[Task]:
    """Removes tasks whose results have no readers, because a kernel took over their work. results: values read outside."""
    wanted = set(results)
    kept: list[Task] = []
    for task in reversed(tasks):
        if task.out.id in wanted:
            wanted |= {r.id for r in task.reads()}
            kept.append(task)
    return kept[::-1]
