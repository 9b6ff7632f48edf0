"""Products of a few rows take in what follows them, where that needs no kernel of its own: updates of states (a cache's new entry),
values of two columns (rotations), and products of the same rows that only their epilogue reads (a gate). Each saves a dispatch that
waits for the one before, and for a single token these waits are most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lapilli.codegen.coded import elements_of_word
from lapilli.codegen.gpu_matvec import RowProduct, product_of
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.pairs import Pairs, step_of
from lapilli.codegen.side_by_side import paired
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import batched
from lapilli.ir.axes import index_of
from lapilli.ir.expr import Expr, Load, cast_to, loads, rewrite, substitute
from lapilli.ir.integer import Atom, Int, as_int, of
from lapilli.ir.node import Matmul
from lapilli.schedule.plan import Draft
from lapilli.schedule.realize import as_var, invert
from lapilli.schedule.task import Task, readers


def absorb(tasks: Sequence[Task], made: Draft, ctx: Context) -> list[Task]:
    """The tasks, with those that a product of a few rows can do in its place. Values of the products that are read elsewhere keep
    their kernels.
    """
    kept, count = made.kept, readers(tasks)
    states = {new.id: state for state, new in made.graph.stores}
    left = {t.out.id: t for t in tasks}
    for task in tasks:
        found = task
        for read in _products(task, left):
            if read.out.id in kept or count[read.out.id] != 1:
                continue
            if task.partial and states.get(task.out.id) in read.reads():
                continue  # some work groups would still read what others overwrite
            taken = _with_second(found, read, ctx) if found.reduction is not None else _as_epilogue(found, read, ctx)
            if taken is not None and _bindings(taken, ctx) <= ctx.target.bindings:
                if isinstance(taken.template, Tiles):
                    ctx.withdraw(task)
                    ctx.withdraw(read)
                found = left[task.out.id] = taken
                del left[read.out.id]
    return list(left.values())


def _products(task: Task, tasks: Mapping[int, Task]) -> Iterator[Task]:
    """Products of a few rows that a value reads, or on matrix units."""
    if task.row is not None or (task.template is None and task.reduction is not None) or task.members:
        return
    for i in dict.fromkeys(ld.node.id for ld in loads(task.value)):
        read = tasks.get(i)
        if read is not None and read is not task and isinstance(read.template, RowProduct | Tiles) and not read.partial:
            yield read


def _bindings(task: Task, ctx: Context) -> int:
    return sum(map(ctx.target.parts, (task.out, *task.reads())))


def _as_epilogue(task: Task, read: Task, ctx: Context) -> Task | None:
    """A pointwise task as the epilogue of the product that it reads, by one column or two; None if it reads others."""
    reduction, template = read.reduction, read.template
    assert reduction is not None
    if not isinstance(template, RowProduct):
        return None
    value = _inlined(task.value, read, None)
    if value is None or template.pairs is not None or not ctx.is_whole(task.out):
        return None
    axes = [*map(index_of, reduction.axes)]
    for ld in loads(value):
        mapping = invert(task.axes, ld.index, axes, reduction.axes) if ld.node is reduction else None
        if mapping is None:
            continue
        store = tuple(substitute(i, mapping) for i in task.store)
        within = tuple((substitute(i, mapping), n) for i, n in task.within)
        whole = replace(
            task, axes=reduction.axes, store=store, within=within, value=rewrite(value, mapping), reduction=reduction,
            reduction_body=read.reduction_body, template=template, origins=[*read.origins, *task.origins],
            reason=f"{task.reason}; epilogue of {reduction.origin}",
        )  # fmt: skip
        if all(ld.index == tuple(axes) for ld in loads(whole.value) if ld.node is reduction):
            return whole
        step = step_of(whole, batched(whole))
        if step is not None:
            return replace(whole, template=replace(template, pairs=Pairs(template.w, step)))
    return None


def _with_second(task: Task, read: Task, ctx: Context) -> Task | None:
    """A product whose epilogue reads another one of the same rows, element by element, as a product of both."""
    template, other = task.template, read.template
    if not isinstance(template, RowProduct | Tiles) or type(template) is not type(other):
        return None
    assert isinstance(other, RowProduct | Tiles)
    if (template.batch, template.m, template.n, template.k) != (other.batch, other.m, other.n, other.k):
        return None
    if any(type(t.reduction.contraction) is not Matmul for t in (task, read) if t.reduction is not None):
        return None
    ours, theirs = product_of(task), product_of(read)
    if [a.extent for a in (*ours.batch, *ours.rows)] != [a.extent for a in (*theirs.batch, *theirs.rows)]:
        return None
    if len(ours.batch) != len(theirs.batch) or read.reduction is None or read.reduction is task.reduction:
        return None
    pairs = zip((*theirs.batch, *theirs.rows, theirs.column), (*ours.batch, *ours.rows, ours.column), strict=True)
    mapping: dict[Atom, Int] = {a: as_int(0) if b.extent == 1 else of(b) for a, b in pairs}
    value = _inlined(task.value, read, mapping)
    if value is None:
        return None
    both = (_of_rows if isinstance(template, RowProduct) else paired)(task, read, value, ctx)
    return both and replace(both, origins=[*read.origins, *task.origins])


def _of_rows(task: Task, read: Task, value: Expr, ctx: Context) -> Task | None:
    """Two products of a few rows as one."""
    template, other = task.template, read.template
    assert isinstance(template, RowProduct)
    assert isinstance(other, RowProduct)
    if template.pairs is not None or other.pairs is not None or template.x != other.x:
        return None
    if (template.scaled is None) != (other.scaled is None):
        return None
    if elements_of_word(template.w.node) != elements_of_word(other.w.node):
        return None  # they are read in the same steps
    return replace(task, value=value, template=replace(template, pairs=Pairs(other.w, second=read.reduction)))


def _inlined(value: Expr, read: Task, mapping: Mapping[Atom, Int] | None) -> Expr | None:
    """A value with what a product stores computed in place. mapping: the product's axes where it must be read; None: anywhere."""
    apart = False
    place = [as_var(i) for i in read.store]
    free = [a for a in place if a is not None]
    if mapping is None and (
        len(set(free)) < len(free) or any(a is None and i != 0 for a, i in zip(place, read.store, strict=True))
    ):
        return None

    def inline(ld: Expr) -> Expr | None:
        nonlocal apart
        assert isinstance(ld, Load)
        if ld.node is not read.out:
            return None
        if mapping is not None:
            apart = apart or tuple(i.substitute(mapping) for i in read.store) != ld.index
            return cast_to(rewrite(read.value, mapping), ld.dtype)
        at: dict[Atom, Int] = {a: i for a, i in zip(place, ld.index, strict=True) if a is not None}
        at |= {a: as_int(0) for a in read.axes if a not in at}
        return cast_to(rewrite(read.value, at), ld.dtype)

    found = rewrite(value, {}, inline)
    return None if apart else found
