"""Products with few results and long sums, as of a weight's gradient: the sum is divided into parts, each a product of its own in a
batch, and a second kernel adds them. Otherwise a large device has fewer tiles than compute units."""

from __future__ import annotations

from dataclasses import replace

from lapilli.codegen import gpu
from lapilli.codegen.coded import Coded
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.template import Context, simple_task
from lapilli.codegen.tiles import sum_parts
from lapilli.codegen.wrapper import BatchMapping
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, load, rewrite
from lapilli.ir.integer import Int, as_int, of
from lapilli.ir.node import Matmul, Node, Reduce
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.task import Task


def in_parts(task: Task, ctx: Context) -> list[Task] | None:
    """Two tasks for a product: its parts, and their sum with what follows it. None if the product is not worth dividing."""
    reduction, tiles = task.reduction, task.template
    if reduction is None or not isinstance(tiles, Tiles) or type(reduction.contraction) is not Matmul:
        return None
    sizes = [i.value for i in (tiles.m, tiles.n, tiles.k)]
    if isinstance(tiles.w, Coded):  # whose lines are read as a whole
        return None
    if tiles.matrix or tiles.batch != 1 or None in sizes or reduction.dtype.compute is not DType.float32:
        return None
    m, n, k = (int(s or 0) for s in sizes)
    count = sum_parts(m, n, k, ctx.target)
    view = gpu.matmul_operands(task, ctx) if count > 1 else None
    if view is None:
        return None
    divided = gpu.product(_divided(view, count), task, ctx)
    if divided is None:
        return None
    parts = Node((as_int(count), view.m, view.n), DType.float32, f"{reduction.name}_parts", reduction.origin)
    ctx.dense(parts)
    step = simple_task(parts, task.origins[:1], "parts of a long sum")
    assert step.reduction is not None
    part, row, column = step.reduction.axes
    step.template = replace(divided, mapping=BatchMapping([part], [row], column, 1))
    return [step, _sum(task, reduction, parts, count)]


def _divided(v: MatmulView, count: int) -> MatmulView:
    """The product with parts of the sum as its batch."""
    k = v.k // count

    def part(x: Operand, along: Int) -> Operand:
        return replace(x, strides=(k * along, *x.strides[1:]))

    return replace(v, batch=as_int(count), k=k, lhs=part(v.lhs, v.lhs.strides[2]), rhs=part(v.rhs, v.rhs.strides[1]))


def _sum(task: Task, old: Reduce, parts: Node, count: int) -> Task:
    """The task, with the sum of the parts in the product's place."""
    note = old.contraction
    assert isinstance(note, Matmul)
    (axis,), (part,) = fresh_axes((as_int(count),), "p")
    row = as_int(0)
    for a in note.rows:
        row = row * a.extent + of(a)
    body = load(parts, [part, row, of(note.column)])
    new = Reduce(old.shape, old.dtype, f"{old.name}_sum", old.origin, axes=old.axes, raxes=(axis,), op="sum", body=body)

    def instead(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        return load(new, ld.index) if ld.node is old else None

    return replace(task, value=rewrite(task.value, {}, instead), reduction=new, reduction_body=body, template=None)
