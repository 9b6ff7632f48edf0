"""Where the kernel of a contraction is chosen among its candidates: by what was measured on the device or, where nothing was, by
cost models. Families enumerate candidates (`families.py`, `KernelTemplate.variants`), the one first that their cost model prefers.

What a choice may depend on is a question (`target/records.py`): sizes, types, how operands lie, what follows. Never names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from lapilli.codegen.open_rows import likely_rows
from lapilli.codegen.template import Asked, Context, KernelTemplate
from lapilli.codegen.wrapper import all_multiples
from lapilli.ir.expr import loads
from lapilli.ir.integer import Int, product
from lapilli.ir.node import Attention, AttentionGradient, Constant, Input, Node, State
from lapilli.schedule.contraction import ConvolutionView, MatmulView, Operand
from lapilli.schedule.encoding import Blocks
from lapilli.schedule.fuse_reductions import RowFusion
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import PARTS
from lapilli.target.records import Question, Size

_MOST_VARIANTS = 8
"""Of a family: those that its cost model expects least of are hardly better, and each is a program to compile and to time."""


T = TypeVar("T")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A kernel that could compute a task. name: of its family, and how it differs from others of it; as in records. made: the
    template, or what else makes the difference.
    """

    name: str
    made: T


def named(family: str, templates: Iterable[KernelTemplate]) -> Iterator[Candidate[KernelTemplate]]:
    for template in islice(templates, _MOST_VARIANTS):
        variant = template.variant
        yield Candidate(f"{family}: {variant}" if variant else family, template)


def in_turn(families: Iterable[Iterator[Candidate[T]]]) -> Iterator[Candidate[T]]:
    """The candidates of several families: the best of the first family, then the best of each of the others, and so on, so that a
    session that ends early has seen all families."""
    left = []
    for family in families:
        first = next(family, None)
        if first is not None:
            yield first
            left.append(family)
    while left:
        for family in [*left]:
            found = next(family, None)
            if found is None:
                left.remove(family)
            else:
                yield found


def choose(task: Task, question: Question, candidates: Iterator[Candidate[T]], ctx: Context) -> T | None:
    """What is taken for a task; None if there is no candidate. What a record names that is no candidate (here, or in this version
    of the compiler) does not count."""
    if ctx.asked is not None:
        found = [*candidates]
        computed = (task.out, *([task.reduction] if task.reduction is not None else []))
        if found:
            ctx.asked.append(Asked(question, tuple(node.id for node in computed), tuple(c.name for c in found)))
        candidates = iter(found)
    first = next(candidates, None)
    if first is None:
        return None
    wanted = ctx.target.records.best(question, first.name)
    taken = next((c for c in chain([first], candidates) if c.name == wanted), first) if wanted is not None else first
    return taken.made


# -- what a choice depends on


def of_product(v: MatmulView, task: Task, ctx: Context) -> Question:
    sizes = {"batch": _size(v.batch), "m": _rows(v.m), "n": _size(v.n), "k": _size(v.k)}
    lhs, rhs = _operand(v.lhs, "bmk"), _operand(v.rhs, "bkn")
    return Question(_plan(ctx), "product", f"{lhs} * {rhs} -> {_result(task)}", sizes)


def of_convolution(v: ConvolutionView, task: Task, ctx: Context) -> Question:
    sizes = {
        "n": _size(v.n), "c": _size(v.channels), "h": _size(v.h), "w": _size(v.w), "o": _size(v.out_channels), "oh": _size(v.out_h),
        "ow": _size(v.out_w),
    }  # fmt: skip
    d = v.depths
    deep = "" if d is None else f"{d.kernel} deep of {d.size.value or 'some'}, / {d.stride}, dilated {d.dilation}"
    groups = "depthwise" if v.is_depthwise else f"{v.groups} groups" if v.groups > 1 else ""
    kernel = " ".join(
        f"{name}{'x'.join(map(str, of))}"
        for name, of in (("", v.kernel), ("/", v.stride), ("dilated ", v.dilation))
        if not name or of != (1, 1)
    )
    weight = f"{v.weight.dtype.name} {_origin(v.weight)}"
    form = ", ".join(filter(None, [f"{_operand(v.x, 'nchw')} * {weight}", kernel, deep, groups]))
    return Question(_plan(ctx), "convolution", f"{form} -> {_result(task)}", sizes)


