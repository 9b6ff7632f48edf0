"""Which kernel serves a task."""

from __future__ import annotations

from lapilli.codegen import attention, cpu, generic, gpu, rows
from lapilli.codegen.kernel import Written
from lapilli.codegen.template import Context
from lapilli.ir.node import Map
from lapilli.schedule.layout import Layout
from lapilli.schedule.plan import Schedule
from lapilli.schedule.target import Target
from lapilli.schedule.task import Task


def choose_templates(
    tasks: list[Task], layouts: dict[int, Layout], views: dict[int, Map], target: Target
) -> list[Task]:
    """Gives contractions their templates. Returns all tasks, those that templates need before their readers."""
    ctx = Context(target, layouts, views)
    by_out = {t.out.id: t for t in tasks}
    results = by_out.keys() - {r.id for t in tasks for r in t.reads()}
    result: list[Task] = []
    for task in tasks:
        if target.kind == "gpu" and task.core is not None and attention.choose(task, by_out, ctx):
            pass
        elif task.core is not None and task.core.contraction is not None and ctx.is_float(task.out):
            (gpu if target.kind == "gpu" else cpu).choose(task, ctx)
        result += [*ctx.added, task]
        ctx.added.clear()
    return _needed(result, results)


def _needed(tasks: list[Task], results: set[int]) -> list[Task]:
    """Without tasks whose work a template took over."""
    wanted = set(results)
    kept: list[Task] = []
    for task in reversed(tasks):
        if task.out.id in wanted:
            wanted |= {r.id for r in task.reads()}
            kept.append(task)
    return kept[::-1]


def write_all(s: Schedule) -> dict[int, Written]:
    """The kernel of every task, by the id of its result."""
    ctx = Context(s.target, s.layouts, s.views)
    loading = {t.out.id for t in s.order.load}

    def write(t: Task) -> Written:
        if t.template is not None:
            written: Written = t.template.write(t, ctx)
            return written
        if t.row is not None:
            return rows.write(t, s.layouts, s.target)
        return generic.write(t, s.layouts, s.target, lift=t.out.id in loading)

    return {t.out.id: write(t) for t in s.tasks}
