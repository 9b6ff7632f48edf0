"""How an operand's elements are stored: densely, or as blocks of small integers that are decoded as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lapilli.ir.axes import index_of
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, ints_of, load, loads, reads, rewrite, walk
from lapilli.ir.integer import Int, Var, ceildiv, of
from lapilli.ir.node import Map, Matmul, Node, Reduce
from lapilli.ir.ranges import Ranges
from lapilli.lower.codes import code_of
from lapilli.schedule.layout import Layout
from lapilli.schedule.realize import is_weight
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task


@dataclass(frozen=True)
class Dense:
    """Elements are stored as they are."""


@dataclass(frozen=True)
class Blocks:
    """A matrix that is decoded from integers of few bits and parameters shared by a block: scales, zero points.

    code: the integer of element (inner, column), in [low, low + 2**bits). value: the element, as an expression of `code`. Any
    decoding is accepted: signed and unsigned codes, integer or float zero points, two codes to a byte.
    """

    code: Expr
    value: Expr
    low: int
    bits: int

    def lying(self, contraction: Matmul, layouts: Mapping[int, Layout]) -> tuple[Node | None, int, int]:
        """The weight [column, inner] whose bytes are the codes, packed from the lowest bits on; which bits of a word are inverted;
        and what the lowest code then is. None if there is no such constant, and no such weight is given.
        """
        found = loads(self.code)
        node = found[0].node if len(found) == 1 else None
        if node is None or not is_weight(node) or node.rank != 2 or node.dtype not in (DType.int8, DType.uint8):
            return None, 0, 0
        at = of(contraction.column), of(contraction.inner)
        if layouts.get(node.id) != Layout.of(node.shape, range(2)) or any(
            a.extent == 1 for a in (contraction.column, contraction.inner)
        ):
            return None, 0, 0
        if node.shape[1] != ceildiv(contraction.inner.extent * self.bits, 8):
            return None, 0, 0  # some of its columns
        if self.bits == 8 and self.code is load(node, at):
            return (node, 0x80808080, -128) if node.dtype is DType.int8 else (node, 0, 0)
        if self.bits == 4 and self.code is code_of(node, at, self.low):
            return node, 0, self.low
        return None, 0, 0


Encoding = Dense | Blocks
DENSE = Dense()
_BITS = (4, 8)


def encoding_of(reduction: Reduce, views: Mapping[int, Map], tasks: Mapping[int, Task]) -> Encoding:
    """The encoding of the right operand of a product. views: values without memory; tasks: by result, before kernels take over
    work.
    """
    contraction = reduction.contraction
    assert isinstance(contraction, Matmul)
    root, at = chase(contraction.rhs, contraction.rhs_index, dict(views))
    value = (
        _computed(tasks.get(root.id), at) if not any(v in i.atoms() for i in at for v in contraction.batch) else None
    )
    if value is None or value.dtype is not DType.float32:  # integers are multiplied as they are
        return DENSE
    found: list[tuple[int, int, Expr]] = []
    for e in walk(value, through_indirect=False):
        if e.dtype is DType.int32 and loads(e) and _runs(e, contraction.inner):
            low, high = Ranges().expr(e)
            bits = next((b for b in _BITS if high - low < 1 << b), None)
            if bits is not None:
                found.append((bits, int(low), e))
    for fewest in _BITS:  # a code of more bits may consist of parts that have few
        # The largest first: arguments precede the expressions that contain them.
        for low, code in ((low, e) for bits, low, e in reversed(found) if bits == fewest):
            shared = set(loads(value)) - set(loads(code))
            if not any(_runs(ld, contraction.inner) for ld in shared) and not _is_part(code, value, contraction.inner):
                return Blocks(code, value, low, fewest)
    return DENSE


def _is_part(code: Expr, value: Expr, inner: Var) -> bool:
    """Whether what lies around a code takes other bits apart, those of a wider code: it depends on the place in a block."""

    seen = {code.id}  # expressions share parts: each is looked at once

    def visit(e: Expr) -> bool:
        if e.id in seen or isinstance(e, Load):
            return False
        seen.add(e.id)
        return any(reads(i, inner) for i in ints_of(e)) or any(map(visit, e.args))

    return visit(value)


def _computed(task: Task | None, at: tuple[Int, ...]) -> Expr | None:
    """An element of a task's result in terms of the values that the task reads."""
    if task is None or task.reduction is not None or task.row is not None or task.partial:
        return None
    if any(i != axis for i, axis in zip(task.store, map(index_of, task.axes), strict=True)):
        return None
    return rewrite(task.value, dict(zip(task.axes, at, strict=True)))


def _runs(e: Expr, inner: Var) -> bool:
    """Whether neighbours along an axis have different values."""
    return rewrite(e, {inner: 0}) is not rewrite(e, {inner: 1})
