"""Interval arithmetic: the range of an operation's exact result, given the ranges of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable

from lapilli.ir.dtype import DType
from lapilli.ir.narrow import narrowed

Range = tuple[float, float]
"""Least and greatest finite value; infinities and NaN are left out, because they have no integer."""
Rule = Callable[..., Range]
"""Computes the range of a result from those of the operands."""

MOST = 2**31 - 1
INT32: Range = (-(2**31), MOST)
ANY: Range = (-math.inf, math.inf)
BOOL: Range = (0, 1)
STORED: dict[DType, Range] = {
    DType.bool: BOOL, DType.uint8: (0, 255), DType.int8: (-128, 127), DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: INT32, DType.int64: INT32,
}  # fmt: skip


def union(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def each(f: Callable[[float], float], low: float, high: float) -> Range:
    """The rule of an increasing function."""
    return tuple(f(x) if math.isfinite(x) else x for x in (low, high))  # type: ignore[return-value]


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def product(a: Range, b: Range) -> Range:
    found = [_times(x, y) for x in a for y in b]
    return min(found), max(found)


def _largest(r: Range) -> float:
    return max(abs(r[0]), abs(r[1]))


def absolute(a: Range) -> Range:
    return (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))), _largest(a)


def power(a: Range, b: Range) -> Range:
    base, exponent = _largest(a), max(b[1], 0)
    if base <= 1:
        high = 1.0
    else:
        high = math.inf if exponent * math.log2(base) > 64 else base**exponent
    return (0 if a[0] >= 0 else -high), high


def quotient(a: Range, b: Range) -> Range:
    """Of integers, with any rounding: a quotient by a positive number is between zero and the dividend."""
    if b[0] > 0:
        return min(a[0], 0), max(a[1], 0)
    return -_largest(a), _largest(a)


def remainder(a: Range, b: Range) -> Range:
    """With the sign of the divisor."""
    return (0 if b[0] >= 0 else min(b[0] + 1, 0)), max(b[1] - 1, 0)


def remainder_of(a: Range, b: Range) -> Range:
    """With the sign of the dividend."""
    most_ = max(_largest(b) - 1, 0)
    return (0 if a[0] >= 0 else -most_), (0 if a[1] <= 0 else most_)


def bits(a: Range, b: Range) -> Range:
    if min(a[0], b[0]) < 0 or max(a[1], b[1]) > MOST:
        return INT32
    return 0, 2 ** int(max(a[1], b[1])).bit_length() - 1


def masked(a: Range, b: Range) -> Range:
    highs = [r[1] for r in (a, b) if r[0] >= 0]
    return (0, min(highs)) if highs else INT32


def logarithm(a: Range) -> Range:
    """To any of the usual bases: that of the smallest float is above -150."""
    return -150, (math.log2(a[1]) if 1 < a[1] < math.inf else max(a[1], 0))


def ratio(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        return ANY
    return product(a, (1 / b[1], 1 / b[0]))


def wrapped(stored: Range, a: Range) -> Range:
    return a if stored[0] <= a[0] and a[1] <= stored[1] else stored


def rounded(dtype: DType, a: Range) -> Range:
    low, high = narrowed(a, dtype)
    return float(low), float(high)


def within(low: float, high: float) -> Callable[..., Range]:
    return lambda *_: (low, high)


def sum_of(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def difference(a: Range, b: Range) -> Range:
    return a[0] - b[1], a[1] - b[0]


def negated(a: Range) -> Range:
    return -a[1], -a[0]


def least(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), min(a[1], b[1])


def greatest(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), max(a[1], b[1])


def complement(a: Range) -> Range:
    """The bitwise complement of an integer."""
    return -a[1] - 1, -a[0] - 1


def shifted_left(a: Range, b: Range) -> Range:
    return product(a, (1, 2.0 ** min(max(b[1], 0), 64)))


def shifted_right(a: Range, b: Range) -> Range:
    return min(a[0], 0), max(a[1], 0)


def divisor(a: Range, b: Range) -> Range:
    """The greatest common divisor."""
    return 0, max(_largest(a), _largest(b))


def root(a: Range) -> Range:
    return 0, max(a[1], 1)


def stepwise(f: Callable[[float], float]) -> Rule:
    """The rule of an increasing step function, such as floor."""
    return lambda a: each(f, *a)
