"""Which kernel serves a task."""

from __future__ import annotations

from dataclasses import replace

from lapilli.codegen import attention, families, generic, recurrence, rows
from lapilli.codegen.kernel import MAX_PARAMS, Written
from lapilli.codegen.parts import in_parts
from lapilli.codegen.template import Context
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import cast_to, load, loads
from lapilli.ir.integer import Symbol
from lapilli.ir.node import Graph, Node
from lapilli.ir.recurrence import Recurrence
from lapilli.schedule.layout import Layout
from lapilli.schedule.plan import Draft, Schedule, draft, finish
from lapilli.schedule.realize import Realized, chase, operand_indices
from lapilli.schedule.task import Task
from lapilli.target import Target


def plan(source: Graph | tuple[Graph, Realized], target: Target, layout: str = "auto") -> Schedule:
    """The schedule of a graph for a target, with the kernel of every task. source, layout: as for `draft`."""
    made = draft(source, target, layout)
    return finish(made, select(made))


def select(made: Draft) -> list[Task]:
    """Gives contractions their templates. Returns all tasks, those that templates need before their readers."""
    target = made.target
    ctx = Context(target, made.layouts, made.views)
    by_out = {t.out.id: t for t in made.tasks}
    results = by_out.keys() - {r.id for t in made.tasks for r in t.reads()}
    result: list[Task] = []
    for task in made.tasks:
        if target.kind == "gpu" and task.core is not None and attention.choose(task, by_out, ctx):
            pass
        elif task.core is not None and isinstance(task.core.contraction, Recurrence):
            recurrence.choose(task, task.core.contraction, ctx)
        elif task.core is not None and task.core.contraction is not None and _reads_operands(task, ctx):
            task = _contraction(task, ctx)
        result += [*ctx.added, task]
        ctx.added.clear()
    return _needed(result, results)


def _reads_operands(task: Task, ctx: Context) -> bool:
    """Whether a contraction reads what it is made of. One whose every place lies in the padding does not, and what a template would
    read need not be there then."""
    assert task.core is not None
    assert task.core_body is not None
    read = {ld.node.id for ld in loads(task.core_body)}
    return all(chase(x, at, ctx.views)[0].id in read for x, at in operand_indices(task.core))


def _contraction(task: Task, ctx: Context) -> Task:
    """The task with a template. No template stores parts of words: it leaves whole ones, and the task becomes their copy."""
    if ctx.is_whole(task.out):
        _choose(task, ctx)
        return task
    out, kind = task.out, task.value.dtype
    whole = DType.int32 if kind is DType.bool else kind
    words = Node(out.shape, whole, f"{out.name}_words", out.origin)
    wide = replace(task, out=words, value=cast_to(task.value, whole))
    layout = ctx.layouts[words.id] = Layout.of(out.shape, ctx.layouts[out.id].order)
    _choose(wide, ctx)
    if wide.template is None:
        del ctx.layouts[words.id]
        return task
    ctx.add(wide, layout)
    axes, at = fresh_axes(out.shape)
    return Task(out, axes, at, cast_to(load(words, at), kind), origins=["round"], reason=task.reason)


def _choose(task: Task, ctx: Context) -> None:
    """Gives a contraction its template, unless that needs more parameters than a kernel takes: with many open sizes the generic
    kernel needs fewer. Decided before values get their lifetimes, because the generic kernel reads other values."""
    task.template = families.template(task, ctx)
    sizes = [i for node in (task.out, *task.reads()) for i in node.shape]
    is_open = any(isinstance(a, Symbol) for i in sizes for a in i.atoms())
    if task.template is not None and is_open and len(task.template.write(task, ctx).params) > MAX_PARAMS:
        task.template = None


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

    return {t.out.id: in_parts(write(t), s.memory, s.target) for t in s.tasks}