def of_attention(task: Task, scores: Task, note: Attention | AttentionGradient, ctx: Context) -> Question:
    sizes = {
        "heads": _size(product([a.extent for a in note.batch])), "m": _rows(note.rows[0].extent), "n": _size(note.inner.extent),
        "k": _size(note.q.shape[-1]), "width": _size(note.v.shape[-1]),
    }  # fmt: skip
    shared = math.prod(estimate(a.extent) for a in note.batch) // max(math.prod(map(estimate, note.k.shape[:-2])), 1)
    words = [*(x.dtype.name for x in (note.q, note.k, note.v)), *(["causal"] if note.causal else [])]
    words += [f"{shared} heads a key"] if shared > 1 else []
    op = f"gradient of attention's {note.of}" if isinstance(note, AttentionGradient) else "attention"
    return Question(_plan(ctx), op, f"{', '.join(words)}, scores {_result(scores)} -> {_result(task)}", sizes)


def of_rows(task: Task, row: RowFusion, ctx: Context) -> Question:
    sizes = {"rows": _size(row.count), "length": _size(row.length)}
    read = {ld.node.id: ld.node for s in row.steps for ld in loads(s.body)}
    types = sorted({n.dtype.name for n in read.values() if n.id in ctx.layouts})
    order = "".join(map(str, ctx.layouts[task.out.id].order))
    form = f"{', '.join(s.reduction.op for s in row.steps)} of {' and '.join(types)}{' to one' if row.whole else ''}"
    return Question(_plan(ctx), "rows", f"{form} -> {_result(task)}, layout {order}", sizes)


def _plan(ctx: Context) -> str:
    return ctx.target.without_codes.removesuffix(PARTS)


def _size(i: Int) -> Size:
    if i.value is not None:
        return Size(i.value, i.value, i.value)
    return Size(*_bounds(i), estimate(i))


def _rows(m: Int) -> Size:
    return _size(m) if m.value is not None else Size(*_bounds(m), likely_rows(m))


def _bounds(i: Int) -> tuple[int, int | None]:
    """Lower bounds that no kernel needs (some need four rows) count as 1: torch.export and the eager device have different ones."""
    least, most = i.bounds
    return (least if least is not None and least >= 4 else 1), most


def _operand(x: Operand, axes: str) -> str:
    """Type, origin, along which axes it lies (the nearest first), and which vectors can be read."""
    apart = [x.offset, *(s for s in x.strides if s != 1)]
    along = next((a for a, s in zip(axes, x.strides, strict=True) if s == 1), "-")
    wide = next((unit for unit in (8, 4) if all_multiples(unit, *apart)), 1)
    encoding = f"blocks of {x.encoding.bits} bits" if isinstance(x.encoding, Blocks) else ""
    return " ".join(filter(None, [x.node.dtype.name, _origin(x.node), f"{along}{wide}", encoding]))


def _origin(node: Node) -> str:
    return "constant" if isinstance(node, Constant) else "given" if isinstance(node, Input | State) else "computed"


def _result(task: Task) -> str:
    """Type and layout of what a task stores, and what it reads beside its operands: rows of numbers, or as much as it stores."""
    others = {ld.node.id: ld.node for ld in loads(task.value) if ld.node is not task.reduction}
    size = estimate(product(task.out.shape))
    large = sum(2 * estimate(product(n.shape)) > size for n in others.values())
    reads = [f"{n} {what}" for n, what in ((len(others) - large, "small"), (large, "large")) if n]
    return " + ".join([task.out.dtype.name, *reads])
