"""Cumulative operators: prefix sums, products, maxima and minima.

A scan is a few reductions (Hillis and Steele 1986, with steps of 16 instead of 2). After pass k, an element holds the
reduction of its last 16^(k+1) predecessors. Every pass is one parallel kernel, and rounding errors grow with the logarithm
of the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, load, select, unary, where
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node, neutral
from lapilli.lower.product import cumulated
from lapilli.lower.registry import Call, convert, lowering

aten = torch.ops.aten

RADIX = 16
LARGEST = 1 << 20
"""The longest axis that is scanned or sorted if its size is dynamic."""


def bound(call: Call, size: Int) -> int:
    """The largest possible value of a size, for which passes are generated. Raises TypeError if a dynamic size may exceed
    `LARGEST`.
    """
    most = call.longest(size)
    if most is None or (size.value is None and most > LARGEST):
        raise TypeError(
            f"{call.op}: this dimension has no upper bound, or one over {LARGEST}; give it a smaller `max` in its Dim"
        )
    return most


def steps(longest: int) -> list[int]:
    """The distances of the passes: 1, 16, 256, ..."""
    result = [1]
    while result[-1] * RADIX < longest:
        result.append(result[-1] * RADIX)
    return result


def scan(call: Call, op: str, x: Node, d: int, kind: DType | None = None) -> Node:
    """out[i] = op over j <= i of x[j] along dimension d, in the type `kind`; the shape of x. Sums of floats are float32."""
    kind = kind or x.dtype.compute
    if kind is DType.bool:
        kind = DType.int32
    result: Node = x
    for n, step in enumerate(steps(bound(call, x.shape[d]))):
        source = result

        def body(at: tuple[Int, ...], r: tuple[Int, ...], source: Node = source, step: int = step) -> Expr:
            i = at[d] - r[0] * step
            return select([i], cast_to(load(source, [*at[:d], i, *at[d + 1 :]]), kind), neutral(op, kind))

        window = [as_int(RADIX)] if x.shape[d] != 1 else [as_int(1)]
        result = call.reduce(op, body, x.shape, window, kind, f"_scan{n}")
    return result


def _finish(call: Call, r: Node) -> Map:
    return call.map(lambda *at: load(r, at))


def _cumulative(op: str) -> Any:
    """The cumulative sum or product along a dimension; the shape of x."""

    def build(call: Call, x: Node, dim: int, **_: Any) -> Map:
        if not x.rank:
            return _finish(call, x)
        given = call.map(lambda *at: convert(load(x, at), call.dtype), dtype=call.dtype)
        d = dim % x.rank
        if op == "prod" and call.dtype.is_float:
            return cumulated(call, given, d, steps(bound(call, x.shape[d])), RADIX)
        return _finish(call, scan(call, op, given, d, call.dtype.compute))

    return build


lowering(aten.cumsum.default)(_cumulative("sum"))
lowering(aten.cumprod.default)(_cumulative("prod"))


def _with_place(op: str) -> Any:
    """The extremum so far along a dimension, and the last index at which it occurred; both of the shape of x. From the
    first NaN on, that is the index of the last NaN.
    """

    def build(call: Call, x: Node, dim: int) -> tuple[Node, Node]:
        second = replace(call, name=call.name + "_index", shapes=call.shapes[1:], dtypes=call.dtypes[1:])
        if not x.rank:
            return _finish(call, x), second.map(lambda: const(0))
        d = dim % x.rank
        best = scan(call, op, x, d)

        def met(*at: Int) -> Expr:
            e = cast_to(load(x, at), best.dtype.compute)
            here = binary("eq", e, load(best, at))
            if e.dtype is DType.float32:
                here = binary("or", here, unary("isnan", e))
            return where(here, index(at[d]), const(-1))

        return _finish(call, best), _finish(second, scan(second, "max", second.map(met, dtype=DType.int32), d))

    return build


lowering(aten.cummax.default)(_with_place("max"))
lowering(aten.cummin.default)(_with_place("min"))


@lowering(aten.logcumsumexp.default)
def logcumsumexp(call: Call, x: Node, dim: int) -> Map:
    """log(sum of exp(x[j]), j <= i) along a dimension; the shape of x. Each pass, as in `scan`, is relative to the largest
    term.
    """
    if not x.rank:
        return _finish(call, x)
    d = dim % x.rank
    result: Node = x
    for n, step in enumerate(steps(bound(call, x.shape[d]))):
        result = _log_pass(call, result, d, step, n)
    return _finish(call, result)


def _log_pass(call: Call, x: Node, d: int, step: int, n: int) -> Map:
    """One pass: log(sum of exp(x[i - r * step]), r < RADIX) along dimension d."""

    def term(at: Sequence[Int], r: Int) -> tuple[Int, Expr]:
        i = at[d] - r * step
        return i, cast_to(load(x, [*at[:d], i, *at[d + 1 :]]), DType.float32)

    def terms(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        i, e = term(at, r[0])
        return select([i], e, const(float("-inf")))

    top = call.reduce("max", terms, x.shape, [as_int(RADIX)], DType.float32, f"_top{n}")

    def offset(at: Sequence[Int]) -> Expr:
        """The largest term, or 0 if that is infinite."""
        e = load(top, at)
        return where(unary("isinf", e), const(0.0), e)

    def exponentials(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        i, e = term(at, r[0])
        return select([i], unary("exp", e - offset(at)), const(0.0))

    total = call.reduce("sum", exponentials, x.shape, [as_int(RADIX)], DType.float32, f"_sum{n}")
    result = call.map(lambda *at: unary("log", load(total, at)) + offset(at), x.shape, DType.float32)
    result.dtype = DType.float32  # intermediates of an operator stay float32 in half precision
    return result
