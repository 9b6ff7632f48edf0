"""Products of the same few rows with several matrices of codes, as of queries, keys and values: one kernel computes them all.
Alone, each leaves compute units idle, or divides its sum to use them. A tile has the columns of one matrix, and its results lie
beside those of the others in one value. Or the results of two matrices are taken together, as a gate with what it lets through:
then half of a tile's columns are of each (`paired`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from lapilli.codegen import tiles
from lapilli.codegen.coded import Coded, become_numbers_alike, become_numbers_straight
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.template import Context
from lapilli.codegen.tiles import MatrixTile
from lapilli.ir.axes import index_of
from lapilli.ir.expr import Expr, Load, load, loads, rewrite, select
from lapilli.ir.integer import Atom, Int, Var, as_int, of
from lapilli.ir.node import Map, Matmul, Node, Reduce
from lapilli.schedule.copies import Packed, insert_copies
from lapilli.schedule.layout import Layout
from lapilli.schedule.plan import Draft
from lapilli.schedule.realize import is_weight
from lapilli.schedule.task import Task


def side_by_side(tasks: Sequence[Task], made: Draft, ctx: Context) -> list[Task]:
    """The tasks, with such products joined to one."""
    forms = [(task, form) for task in tasks if (form := _form(task, ctx)) is not None]
    if len(forms) < 2:
        return list(tasks)
    fixed = made.kept | {new.id for _, new in made.graph.stores} | _read_otherwise(tasks)
    groups: dict[tuple[object, ...], list[Task]] = {}
    for task, form in forms:
        if task.out.id not in fixed:
            group = groups.setdefault(form, [])
            if not group or become_numbers_alike(_codes(group[0]), _codes(task)):
                group.append(task)
    joined: dict[int, Task] = {}
    places: dict[int, tuple[Node, Int]] = {}
    for group in groups.values():
        whole = _joined(group, ctx) if len(group) > 1 else None
        if whole is None:
            continue
        joined[group[0].out.id] = whole
        for task, first in zip(group, _firsts(group)[:-1], strict=True):
            places[task.out.id] = whole.out, first
            ctx.withdraw(task)

    def on_load(ld: Load) -> Expr | None:
        if ld.node.id not in places:
            return None
        node, first = places[ld.node.id]
        return load(node, (*ld.index[:-1], ld.index[-1] + first))

    kept = (joined.get(t.out.id, t) for t in tasks if t.out.id in joined or t.out.id not in places)
    return [t.reading(on_load) if any(n.id in places for n in t.reads()) else t for t in kept]


def paired(task: Task, other: Task, value: Expr, ctx: Context) -> Task | None:
    """Two products of the same rows as one, if the epilogue of the first reads the second; None if there is no kernel for them.
    value: what it stores then.
    """
    template, second = task.template, other.template
    assert isinstance(template, Tiles)
    assert isinstance(second, Tiles)
    if not (_is_simple(template) and _is_simple(second)) or template.rows != second.rows:
        return None
    if not become_numbers_alike(_codes(task), _codes(other)):
        return None
    tile = _tile(template, template.n, task, ctx, 2)
    if tile is None or template.n % (tile.bn // 2) != 0:
        return None
    made = replace(task, value=value, template=replace(template, tile=tile, alike=(other,), paired=True))
    return made if _fits(made, ctx) else None


def _codes(task: Task) -> Coded:
    assert isinstance(task.template, Tiles)
    assert isinstance(task.template.w, Coded)
    return task.template.w


def _is_simple(t: Tiles) -> bool:
    """Whether tiles are those of a single matrix of codes that can become numbers in registers, for a fixed number of rows."""
    if t.by_rows or t.alike or t.norms is not None or not isinstance(t.tile, MatrixTile) or t.batch != 1:
        return False
    fixed = None not in (t.m.value, t.n.value, t.k.value)
    return fixed and isinstance(t.w, Coded) and become_numbers_straight(t.w) and not t.rows.transposed


def _form(task: Task, ctx: Context) -> tuple[object, ...] | None:
    """What products have in common that can be joined; None for others."""
    t, reduction = task.template, task.reduction
    if not isinstance(t, Tiles) or not _is_simple(t) or task.partial or task.within or task.members:
        return None
    if reduction is None or type(reduction.contraction) is not Matmul or task.axes != reduction.axes:
        return None
    order = ctx.layouts[task.out.id].order
    if reduction.axes[-1:] != (reduction.contraction.column,) or order[-1] != len(order) - 1:
        return None
    if task.store != tuple(map(index_of, task.axes)):
        return None
    others = {ld.node for ld in loads(task.value)} - {reduction}
    if not all(map(_is_constant, (*others, *_codes(task).reads))):
        return None  # it may not be there yet when the first of the products is computed
    rows = t.rows.node.id, *(as_int(v).key for v in t.rows.words.values())
    return *rows, t.k.key, task.out.dtype, reduction.dtype, order, *(i.key for i in task.out.shape[:-1])


def _is_constant(n: Node) -> bool:
    return is_weight(n) or (isinstance(n, Packed) and all(_is_constant(ld.node) for ld in loads(n.body)))


def _read_otherwise(tasks: Sequence[Task]) -> set[int]:
    """Values that are not read by generated kernels alone, by id: hand-written ones read them in their own way, from copies and by
    steps of theirs, or take their products in (`absorb`).
    """
    generated = {t.out.id for t in tasks if t.template is None}
    return {n.id for t in insert_copies(tasks) if t.out.id not in generated for n in t.reads()}


def _firsts(group: Sequence[Task]) -> list[Int]:
    """The first column of each product among those of all; behind them how many there are."""
    return [as_int(0), *accumulate(t.out.shape[-1] for t in group)]


def _tile(template: Tiles, columns: Int, task: Task, ctx: Context, matrices: int = 1) -> MatrixTile | None:
    m, n, k = template.m.value, columns.value, template.k.value
    assert m is not None
    assert n is not None
    assert k is not None
    return tiles.straight_tile(m, matrices * n, k, _codes(task).bits, ctx.target, template.is_joinable(task))


def _joined(group: Sequence[Task], ctx: Context) -> Task | None:
    """The products of a group as one; None if they are better apart."""
    first = group[0]
    template, old = first.template, first.reduction
    assert isinstance(template, Tiles)
    assert old is not None
    assert isinstance(old.contraction, Matmul)
    *starts, columns = _firsts(group)
    tile = _tile(template, columns, first, ctx)
    if tile is None or any(i % tile.bn != 0 for i in (*starts, columns)):
        return None
    units = ctx.target.compute_units
    if not all((t.out.shape[-1].value or 0) < units * tile.bn for t in group):
        return None  # each has tiles enough
    column = Var(old.contraction.column.name, columns)
    axes = *old.axes[:-1], column
    at = tuple(map(index_of, axes))
    shape = *old.shape[:-1], columns
    name = f"{first.out.name}_beside"
    places: list[dict[Atom, Int]] = [
        {**dict(zip(t.axes[:-1], at, strict=False)), t.axes[-1]: of(column) - start}
        for t, start in zip(group, starts, strict=True)
    ]
    ends = [*starts[1:], columns]
    body = _by_columns(column, ends, [_term(t, place, old) for t, place in zip(group, places, strict=True)])
    sums = Reduce(
        shape, old.dtype, f"{name}_sums", old.origin, axes=axes, raxes=old.raxes, op="sum", body=body,
        contraction=replace(old.contraction, column=column),
    )  # fmt: skip
    value = _by_columns(column, ends, [_of(t, sums, place) for t, place in zip(group, places, strict=True)])
    out = Map(shape, first.out.dtype, name, first.out.origin, axes=axes, body=value)
    ctx.layouts[out.id] = Layout.of(shape, ctx.layouts[first.out.id].order)
    made = replace(
        first, out=out, axes=axes, store=at, value=value, reduction=sums, reduction_body=body,
        origins=[o for t in group for o in t.origins],
        template=replace(template, n=columns, tile=tile, alike=tuple(group[1:])),
    )  # fmt: skip
    return made if _fits(made, ctx) else None


def _by_columns(column: Var, ends: Sequence[Int], values: Sequence[Expr]) -> Expr:
    """What each product has for its columns, which end there."""
    found = values[-1]
    for end, value in reversed(list(zip(ends[:-1], values[:-1], strict=True))):
        found = value if value == found else select([end - 1 - of(column)], value, found)
    return found


def _term(task: Task, at: Mapping[Atom, Int], old: Reduce) -> Expr:
    """What a product adds up, among the terms of another one."""
    assert task.reduction is not None
    assert task.reduction_body is not None
    along: dict[Atom, Int] = dict(zip(task.reduction.raxes, map(index_of, old.raxes), strict=True))
    return rewrite(task.reduction_body, {**at, **along})


def _fits(task: Task, ctx: Context) -> bool:
    """Whether a device binds enough buffers: there is no other kernel for several products. What an epilogue reads may be bound
    twice, and parts of sums need two buffers more.
    """
    template = task.template
    assert isinstance(template, Tiles)
    assert isinstance(template.tile, MatrixTile)
    beside = {ld.node.id for ld in loads(task.value)}
    count = sum(map(ctx.target.parts, (task.out, *task.reads()))) + len(beside)
    return count + (2 if template.tile.parts > 1 else 0) <= ctx.target.bindings


def _of(task: Task, sums: Reduce, at: Mapping[Atom, Int]) -> Expr:
    """What a product's epilogue makes of a sum among those of all."""
    place = tuple(map(index_of, sums.axes))

    def on_load(ld: Load) -> Expr | None:
        return load(sums, place) if ld.node is task.reduction else None

    return rewrite(rewrite(task.value, at), {}, on_load)
