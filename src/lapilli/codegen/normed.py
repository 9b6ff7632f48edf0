"""Products on matrix units take in the layer norms of their rows, which then need no level of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lapilli.codegen import gpu, rows
from lapilli.codegen.alike import Kernels
from lapilli.codegen.emit import NotVectorizable
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.layer_norms import MOST_NORMED, NORMS_SHARED, LayerNorm, Norms, layer_norm
from lapilli.codegen.packing import flat
from lapilli.codegen.scaled_rows import is_whole_row
from lapilli.codegen.template import Context
from lapilli.codegen.tiles import MatrixTile
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, binary, cast_to, const, loads, rewrite, select
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Constant, Matmul
from lapilli.schedule.copies import Packed, insert_copies
from lapilli.schedule.fuse_reductions import fuse_rows
from lapilli.schedule.layout import estimate
from lapilli.schedule.plan import Draft
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task

_GAMMA, _LEAST, _MOST = 256.0, 1 / 128, 32768.0
"""The range of a norm's largest gamma, and of its product with the largest weight."""
_ROUNDS = 2
"""Rounds of tiles of all products that read a norm, up to which a kernel of its own takes longer."""


def take_in_norms(tasks: Sequence[Task], made: Draft, ctx: Context, kernels: Kernels) -> list[Task]:
    """The tasks, without the layer norms that such products read. Where an epilogue reads one, too, as the next residual does, two
    small kernels beside the product have the sums of its rows, and the epilogue norms what it reads.
    """
    if not ctx.target.cooperative_matrix:
        return list(tasks)
    reading: defaultdict[int, list[int]] = defaultdict(list)  # by what is read: results
    for t in insert_copies(tasks):  # kernels' own steps and copies read, too
        for n in t.reads():
            reading[n.id].append(t.out.id)
    left = {t.out.id: t for t in tasks}
    sums: dict[int, tuple[Task, ...]] = {}  # instead of a norm
    for task in tasks:
        norm = layer_norm(task) if task.out.id not in made.kept else None
        if norm is None:
            continue
        those = [left[i] for i in reading[task.out.id] if i in left]
        if len(those) != len(reading[task.out.id]) or not _pays(those, task, ctx):
            continue
        beside = _sums(task, norm, ctx) if any(_in_epilogue(t, task) for t in those) else ()
        if beside is None:
            continue
        for t in beside:
            ctx.dense(t.out)
        taken = [_normed(t, task, norm, ctx, kernels) for t in those]
        if None in taken:
            for t in beside:
                del ctx.layouts[t.out.id]
            continue
        for t in beside:
            rows.choose(t, ctx)
        for old, new in zip(those, taken, strict=True):
            assert new is not None
            left[new.out.id] = new
            if new.template is not old.template:
                ctx.withdraw(new)
        sums[task.out.id] = beside
        ctx.withdraw(task)
    return [t for i, task in left.items() for t in sums.get(i, (task,))]


def _in_epilogue(task: Task, before: Task) -> bool:
    return any(ld.node is before.out for ld in loads(task.value))


