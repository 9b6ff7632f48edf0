"""How an operand's elements are stored: densely, or as blocks of small integers that are decoded as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lapilli.code_operators import widths_of
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

    code: the integer of element (inner, column), in [low, low + 2**width). value: the element, as an expression of `code`. Any
    decoding is accepted: signed and unsigned codes, integer or float zero points, two codes to a byte.
    """

    code: Expr
    value: Expr
    low: int
    width: int

    @property
    def bits(self) -> int:
        """Of a code in a word, if one node has all of them: 4 or 8."""
        return next(b for b in _BITS if self.width <= b)

    def lying(self, contraction: Matmul, layouts: Mapping[int, Layout]) -> Lying | None:
        """The weights [column, inner] whose bytes are the codes; None if there are none."""
        nodes = list({ld.node.id: ld.node for ld in loads(self.code)}.values())
        columns, terms = contraction.column.extent, contraction.inner.extent
        at = of(contraction.column), of(contraction.inner)
        planes: list[tuple[Node, int]] = []
        for node in nodes:
            if not is_weight(node) or node.rank != len(at) or node.dtype not in (DType.int8, DType.uint8):
                return None
            if layouts.get(node.id) != Layout.of(node.shape, range(2)) or columns == 1 or terms == 1:
                return None
            width = next((b for b in (8, 4, 2, 1) if node.shape[1] == ceildiv(terms * b, 8)), None)
            if width is None:
                return None  # some of its columns
            planes.append((node, width))
        planes.sort(key=lambda plane: -plane[1])
        found = tuple(node for node, _ in planes)
        widths = tuple(width for _, width in planes)
        if widths == (8,) and self.code is load(nodes[0], at):
            return Lying(found, widths, 0x80808080, -128) if nodes[0].dtype is DType.int8 else Lying(found, widths)
        if widths == widths_of(self.width) and self.code is code_of(planes, at, self.low, widths != (4,)):
            return Lying(found, widths, 0, self.low)
        return None


@dataclass(frozen=True)
class Lying:
    """Codes as they lie. nodes: bytes with so many bits of each code, the lowest ones first; by fours (`code_operators.py`) unless
    it is a single node of 4 or 8. flip: bits of a word that are inverted before it is taken apart; low: what the lowest code then
    is.
    """

    nodes: tuple[Node, ...]
    widths: tuple[int, ...]
    flip: int = 0
    low: int = 0


Encoding = Dense | Blocks
DENSE = Dense()
_BITS = (4, 8)
"""Of codes that lie in one node, as kernels take them apart."""
_NEIGHBOURS = (1, 2, 4, 8)
"""Places in a block that differ where parts of codes are taken apart; blocks that share a scale are longer."""


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
    found: list[tuple[int, int, int, Expr]] = []
    for e in walk(value, through_indirect=False):
        if e.dtype is DType.int32 and loads(e) and _runs(e, contraction.inner):
            low, high = Ranges().expr(e)
            bits = next((b for b in _BITS if high - low < 1 << b), None)
            if bits is not None:
                found.append((bits, max(int(high - low).bit_length(), 1), int(low), e))
    for fewest in _BITS:  # a code of more bits may consist of parts that have few
        # The largest first: arguments precede the expressions that contain them.
        for width, low, code in ((width, low, e) for bits, width, low, e in reversed(found) if bits == fewest):
            shared = set(loads(value)) - set(loads(code))
            if not any(_runs(ld, contraction.inner) for ld in shared) and not _is_part(code, value, contraction.inner):
                return Blocks(code, value, low, width)
    return DENSE


def _is_part(code: Expr, value: Expr, inner: Var) -> bool:
    """Whether what lies around a code takes other bits apart, those of a wider code: it depends on the place in a block, and
    differs between neighbours. (Scales may be codes themselves, whose place depends on the block.)
    """
    seen = {code.id}  # expressions share parts: each is looked at once

    def visit(e: Expr) -> bool:
        if e.id in seen or isinstance(e, Load):
            return False
        seen.add(e.id)
        if any(reads(i, inner) for i in ints_of(e)):
            first = rewrite(e, {inner: 0})
            if any(rewrite(e, {inner: k}) is not first for k in _NEIGHBOURS):
                return True
        return any(map(visit, e.args))

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
