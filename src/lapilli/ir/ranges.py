"""Between which values an expression lies in exact arithmetic: do integers stay within the 32 bits in which kernels compute?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Index, Load, Op, Select
from lapilli.ir.integer import Atom, Int, Symbol
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.narrow import narrowed
from lapilli.ir.node import Constant, Map, Node, Reduce

Range = tuple[float, float]
"""Least and greatest value, of those that are finite: infinities and NaN have no integer."""

MOST = 2**31 - 1
INT32: Range = (-(2**31), MOST)
ANY: Range = (-math.inf, math.inf)
_BOOL: Range = (0, 1)
_STORED: dict[DType, Range] = {
    DType.bool: _BOOL, DType.uint8: (0, 255), DType.int8: (-128, 127), DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: INT32, DType.int64: INT32,
}  # fmt: skip
_DEEPEST = 32
"""Values that are followed by default, from one to those that it is computed from."""


@dataclass
class Ranges:
    """known: of values by id, for those that are not what their expressions say; deepest: how many values are followed, from one
    to those that it is computed from."""

    known: dict[int, Range] = field(default_factory=dict)
    deepest: int = _DEEPEST
    _depth: int = 0

    def node(self, n: Node) -> Range:
        """Of all elements of a tensor value."""
        found = self.known.get(n.id)
        if found is None:
            found = self.known[n.id] = self._node(n)
        return found

    def _node(self, n: Node) -> Range:
        if isinstance(n, Constant) and n.value.size and n.dtype is not DType.bfloat16:
            return float(np.nanmin(n.value)), float(np.nanmax(n.value))
        if not isinstance(n, Map | Reduce) or self._depth == self.deepest:
            return _STORED.get(n.dtype, ANY)
        self._depth += 1
        try:
            return self.expr(n.body) if isinstance(n, Map) else self._reduced(n)
        finally:
            self._depth -= 1

    def _reduced(self, n: Reduce) -> Range:
        if n.op in ("any", "all"):
            return _BOOL
        count = min(math.prod(most(a.extent) for a in n.raxes), MOST)
        if n.op.startswith("arg"):
            return -1 if n.op == "argpool" else 0, max(count - 1, 0)
        if n.dtype.is_float and n.op in ("sum", "prod"):
            return ANY
        low, high = self.expr(n.body)
        if n.op == "sum":
            return min(low, 0) * count, max(high, 0) * count
        if n.op == "prod":
            return _power((low, high), (count, count))
        return low, high

    def expr(self, e: Expr) -> Range:
        """Of a scalar expression."""
        if e.dtype is DType.bool:
            return _BOOL
        if isinstance(e, Const):
            return ANY if math.isnan(e.value) else self._stored(e, (e.value, e.value))
        if isinstance(e, Load):
            return self.node(e.node)
        if isinstance(e, Index):
            return _of_sizes(e.value)
        if isinstance(e, Select):
            return _union(self.expr(e.then), self.expr(e.other))
        assert isinstance(e, Op)
        if e.op == "where":
            return _union(self.expr(e.args[1]), self.expr(e.args[2]))
        if e.op == "cast":
            return self._converted(e)
        rules, other = (_ON_INTEGERS, INT32) if e.dtype is DType.int32 else (_ON_FLOATS, ANY)
        if e.op not in rules:
            return other
        low, high = rules[e.op](*map(self.expr, e.args))
        return ANY if math.isnan(low) or math.isnan(high) else self._stored(e, (low, high))

    def _converted(self, e: Op) -> Range:
        low, high = self.expr(e.args[0])
        if e.dtype is DType.int32 and e.args[0].dtype is DType.float32:
            return _each(math.trunc, low, high)
        return self._stored(e, (low, high))

    def _stored(self, e: Expr, found: Range) -> Range:
        """As what bounds are rounded to."""
        if e.dtype is not DType.float32:
            return found
        with np.errstate(over="ignore"):
            return float(np.float32(found[0])), float(np.float32(found[1]))

    def fits(self, e: Expr) -> bool:
        """Whether all values of an integer expression fit into 32 bits."""
        return fits(self.expr(e))


def fits(r: Range) -> bool:
    """Whether a range lies within 32 bits."""
    return r[0] >= INT32[0] and r[1] <= INT32[1]


def most(size: Int) -> int:
    """The greatest value of a size. No tensor has more elements than kernels can count."""
    high = size.bounds[1]
    if high is None:
        values: Mapping[Atom, int] = {
            a: MOST if a.max is None else a.max for a in size.atoms() if isinstance(a, Symbol)
        }
        high = int(size.evaluate(values))
    return min(high, MOST)


def _of_sizes(value: Int) -> Range:
    """Of an integer expression; a size without a bound is within 32 bits, a product of such sizes need not be."""
    low, high = value.bounds
    if low is not None and high is not None:
        return low, high
    least = greatest = float(value.const)
    for monomial, factor in value.terms:
        product: Range = (1, 1)
        for atom in monomial:
            a, b = atom.bounds
            product = _product(product, (-MOST if a is None else a, MOST if b is None else b))
        first, second = product[0] * factor, product[1] * factor
        least, greatest = least + min(first, second), greatest + max(first, second)
    return (least if low is None else low), (greatest if high is None else high)


def _union(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _each(f: Callable[[float], float], low: float, high: float) -> Range:
    """Of a function that grows."""
    return tuple(f(x) if math.isfinite(x) else x for x in (low, high))  # type: ignore[return-value]


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _product(a: Range, b: Range) -> Range:
    found = [_times(x, y) for x in a for y in b]
    return min(found), max(found)


def _largest(r: Range) -> float:
    return max(abs(r[0]), abs(r[1]))


def _absolute(a: Range) -> Range:
    return (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))), _largest(a)


def _power(a: Range, b: Range) -> Range:
    base, exponent = _largest(a), max(b[1], 0)
    if base <= 1:
        high = 1.0
    else:
        high = math.inf if exponent * math.log2(base) > 64 else base**exponent
    return (0 if a[0] >= 0 else -high), high


def _quotient(a: Range, b: Range) -> Range:
    """Of integers, whichever way it is rounded: by a positive number between itself and zero."""
    if b[0] > 0:
        return min(a[0], 0), max(a[1], 0)
    return -_largest(a), _largest(a)


def _remainder(a: Range, b: Range) -> Range:
    """With the sign of the divisor."""
    return (0 if b[0] >= 0 else min(b[0] + 1, 0)), max(b[1] - 1, 0)


def _remainder_of(a: Range, b: Range) -> Range:
    """With the sign of the dividend."""
    most_ = max(_largest(b) - 1, 0)
    return (0 if a[0] >= 0 else -most_), (0 if a[1] <= 0 else most_)


def _bits(a: Range, b: Range) -> Range:
    if min(a[0], b[0]) < 0 or max(a[1], b[1]) > MOST:
        return INT32
    return 0, 2 ** int(max(a[1], b[1])).bit_length() - 1


def _masked(a: Range, b: Range) -> Range:
    highs = [r[1] for r in (a, b) if r[0] >= 0]
    return (0, min(highs)) if highs else INT32


def _logarithm(a: Range) -> Range:
    """To any of the usual bases. That of the least float is over -150."""
    return -150, (math.log2(a[1]) if 1 < a[1] < math.inf else max(a[1], 0))


def _ratio(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        return ANY
    return _product(a, (1 / b[1], 1 / b[0]))


def _wrapped(stored: Range, a: Range) -> Range:
    return a if stored[0] <= a[0] and a[1] <= stored[1] else stored


def _rounded(dtype: DType, a: Range) -> Range:
    low, high = narrowed(a, dtype)
    return float(low), float(high)


def _within(low: float, high: float) -> Callable[..., Range]:
    return lambda *_: (low, high)


Rule = Callable[..., Range]
_ON_BOTH: dict[str, Rule] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "sign": _within(-1, 1),
}
_ON_INTEGERS: dict[str, Rule] = _ON_BOTH | {
    **{NARROW[d]: partial(_wrapped, _STORED[d]) for d in (DType.uint8, DType.int8, DType.int16)},
    "pow": _power,
    "div": _quotient, "floordiv": _quotient, "mod": _remainder, "fmod": _remainder_of,
    "bitand": _masked, "bitor": _bits, "bitxor": _bits, "bitnot": lambda a: (-a[1] - 1, -a[0] - 1),
    "shl": lambda a, b: _product(a, (1, 2.0 ** min(max(b[1], 0), 64))),
    "shr": lambda a, b: (min(a[0], 0), max(a[1], 0)),
    "gcd": lambda a, b: (0, max(_largest(a), _largest(b))),
}  # fmt: skip
"""Other operators on integers give 32 bits of any kind, and mean it."""
_ON_FLOATS: dict[str, Rule] = _ON_BOTH | {
    **{NARROW[d]: partial(_rounded, d) for d in (DType.float16, DType.bfloat16)},
    "floor": lambda a: _each(math.floor, *a), "ceil": lambda a: _each(math.ceil, *a),
    "round": lambda a: _each(round, *a), "trunc": lambda a: _each(math.trunc, *a),
    "div": _ratio,
    "log": _logarithm, "log2": _logarithm, "log10": _logarithm,
    "sqrt": lambda a: (0, max(a[1], 1)),
    "sin": _within(-1, 1), "cos": _within(-1, 1), "tanh": _within(-1, 1), "erf": _within(-1, 1),
}  # fmt: skip