def _pays(tasks: Sequence[Task], before: Task, ctx: Context) -> bool:
    """Whether products read a norm, few tiles of them, and what else reads it does so in the epilogues of others as small."""
    products = others = 0
    for t in tasks:
        if not isinstance(t.template, Tiles) or t.template.tile is None:
            return False
        rounds = -(-estimate(t.template.tile_count) // ctx.target.compute_units)
        if not _in_epilogue(t, before):
            products += rounds
        elif any(n is before.out for n in t.template.operands):
            return False  # it would wait for the sums
        else:
            others += rounds
    return 0 < products <= _ROUNDS and others <= _ROUNDS


def _sums(task: Task, norm: LayerNorm, ctx: Context) -> tuple[Task, ...] | None:
    """The sums of a norm's rows, and of the squares of differences from their means, each by a kernel that waits for no other."""
    members = {m.out.id: m for m in task.members}
    found = [members.get(s.out.id) for s in norm.row.steps]
    if len(members) != len(found) or None in found:
        return None
    first, second = (m for m in found if m is not None)
    fused = fuse_rows([first, second], [second.out], ctx.target)
    alone = replace(first, row=rows.alone(first, ctx))
    if len(fused) != 1 or alone.row is None:
        return None
    return alone, *fused


def _normed(task: Task, before: Task, norm: LayerNorm, ctx: Context, kernels: Kernels) -> Task | None:
    """A product that norms what it reads, its rows or what its epilogue adds; None if its kernel cannot."""
    made = _with_end(task, before, norm) if _in_epilogue(task, before) else _with_rows(task, before, norm, ctx)
    if made is None or sum(map(ctx.target.parts, (made.out, *made.reads()))) > ctx.target.bindings:
        return None
    try:
        bindings = len(kernels.of(made).bindings)
    except NotVectorizable:
        return None
    return made if bindings <= ctx.target.bindings else None  # nothing is left for a kernel that would bind fewer


def _with_end(task: Task, before: Task, norm: LayerNorm) -> Task | None:
    """A task whose epilogue norms what it reads."""
    failed = False

    def instead(ld: Expr) -> Expr | None:
        nonlocal failed
        assert isinstance(ld, Load)
        if ld.node is not before.out:
            return None
        place = norm.at(ld.index)
        failed = failed or place is None
        return None if place is None else cast_to(rewrite(norm.row.value, place), ld.dtype)

    value = rewrite(task.value, {}, instead)
    return None if failed else replace(task, value=value, origins=[*before.origins, *task.origins])


def _with_rows(task: Task, before: Task, norm: LayerNorm, ctx: Context) -> Task | None:
    """A product that norms the rows that it reads; None if its tile cannot."""
    template, reduction = task.template, task.reduction
    if not isinstance(template, Tiles) or reduction is None or not _is_plain(template, before, ctx):
        return None
    contraction = reduction.contraction
    if not isinstance(contraction, Matmul):
        return None
    root, index = chase(contraction.lhs, contraction.lhs_index, dict(ctx.views))
    place = norm.at(index) if root is before.out else None
    if place is None or not is_whole_row(norm.inner, place, contraction.inner):
        return None
    x = rewrite(norm.x, place)
    assert isinstance(x, Load)
    plain = replace(reduction, contraction=replace(contraction, lhs=x.node, lhs_index=x.index))
    view = gpu.matmul_operands(replace(task, reduction=plain), ctx)
    if view is None or view.lhs.node.dtype is not template.w.dtype or not isinstance(view.rhs.node, Constant):
        return None
    lying = gpu.matmul_rows(view.lhs, view.m, view.k, gpu.SHORTS)
    if lying is None or lying.transposed or isinstance(view.lhs.node, Packed):
        return None  # a copy would be a level, too
    if not _is_in_range(norm, view.rhs.node):
        return None
    rhs, stored = view.rhs, flat(view.rhs.node, ctx)

    def element(k: Int, n: Int) -> Expr:
        return select([view.n - 1 - n], stored(rhs.offset + k * rhs.strides[1] + n * rhs.strides[2]), const(0.0))

    def body(_: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        gamma = norm.gamma
        return [], element(k, n) if gamma is None else binary("mul", norm.along(gamma, k), element(k, n))

    sizes = [as_int(1), view.k, template.w.shape[2]]
    w = ctx.packed("normed", rhs.node, sizes, body, template.w.dtype)
    made = replace(template, rows=lying, w=w, norms=Norms.of(norm, w, element, ctx))
    return replace(task, template=made, origins=[*before.origins, *task.origins])


def _is_in_range(norm: LayerNorm, weights: Constant) -> bool:
    """Whether weights times gamma fit halves: none of them overflows, and those that matter are not denormal."""
    if weights.dtype is not DType.float16:
        return True
    gamma = norm.largest_gamma()
    magnitudes = (
        weights.value.view(np.uint16) & 0x7FFF
    )  # as integers they have the same order; NaN and infinity are the largest
    product = gamma * float(magnitudes.max(initial=0).view(np.float16))
    return product == 0 or (1 / _GAMMA <= gamma <= _GAMMA and _LEAST <= product <= _MOST)


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
