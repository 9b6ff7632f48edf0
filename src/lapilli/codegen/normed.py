"""Products on matrix units take in the layer norms of their rows, which then need no kernel and no level of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lapilli.codegen import gpu
from lapilli.codegen.alike import Kernels
from lapilli.codegen.emit import NotVectorizable
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.layer_norms import MOST_NORMED, NORMS_SHARED, LayerNorm, Norms, layer_norm
from lapilli.codegen.packing import flat
from lapilli.codegen.template import Context
from lapilli.codegen.tiles import MatrixTile
from lapilli.ir.expr import Expr, Load, binary, const, rewrite, select
from lapilli.ir.integer import Int, as_int, of
from lapilli.ir.node import Constant, Matmul
from lapilli.schedule.copies import Packed, insert_copies
from lapilli.schedule.layout import estimate
from lapilli.schedule.plan import Draft
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task, readers

_ROUNDS = 2
"""Rounds of tiles of all products that read a norm, up to which a kernel of its own takes longer."""


def take_in_norms(tasks: Sequence[Task], made: Draft, ctx: Context, kernels: Kernels) -> list[Task]:
    """The tasks, without the layer norms that only such products read."""
    if not ctx.target.cooperative_matrix:
        return list(tasks)
    count = readers(insert_copies(tasks))  # kernels' own steps and copies read, too
    left = {t.out.id: t for t in tasks}
    for task in tasks:
        norm = layer_norm(task) if task.out.id not in made.kept else None
        if norm is None:
            continue
        reading = [t for t in left.values() if any(n is task.out for n in t.reads())]
        if not reading or len(reading) != count[task.out.id] or not _pays(reading, ctx):
            continue
        taken = [_normed(t, task, norm, ctx, kernels) for t in reading]
        if all(t is not None for t in taken):
            for t in taken:
                assert t is not None
                left[t.out.id] = t
                ctx.withdraw(t)
            del left[task.out.id]
            ctx.withdraw(task)
    return list(left.values())


def _pays(tasks: Sequence[Task], ctx: Context) -> bool:
    rounds = 0
    for t in tasks:
        if not isinstance(t.template, Tiles) or t.template.tile is None:
            return False
        rounds += -(-estimate(t.template.tile_count) // ctx.target.compute_units)
    return rounds <= _ROUNDS


def _normed(task: Task, before: Task, norm: LayerNorm, ctx: Context, kernels: Kernels) -> Task | None:
    """A product that norms the rows that it reads; None if its kernel cannot."""
    template, reduction = task.template, task.reduction
    if not isinstance(template, Tiles) or reduction is None or not _is_plain(template, before, ctx):
        return None
    contraction = reduction.contraction
    assert isinstance(contraction, Matmul)
    root, index = chase(contraction.lhs, contraction.lhs_index, dict(ctx.views))
    place = norm.at(index) if root is before.out else None
    if place is None or place[norm.inner] != of(contraction.inner):
        return None
    x = rewrite(norm.x, place)
    assert isinstance(x, Load)
    plain = replace(reduction, contraction=replace(contraction, lhs=x.node, lhs_index=x.index))
    view = gpu.matmul_operands(replace(task, reduction=plain), ctx)
    if view is None or view.lhs.node.dtype is not template.w.dtype or not isinstance(view.rhs.node, Constant):
        return None
    rows = gpu.matmul_rows(view.lhs, view.m, view.k, gpu.SHORTS)
    if rows is None or rows.transposed:
        return None
    rhs, stored = view.rhs, flat(view.rhs.node, ctx)

    def element(k: Int, n: Int) -> Expr:
        return select([view.n - 1 - n], stored(rhs.offset + k * rhs.strides[1] + n * rhs.strides[2]), const(0.0))

    def body(_: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        gamma = norm.gamma
        return [], element(k, n) if gamma is None else binary("mul", norm.along(gamma, k), element(k, n))

    sizes = [as_int(1), view.k, template.w.shape[2]]
    w = ctx.packed("normed", rhs.node, sizes, body, template.w.dtype)
    made = replace(template, rows=rows, w=w, norms=Norms.of(norm, w, element, ctx))
    taken = replace(task, template=made, origins=[*before.origins, *task.origins])
    if sum(map(ctx.target.parts, (taken.out, *taken.reads()))) > ctx.target.bindings:
        return None
    try:
        kernels.of(taken)
    except NotVectorizable:
        return None
    return taken


def _is_plain(template: Tiles, before: Task, ctx: Context) -> bool:
    """Whether a product's tile takes normed rows: as they lie, with weights that are packed by columns at load."""
    tile = template.tile
    if not template.matrix or not isinstance(tile, MatrixTile) or template.rows.struct != "MatmulParams":
        return False
    if template.rows.node is not before.out or template.rows.transposed or template.by_rows or template.batch != 1:
        return False
    if template.fragments or template.transposed_w or not isinstance(template.w, Packed) or template.w.rank != 3:
        return False
    m, n, k = template.m.value, template.n.value, template.k.value
    if m is None or n is None or k is None or n % 4 != 0 or k % gpu.SHORTS != 0:
        return False
    fits = tile.shared() + NORMS_SHARED <= ctx.target.shared_memory and max(tile.bm, tile.bn) <= MOST_NORMED
    return fits and tile.parts == tile.apart == 1
