"""Reductions across rows with few results, such as the sums of a bias' gradient: parts of the rows first, then their results.
Otherwise a large device has too few invocations, and these share a result at the cost of reading only a few neighbours of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lapilli.codegen.generic import BUSY, order_by_reads
from lapilli.codegen.template import Context
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, load, rewrite, select
from lapilli.ir.integer import Atom, Int, Var, as_int, of, product
from lapilli.ir.node import Reduce, neutral
from lapilli.schedule.task import Task

_SHARING = 16  # invocations of a work group that share a result
_TERMS = 8  # of an invocation at least
_MANY = 1 << 22  # numbers to reduce; with fewer, a second kernel takes longer than it saves


def in_parts(task: Task, ctx: Context) -> list[Task] | None:
    """Two tasks for such a reduction: the parts, and their reduction with what follows it. None for others."""
    reduction, body = task.reduction, task.reduction_body
    if (
        reduction is None
        or body is None
        or ctx.target.kind != "gpu"
        or task.template is not None
        or task.row is not None
    ):
        return None
    if reduction.contraction is not None or reduction.op not in ("sum", "prod", "max", "min"):
        return None
    if body.dtype not in (DType.float32, DType.int32):
        return None
    order = order_by_reads(task, ctx.layouts)
    if order is None:
        return None
    length, results = product([a.extent for a in reduction.raxes]).value, product([a.extent for a in task.axes]).value
    if not length or not results or length * results < _MANY:
        return None
    work = -(-results // 4) * _SHARING  # four neighbours are read at once
    count = min(ctx.target.compute_units * BUSY // work, length // (_SHARING * _TERMS))
    made = _divided(task, reduction, body, order, count) if count > 1 else None
    if made is not None:
        ctx.dense(made[0].out)
    return made


def _divided(task: Task, old: Reduce, body: Expr, order: Sequence[Var], count: int) -> list[Task] | None:
    """In about `count` parts of the longest axis. order: of the results in memory."""
    longest = max(old.raxes, key=lambda a: a.extent.value or 1)
    extent = longest.extent.value or 1
    even = max(n for n in range(1, min(count, extent) + 1) if extent % n == 0)
    count = even if 2 * even >= count else min(count, extent)
    if count == 1:
        return None
    chunk = -(-extent // count)
    (part, *axes), (p, *at) = fresh_axes((as_int(count), *(a.extent for a in order)))
    (inner,), (i,) = fresh_axes((as_int(chunk),), "r")
    place = p * chunk + i
    mapping: dict[Atom, Int] = {a: as_int(0) for a in task.axes}
    mapping |= dict(zip(order, at, strict=True))
    mapping[longest] = place
    some = rewrite(body, mapping)
    if chunk * count > extent:
        some = select([longest.extent - 1 - place], some, neutral(old.op, some.dtype))
    over = tuple(inner if a is longest else a for a in old.raxes)
    shape = (part.extent, *(a.extent for a in axes))
    of_parts = Reduce(
        shape, body.dtype, f"{old.name}_parts", old.origin, axes=(part, *axes), raxes=over, op=old.op, body=some
    )
    step = Task(
        of_parts,
        of_parts.axes,
        (p, *at),
        load(of_parts, (p, *at)),
        of_parts,
        some,
        task.origins[:1],
        "parts of a long reduction",
    )
    (number,), (n,) = fresh_axes((as_int(count),), "q")
    joined = load(of_parts, (n, *map(of, order)))
    new = Reduce(
        old.shape, old.dtype, f"{old.name}_joined", old.origin, axes=old.axes, raxes=(number,), op=old.op, body=joined
    )

    def instead(ld: Load) -> Expr | None:
        return load(new, ld.index) if ld.node is old else None

    return [step, replace(task, value=rewrite(task.value, {}, instead), reduction=new, reduction_body=joined)]
