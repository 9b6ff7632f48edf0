"""Products with few results and long sums, as of a weight's gradient: the sum is divided into parts, each a product of its own in a
batch, and a second kernel adds them, with the terms that are left over. Otherwise a large device has fewer tiles than compute
units. On matrix units the work groups of a tile add a few parts themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lapilli.codegen import gpu
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.template import Context, simple_task
from lapilli.codegen.tiles import MatrixTile, part_terms
from lapilli.codegen.wrapper import BatchMapping
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, cast_to, load, rewrite, select
from lapilli.ir.integer import Int, as_int, of
from lapilli.ir.node import Matmul, Node, Reduce
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.task import Task


def in_parts(task: Task, ctx: Context) -> list[Task] | None:
    """Two tasks for a product whose tile is for parts of the sum: the parts, and their sum with what follows. None for others."""
    reduction, tiles = task.reduction, task.template
    if reduction is None or not isinstance(tiles, Tiles) or tiles.tile is None or tiles.tile.apart == 1:
        return None
    count = tiles.tile.apart
    view = gpu.matmul_operands(task, ctx)
    if view is None or view.k.value is None:
        return None
    terms = part_terms(view.k.value, count)
    divided = (gpu.matrix_product if tiles.matrix else gpu.product)(_divided(view, count, terms), task, ctx)
    if divided is None:  # the whole does with a tile for parts
        return None
    parts = Node((as_int(count), view.m, view.n), DType.float32, f"{reduction.name}_parts", reduction.origin)
    ctx.dense(parts)
    step = simple_task(parts, task.origins[:1], "parts of a long sum")
    assert step.reduction is not None
    part, row, column = step.reduction.axes
    step.template = replace(divided, tile=tiles.tile, mapping=BatchMapping([part], [row], column, 1))
    return [step, _sum(task, reduction, parts, count * terms)]


def with_counters(tasks: Sequence[Task], ctx: Context) -> list[Task]:
    """The tasks, with memory for the parts of sums that the last work group of a tile puts together."""
    for task in tasks:
        tiles = task.template
        if isinstance(tiles, Tiles) and isinstance(tiles.tile, MatrixTile) and tiles.tile.parts > 1:
            task.template = _joined(tiles, task, ctx)
    if not ctx.counters.count:
        return [*tasks]
    ctx.dense(ctx.counters.node)
    return [ctx.counters.task(), *tasks]


def _joined(tiles: Tiles, task: Task, ctx: Context) -> Tiles:
    """With memory for the parts, and a counter for each tile."""
    t, count = tiles.tile, tiles.tile_count.value
    assert isinstance(t, MatrixTile) and count is not None
    shape = (as_int(count * t.parts), as_int(t.bm), as_int(t.bn))
    parts = Node(shape, DType.float32, f"{task.out.name}_parts", task.out.origin)
    ctx.dense(parts)
    counter = ctx.counters.take(count)
    return replace(tiles, joined=parts, counters=ctx.counters.node, counter=counter)


def _divided(v: MatmulView, count: int, terms: int) -> MatmulView:
    """The product with parts of the sum, of so many terms each, as its batch."""

    def part(x: Operand, along: Int) -> Operand:
        return replace(x, strides=(terms * along, *x.strides[1:]))

    return replace(
        v, batch=as_int(count), k=as_int(terms), lhs=part(v.lhs, v.lhs.strides[2]), rhs=part(v.rhs, v.rhs.strides[1])
    )


def _sum(task: Task, old: Reduce, parts: Node, added: int) -> Task:
    """The task, with the sum of the parts, and of the terms after the first `added`, in the product's place."""
    note, count, total = old.contraction, parts.shape[0], as_int(math.prod(a.extent for a in old.raxes))
    assert isinstance(note, Matmul)
    (axis,), (part,) = fresh_axes((count + total - added,), "p")
    row = as_int(0)
    for a in note.rows:
        row = row * a.extent + of(a)
    body = load(parts, [part, row, of(note.column)])
    if added != total:
        (along,) = old.raxes
        assert task.reduction_body is not None
        left_over = rewrite(task.reduction_body, {along: part - count + added})
        body = select([count - 1 - part], body, cast_to(left_over, body.dtype))
    new = Reduce(old.shape, old.dtype, f"{old.name}_sum", old.origin, axes=old.axes, raxes=(axis,), op="sum", body=body)

    def instead(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        return load(new, ld.index) if ld.node is old else None

    return replace(task, value=rewrite(task.value, {}, instead), reduction=new, reduction_body=body, template=None)
