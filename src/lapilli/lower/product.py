"""Products of many floats. Significands are multiplied and exponents added, so that no intermediate overflows or underflows
if the result fits float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, load, select, unary, where
from lapilli.ir.integer import Int, as_int, ceildiv
from lapilli.ir.node import Map, Node, neutral
from lapilli.lower.bits import parts
from lapilli.lower.reduction import count, keep, over
from lapilli.lower.registry import Call, lowering, normalize_dims

aten = torch.ops.aten

_WINDOW = 128
"""The number of significands that are multiplied at once: their product is between 2^-64 and 2^64."""

Split = tuple[Expr, Expr]
"""A significand, between sqrt(1/2) and sqrt(2), and an exponent (int32). 0, infinities and NaN are their own significands."""


def split(x: Expr) -> Split:
    """x = significand * 2^exponent; see `Split`."""
    significand, exponent = parts(x)
    low = binary("lt", unary("abs", significand), 0.5**0.5)
    return where(low, significand * 2.0, significand), exponent - cast_to(low, DType.int32)


def joined(product: Expr, exponent: Expr) -> Expr:
    """product * 2^exponent, for a product of significands."""
    e, rest = split(product)
    rest = binary("max", binary("min", rest + exponent, 3 * _LARGEST), -3 * _LARGEST)
    for _ in range(3):
        step = binary("max", binary("min", rest, _LARGEST), -_LARGEST)
        e, rest = e * unary("as_float", binary("shl", step + 127, 23)), rest - step
    return e


_LARGEST = 126


@lowering(aten.prod.default)
def prod_all(call: Call, x: Node, **_: Any) -> Node:
    """The product of all elements: [*] -> []."""
    return _prod(call, x, list(range(x.rank)))


@lowering(aten.prod.dim_int)
def prod(call: Call, x: Node, dim: int, keepdim: bool = False, **_: Any) -> Node:
    """The product along a dimension: [*, n, *] -> [*, *], or [*, 1, *] with keepdim."""
    return _prod(call, x, normalize_dims(dim, x.rank))


def _prod(call: Call, x: Node, d: list[int]) -> Node:
    """The product of x over dimensions d; integers wrap around."""
    longest = count(x, d).bounds[1]
    if call.dtype.compute is not DType.float32 or (longest is not None and longest <= 2):
        return keep(call, over(call, "prod", x, d, kind=call.dtype.compute), d, x.rank)
    kept = [k for k in range(x.rank) if k not in d]

    def number(at: Sequence[Int], r: Int) -> Split:
        full: list[Int] = [as_int(0)] * x.rank
        for k, i in zip(kept, at, strict=True):
            full[k] = i
        for place, k in enumerate(reversed(d)):
            full[k], r = (r, as_int(0)) if place == len(d) - 1 else (r % x.shape[k], r // x.shape[k])
        return split(cast_to(load(x, full), DType.float32))

    product, exponent = _multiplied(call, number, [x.shape[k] for k in kept], count(x, d))
    if len(call.shape) == x.rank:
        return call.map(lambda *at: joined(*(load(n, [at[k] for k in kept]) for n in (product, exponent))))
    return call.map(lambda *at: joined(load(product, at), load(exponent, at)))


def _multiplied(
    call: Call, number: Callable[[Sequence[Int], Int], Split], sizes: Sequence[Int], n: Int, name: str = ""
) -> tuple[Node, Node]:
    """Products of n significands and sums of their exponents, both of shape `sizes`. Many are reduced in windows first."""
    longest = n.bounds[1]
    windows = not name and (longest is None or longest > _WINDOW)
    over_n, shape = ([as_int(_WINDOW)], [*sizes, ceildiv(n, _WINDOW)]) if windows else ([n], list(sizes))
    made: list[Node] = []
    for part, (op, kind) in enumerate((("prod", DType.float32), ("sum", DType.int32))):

        def body(at: tuple[Int, ...], r: tuple[Int, ...], part: int = part, op: str = op, kind: DType = kind) -> Expr:
            if not windows:
                return number(at, r[0])[part]
            i = at[-1] * _WINDOW + r[0]
            return select([n - 1 - i], number(at[:-1], i)[part], neutral(op, kind))

        made.append(call.reduce(op, body, shape, over_n, kind, f"{name}_{('significand', 'exponent')[part]}"))
    product, exponent = made
    if not windows:
        return product, exponent

    def again(at: Sequence[Int], r: Int) -> Split:
        significand, more = split(load(product, [*at, r]))
        return significand, more + load(exponent, [*at, r])

    return _multiplied(call, again, sizes, ceildiv(n, _WINDOW), "_windows")


def cumulated(call: Call, x: Node, d: int, steps: Sequence[int], radix: int) -> Map:
    """out[i] = product of x[j], j <= i, along dimension d. The passes are those of `scan`, with these steps and `radix`
    factors each.
    """
    product: Node = x
    exponent: Node | None = None
    for n, step in enumerate(steps):

        def number(at: Sequence[Int], product: Node = product, exponent: Node | None = exponent) -> Split:
            significand, more = split(cast_to(load(product, at), DType.float32))
            return significand, more if exponent is None else more + load(exponent, at)

        made: list[Node] = []
        for part, (op, kind) in enumerate((("prod", DType.float32), ("sum", DType.int32))):

            def body(
                at: tuple[Int, ...], r: tuple[Int, ...], part: int = part, op: str = op, kind: DType = kind,
                step: int = step, number: Callable[[Sequence[Int]], Split] = number,
            ) -> Expr:  # fmt: skip
                i = at[d] - r[0] * step
                return select([i], number([*at[:d], i, *at[d + 1 :]])[part], neutral(op, kind))

            name = f"_{('significand', 'exponent')[part]}{n}"
            made.append(call.reduce(op, body, x.shape, [as_int(radix)], kind, name))
        product, exponent = made
    assert exponent is not None
    last = exponent
    return call.map(lambda *at: joined(load(product, at), load(last, at)))
