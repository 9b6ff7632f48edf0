"""Selects the kernel of each task."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from lapilli.codegen import (
    attention_gradient,
    depthwise_gradient,
    families,
    flash_attention,
    generic,
    recurrent_kernels,
    reduce_parts,
    rows,
    sampling_kernels,
    split_k,
    transposing,
)
from lapilli.codegen.absorb import absorb
from lapilli.codegen.alike import Kernels
from lapilli.codegen.emit import BYTE_TYPES, NotVectorizable
from lapilli.codegen.expanded import expand
from lapilli.codegen.few_bindings import within_bindings
from lapilli.codegen.kernel import MAX_PARAMS, KernelSource
from lapilli.codegen.normed import take_in_norms
from lapilli.codegen.parts import split_bindings
from lapilli.codegen.side_by_side import side_by_side
from lapilli.codegen.template import Asked, Context, Kept, KernelTemplate
from lapilli.ir.axes import fresh_axes
from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import cast_to, load, loads
from lapilli.ir.integer import Symbol
from lapilli.ir.node import Attention, Graph, Node
from lapilli.ir.recurrence import Recurrence
from lapilli.schedule.copies import insert_copies, without_unread
from lapilli.schedule.layout import Layout
from lapilli.schedule.plan import Draft, Schedule, draft, finish
from lapilli.schedule.realize import Realized, operand_indices
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task
from lapilli.target import Target


def schedule_of(
    source: Graph | tuple[Graph, Realized],
    target: Target,
    layout: str = "auto",
    kept: Kept | None = None,
    asked: list[Asked] | None = None,
) -> Schedule:
    """The schedule of a graph for a target, with the kernel of every task. source, layout: as for `draft`; kept: constants that
    other methods read as they lie. asked: takes the choices among candidates down.
    """
    made = draft(source, target, layout)
    results = made.results()  # as the graph says: kernels read other values
    return finish(made, without_unread(select(made, kept, asked), results))


def select(made: Draft, kept: Kept | None = None, asked: list[Asked] | None = None) -> list[Task]:
    """Selects the templates of contractions; with the copies and steps that these need. kept, asked: as for `schedule_of`."""
    target = made.target
    lying = Kept(kept)
    for task in made.tasks:  # those of contractions may be packed
        if task.reduction is None or task.reduction.contraction is None:
            lying.add(task.reads())
    ctx = Context(target, made.layouts, made.views, {t.out.id: t for t in made.tasks}, kept=lying, asked=asked)
    kernels = Kernels(ctx, lambda t: _written(t, ctx))
    selected: list[Task] = []
    for task in made.tasks:
        if task.row is None:
            task.row = rows.alone(task, ctx)
        if task.row is not None:
            rows.choose(task, ctx)
        if fused := _fused_attention(task, ctx):
            selected += fused
            continue
        if task.reduction is not None and isinstance(task.reduction.contraction, Recurrence):
            recurrent_kernels.choose(task, task.reduction.contraction, ctx)
        elif task.reduction is not None and isinstance(task.reduction.contraction, Sampling):
            selected += _sampling(task, task.reduction.contraction, ctx)
            continue
        elif task.reduction is not None and task.reduction.contraction is not None and _reads_operands(task, ctx):
            selected += _contraction(task, ctx, kernels)
            continue
        selected += reduce_parts.in_parts(task, ctx) or [task]
    taken_in = expand(take_in_norms(selected, made, ctx, kernels), made, ctx, kernels)
    joined = side_by_side(taken_in, made, ctx)
    absorbed = absorb(insert_copies(joined), made, ctx)  # which must see all that read a value
    return within_bindings(split_k.with_counters(absorbed, ctx), ctx, kernels)


def _reads_operands(task: Task, ctx: Context) -> bool:
    """Whether a contraction reads its operands at all. If every access is in the padding it does not, and operands that a
    template would read need not exist.
    """
    assert task.reduction is not None
    assert task.reduction_body is not None
    read = {ld.node.id for ld in loads(task.reduction_body)}
    return all(chase(x, at, ctx.views)[0].id in read for x, at in operand_indices(task.reduction))


def _fused_attention(task: Task, ctx: Context) -> list[Task]:
    """Attention or its gradient as one kernel, with the copy of a result that is not in whole words; nothing if none fits."""
    if task.reduction is None:
        return []
    if attention_gradient.choose(task, ctx):
        return [task]
    if not isinstance(task.reduction.contraction, Attention):
        return []
    if ctx.is_whole(task.out):
        return [task] if flash_attention.choose(task, ctx) else []
    wide, copy = _in_words(task, ctx)
    if flash_attention.choose(wide, ctx):
        return [wide, copy]
    del ctx.layouts[wide.out.id]
    return []


def _contraction(task: Task, ctx: Context, kernels: Kernels) -> list[Task]:
    """The task with a template. Templates store whole words only, and bytes in fours; for other elements, the task becomes a copy
    of the result.
    """
    gradient = depthwise_gradient.in_parts(task, ctx)
    if gradient is not None:
        return gradient
    if ctx.is_whole(task.out):
        _choose(task, ctx, kernels)
        return split_k.in_parts(task, ctx) or [task]
    if task.out.dtype is DType.code or task.out.dtype in BYTE_TYPES:
        with suppress(NotVectorizable):
            _choose(task, ctx, kernels)
            made = split_k.in_parts(task, ctx) or [task]
            if made[0] is task and task.template is not None:
                kernels.of(task)
            return made
        task = replace(task, template=None)
    wide, copy = _in_words(task, ctx)
    _choose(wide, ctx, kernels)
    if wide.template is None:
        del ctx.layouts[wide.out.id]
        return [task]
    return [*(split_k.in_parts(wide, ctx) or [wide]), copy]


def _in_words(task: Task, ctx: Context) -> tuple[Task, Task]:
    """The task with its result in whole words, and the copy of that to its own type."""
    out, kind = task.out, task.value.dtype
    whole = DType.int32 if kind is DType.bool else kind
    words = Node(out.shape, whole, f"{out.name}_words", out.origin)
    wide = replace(task, out=words, value=cast_to(task.value, whole))
    ctx.layouts[words.id] = Layout.of(out.shape, ctx.layouts[out.id].order)
    axes, at = fresh_axes(out.shape)
    return wide, Task(out, axes, at, cast_to(load(words, at), kind), origins=["round"], reason=task.reason)


def _sampling(task: Task, note: Sampling, ctx: Context) -> list[Task]:
    """The task with its template."""
    if ctx.is_whole(task.out) or task.out.dtype is DType.int64:
        sampling_kernels.choose(task, note, ctx)
        return [task]
    wide, copy = _in_words(task, ctx)
    sampling_kernels.choose(wide, note, ctx)
    return [wide, copy]


def _written(task: Task, ctx: Context) -> KernelSource:
    assert isinstance(task.template, KernelTemplate)
    return task.template.write(task, ctx)


def _choose(task: Task, ctx: Context, kernels: Kernels) -> None:
    """Selects a contraction's template, unless it needs more parameters than a kernel may have: with many dynamic sizes, the
    generic kernel needs fewer. This happens before lifetimes are computed, because the generic kernel reads other values.
    """
    task.template = families.template(task, ctx)
    sizes = [i for node in (task.out, *task.reads()) for i in node.shape]
    is_open = any(isinstance(a, Symbol) for i in sizes for a in i.atoms())
    if task.template is not None and is_open and len(kernels.of(task).params) > MAX_PARAMS:
        task.template = None
    if task.template is None:
        assert task.reduction_body is not None
        task.reduction_body = ctx.seen(task.reduction_body)


def write_all(s: Schedule) -> dict[int, KernelSource]:
    """The kernel of every task, by the id of its result. Those of tasks that are alike are written once."""
    ctx = Context(s.target, s.layouts, s.views)
    loading = {t.out.id for t in s.order.load}

    def write(t: Task) -> KernelSource:
        if t.template is not None:
            return _written(t, ctx)
        if t.row is not None:
            return rows.write(t, s.layouts, s.target)
        turned = transposing.turned_map(t, s.layouts, s.target) if t.out.id not in loading else None
        if turned is not None:
            return transposing.write(t, turned, s.layouts, s.target)
        return generic.write(t, s.layouts, s.target, sizes_as_params=t.out.id in loading)

    kernels = Kernels(ctx, write)
    return {t.out.id: split_bindings(kernels.of(t, t.out.id in loading), s.memory, s.target) for t in s.tasks}
