"""The ranges of expressions in exact arithmetic: they prove that integers fit into the 32 bits in which kernels compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Index, Load, Op, Select
from lapilli.ir.integer import Atom, Int, Symbol
from lapilli.ir.interval import ANY, BOOL, INT32, MOST, STORED, Range, each, power, product, union
from lapilli.ir.node import Constant, Map, Node, Reduce
from lapilli.ir.scalar import OPS

_DEEPEST = 32
"""The default depth to which values are followed to their operands."""


@dataclass
class Ranges:
    """Computes ranges of values and expressions, and caches them.

    known: ranges of values, by id, that are not those of their expressions. deepest: the depth to which values are followed
    to their operands.
    """

    known: dict[int, Range] = field(default_factory=dict)
    deepest: int = _DEEPEST
    _depth: int = 0

    def node(self, n: Node) -> Range:
        """The range of all elements of a value."""
        found = self.known.get(n.id)
        if found is None:
            found = self.known[n.id] = self._node(n)
        return found

    def _node(self, n: Node) -> Range:
        if isinstance(n, Constant) and n.value.size:
            return float(np.nanmin(n.numbers)), float(np.nanmax(n.numbers))
        if n.dtype is DType.code:
            return n.least, n.least + 255
        if not isinstance(n, Map | Reduce) or self._depth == self.deepest:
            return STORED.get(n.dtype, ANY)
        self._depth += 1
        try:
            return self.expr(n.body) if isinstance(n, Map) else self._reduced(n)
        finally:
            self._depth -= 1

    def _reduced(self, n: Reduce) -> Range:
        if n.op in ("any", "all"):
            return BOOL
        count = min(math.prod(most(a.extent) for a in n.raxes), MOST)
        if n.op.startswith("arg"):
            return -1 if n.op == "argpool" else 0, max(count - 1, 0)
        if n.dtype.is_float and n.op in ("sum", "prod"):
            return ANY
        low, high = self.expr(n.body)
        if n.op == "sum":
            return min(low, 0) * count, max(high, 0) * count
        if n.op == "prod":
            return power((low, high), (count, count))
        return low, high

    def expr(self, e: Expr) -> Range:
        """The range of a scalar expression."""
        if e.dtype is DType.bool:
            return BOOL
        if isinstance(e, Const):
            return ANY if math.isnan(e.value) else self._stored(e, (e.value, e.value))
        if isinstance(e, Load):
            return self.node(e.node)
        if isinstance(e, Index):
            return _of_sizes(e.value)
        if isinstance(e, Select):
            return union(self.expr(e.then), self.expr(e.other))
        assert isinstance(e, Op)
        if e.op == "cast":
            return self._converted(e)
        row, integer = OPS[e.op], e.dtype is DType.int32
        rule = row.on_integers if integer else row.on_floats
        if rule is None:  # without a rule, integers may have any 32 bits
            return INT32 if integer else ANY
        low, high = rule(*map(self.expr, e.args))
        return ANY if math.isnan(low) or math.isnan(high) else self._stored(e, (low, high))

    def _converted(self, e: Op) -> Range:
        low, high = self.expr(e.args[0])
        if e.dtype is DType.int32 and e.args[0].dtype is DType.float32:
            return each(math.trunc, low, high)
        return self._stored(e, (low, high))

    def _stored(self, e: Expr, found: Range) -> Range:
        """The range after its bounds are rounded to the type of the expression."""
        if e.dtype is not DType.float32:
            return found
        with np.errstate(over="ignore"):
            return float(np.float32(found[0])), float(np.float32(found[1]))

    def fits(self, e: Expr) -> bool:
        """Whether all values of an integer expression fit into 32 bits."""
        return fits(self.expr(e))


CODES = 256
"""Neighbouring integers that a byte tells apart."""


def are_codes(low: float, high: float) -> bool:
    """Whether a byte holds every integer from low to high, 0 among them."""
    return low <= 0 <= high and high - low < CODES


def least_code(e: Expr) -> int | None:
    """The least value of a float that is one of at most 256 neighbouring integers, 0 among them; None for others."""
    if e.dtype is not DType.float32 or not _is_integer(e):
        return None
    low, high = Ranges().expr(e)
    return int(low) if are_codes(low, high) else None


def is_signed_byte(e: Expr) -> bool:
    """Whether a number is an integer of 8 bits with a sign by the way in which it is computed."""
    if e.dtype is not DType.int32 and (e.dtype is not DType.float32 or not _is_integer(e)):
        return False
    low, high = Ranges().expr(e)
    return low >= -128 and high <= 127


def _is_integer(e: Expr) -> bool:
    """Whether a float is an integer by the way in which it is computed."""
    if isinstance(e, Const):
        return float(e.value).is_integer()
    if isinstance(e, Load):
        return e.node.dtype is DType.code
    if isinstance(e, Select):
        return _is_integer(e.then) and _is_integer(e.other)
    if isinstance(e, Op) and e.op == "cast":
        return e.args[0].dtype is DType.int32
    return (
        isinstance(e, Op)
        and e.op in ("add", "sub", "min", "max", "at_least", "at_most")
        and all(map(_is_integer, e.args))
    )


def fits(r: Range) -> bool:
    """Whether a range is within 32 bits."""
    return r[0] >= INT32[0] and r[1] <= INT32[1]


def most(size: Int) -> int:
    """The largest value of a size. No tensor has more elements than kernels can count."""
    high = size.bounds[1]
    if high is None:
        values: Mapping[Atom, int] = {
            a: MOST if a.max is None else a.max for a in size.atoms() if isinstance(a, Symbol)
        }
        high = int(size.evaluate(values))
    return min(high, MOST)


def _of_sizes(value: Int) -> Range:
    """The range of an integer expression over sizes. A size without a bound fits into 32 bits; a product of such sizes need
    not.
    """
    low, high = value.bounds
    if low is not None and high is not None:
        return low, high
    least = greatest = float(value.const)
    for monomial, factor in value.terms:
        whole: Range = (1, 1)
        for atom in monomial:
            a, b = atom.bounds
            whole = product(whole, (-MOST if a is None else a, MOST if b is None else b))
        first, second = whole[0] * factor, whole[1] * factor
        least, greatest = least + min(first, second), greatest + max(first, second)
    return (least if low is None else low), (greatest if high is None else high)
