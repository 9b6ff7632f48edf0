"""Reductions over dimensions, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, is_finite, load, select, unary, where
from lapilli.ir.integer import Int, as_int, product
from lapilli.ir.node import Node, Reduce
from lapilli.lower.registry import LONG, Call, element, lowering, normalize_dims

aten = torch.ops.aten
Dims = int | Sequence[int] | None
Element = Callable[[Sequence[Int]], Expr]

_ON_BOOLS = {"max": "any", "min": "all"}  # bools are not ordered in a shader


def over(
    call: Call,
    op: str,
    x: Node,
    dims: Sequence[int],
    f: Callable[[Expr], Expr] = lambda e: e,
    kind: DType | None = None,
    dtype: DType | None = None,
    name: str = "",
) -> Reduce:
    """f(x) reduced by `op` over dims; the result has the other dimensions."""
    kind = kind or x.dtype.compute
    if kind is DType.bool and op in _ON_BOOLS:
        op = _ON_BOOLS[op]
    elif kind is DType.bool and op.startswith("arg"):
        kind = DType.int32

    return over_each(call, op, x.shape, dims, lambda at: f(cast_to(load(x, tuple(at)), kind)), dtype, name)


def over_each(
    call: Call,
    op: str,
    shape: Sequence[Int],
    dims: Sequence[int],
    f: Element,
    dtype: DType | None = None,
    name: str = "",
) -> Reduce:
    """f(index) reduced by `op` over dims, for all indices of a shape; the result has the other dimensions."""
    kept = [d for d in range(len(shape)) if d not in dims]

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        full: list[Int] = [as_int(0)] * len(shape)
        for d, i in zip(kept, at, strict=True):
            full[d] = i
        for d, i in zip(dims, r, strict=True):
            full[d] = i
        return f(full)

    return call.reduce(op, body, [shape[d] for d in kept], [shape[d] for d in dims], dtype, name)


def keep(call: Call, r: Node, dims: Sequence[int], rank: int, f: Callable[[Expr], Expr] = lambda e: e) -> Node:
    """The result of `over` in the shape of the call, with or without the reduced dimensions."""
    if len(call.shape) == rank:
        return call.map(lambda *at: f(load(r, [i for d, i in enumerate(at) if d not in dims])))
    return call.map(lambda *at: f(load(r, at)))


def count(x: Node, dims: Sequence[int]) -> Int:
    """The number of elements along dims."""
    return product([x.shape[d] for d in dims])


@lowering(aten.sum.dim_IntList, aten.sum.default)
def sum_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False, **_: Any) -> Node:
    """The sum over dims (all by default), which are removed, or have size 1 with keepdim."""
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "sum", x, d, kind=call.dtype.compute), d, x.rank)


@lowering(aten.mean.dim, aten.mean.default)
def mean(call: Call, x: Node, dims: Dims = None, keepdim: bool = False, **_: Any) -> Node:
    """The mean over dims (all by default), which are removed, or have size 1 with keepdim."""
    d = normalize_dims(dims, x.rank)
    n = index(count(x, d), DType.float32)
    return keep(call, over(call, "sum", x, d, dtype=DType.float32), d, x.rank, lambda e: e / n)


def _extremum(op: str) -> Callable[..., Node]:
    """The maximum or minimum over dims (all by default)."""

    def build(call: Call, x: Node, dims: Dims = None, keepdim: bool = False) -> Node:
        d = normalize_dims(dims, x.rank)
        call.some(*(x.shape[k] for k in d))
        return keep(call, over(call, op, x, d), d, x.rank)

    return build


for _name, _op in {"amax": "max", "amin": "min"}.items():
    lowering(getattr(aten, _name).default)(_extremum(_op))
for _name in ("max", "min"):
    lowering(getattr(aten, _name).default)(_extremum(_name))


def _with_index(op: str) -> Callable[..., tuple[Node, Node]]:
    """The maximum or minimum along a dimension, and the index of the first one (or of the first NaN)."""

    def build(call: Call, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
        d = normalize_dims(dim, x.rank)
        call.some(*(x.shape[k] for k in d))
        value = keep(call, over(call, op, x, d), d, x.rank)
        place = position(call, op, x, d, "_index")
        indices = keep(_second(call), place, d, x.rank)
        return value, indices

    return build


def position(call: Call, op: str, x: Node, d: Sequence[int], name: str = "") -> Reduce:
    """The row-major index, within the dimensions d, of the first maximum or minimum, or of the first NaN."""
    longest = count(x, d).bounds[1]
    if longest is not None and longest <= LONG:
        return over(call, f"arg{op}", x, d, dtype=DType.int64, name=name)
    best = over(call, op, x, d, dtype=x.dtype, name=f"{name}_value")
    kept = [k for k in range(x.rank) if k not in d]

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        full: list[Int] = [as_int(0)] * x.rank
        for k, i in (*zip(kept, at, strict=True), *zip(d, r, strict=True)):
            full[k] = i
        linear = as_int(0)
        for k, i in zip(d, r, strict=True):
            linear = linear * x.shape[k] + i
        value, top = load(x, full), load(best, at)
        found = binary("eq", value, top)
        if value.dtype is DType.float32:
            found = binary("or", found, unary("isnan", value))
        return where(found, index(linear), const(2**31 - 1))

    return call.reduce("min", body, [x.shape[k] for k in kept], [x.shape[k] for k in d], DType.int64, name)


def _second(call: Call) -> Call:
    return replace(call, name=call.name + "_index", shapes=call.shapes[1:], dtypes=call.dtypes[1:])


for _name in ("max", "min"):
    lowering(getattr(aten, _name).dim)(_with_index(_name))


def _arg(op: str) -> Callable[..., Node]:
    """The index of the first maximum or minimum along a dimension, or of the flattened tensor."""

    def build(call: Call, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
        d = normalize_dims(dim, x.rank)
        call.some(*(x.shape[k] for k in d))
        return keep(call, position(call, op, x, d), d, x.rank)

    return build


for _name in ("max", "min"):
    lowering(getattr(aten, f"arg{_name}").default)(_arg(_name))


@lowering(aten.any.default, aten.any.dim, aten.any.dims)
def any_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False) -> Node:
    """Whether any element over dims (all by default) is nonzero, bool."""
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "any", x, d, kind=DType.bool), d, x.rank)


@lowering(aten.all.default, aten.all.dim, aten.all.dims)
def all_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False) -> Node:
    """Whether all elements over dims (all by default) are nonzero, bool."""
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "all", x, d, kind=DType.bool), d, x.rank)


@lowering(aten.var.correction)
def var(call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """The variance over dims: sum((x - mean)^2) / (n - correction), in two passes; see `_variance`."""
    return _variance(call, x, dims, correction, False)[0]


@lowering(aten.std.correction)
def std(call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """The standard deviation over dims, the root of `var`."""
    return _variance(call, x, dims, correction, True)[0]


@lowering(aten.var_mean.correction)
def var_mean(
    call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Node, Node]:
    """The variance and the mean over dims, both of the same shape."""
    return _variance(call, x, dims, correction, False)


@lowering(aten.std_mean.correction)
def std_mean(
    call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Node, Node]:
    """The standard deviation and the mean over dims, both of the same shape."""
    return _variance(call, x, dims, correction, True)


_SMALLER = {False: -60, True: -70}
"""Exponents of factors that keep squared differences from overflowing if the variance, or (True) its root, does not."""


def _variance(call: Call, x: Node, dims: Dims, correction: float | None, root: bool) -> tuple[Node, Node]:
    """The variance, or its root, and the mean, over dims.

    The result is right even if squares or their sum overflow. For that, a second sum is of scaled differences: in the same
    loop or, for rows that take several kernels, only where the first sum overflowed.
    """
    d = normalize_dims(dims, x.rank)
    size, less = count(x, d), float(1 if correction is None else correction)
    n = index(size, DType.float32)

    def first(at: Sequence[Int]) -> Expr:
        """The first element of a row, which is subtracted from all: the variance of equal elements is 0, as Welford's algorithm
        has it, although their sum may be rounded. A root's gradient is masked there, and 1e8 beside a rounding error."""
        if (size.bounds[0] or 0) < 1:
            return const(0.0)
        value = element(x, [as_int(0) if k in d else i for k, i in enumerate(at)], DType.float32)
        moderate = binary("lt", unary("abs", value), 2.0**100)  # or a difference would be infinite
        return where(moderate, value, const(0.0))

    def shifted(at: Sequence[Int]) -> Expr:
        return element(x, at, DType.float32) - first(at)

    # Each part of the mean's distance from the first element, for the sum of all might overflow.
    shift = over_each(call, "sum", x.shape, d, lambda at: shifted(at) / n, DType.float32, "_shift")

    def centered(at: Sequence[Int]) -> Expr:
        return shifted(at) - load(shift, [i for k, i in enumerate(at) if k not in d])

    nothing = size.value is not None and size.value <= less
    divisor = const(0.0) if nothing else binary("max", n - less, 0.0)
    squares = over_each(call, "sum", x.shape, d, lambda at: centered(at) * centered(at), DType.float32, "_squares")
    power = _SMALLER[root]
    in_one = size.bounds[1] is not None and size.bounds[1] <= LONG

    def small(at: Sequence[Int]) -> Expr:
        apart = centered(at) * 2.0**power
        square = apart * apart
        if in_one:
            return square
        finite = is_finite(load(squares, [i for k, i in enumerate(at) if k not in d]))
        return select([indirect(where(finite, const(0), const(1)), 2) - 1], square, const(0.0))

    smaller = over_each(call, "sum", x.shape, d, small, DType.float32, "_small")

    def spread(at: Sequence[Int]) -> Expr:
        value, scaled = load(squares, at) / divisor, load(smaller, at) / divisor
        if root:
            value, scaled = unary("sqrt", value), unary("sqrt", scaled)
        return where(is_finite(load(squares, at)), value, scaled * 2.0 ** (-power if root else -2 * power))

    def result(which: Call, f: Callable[[Sequence[Int]], Expr]) -> Node:
        kept = len(which.shape) == x.rank
        return which.map(lambda *at: f([i for k, i in enumerate(at) if k not in d] if kept else at))

    if len(call.shapes) == 1:
        return result(call, spread), shift
    total = over(call, "sum", x, d, kind=DType.float32, dtype=DType.float32, name="_mean")

    def average(at: Sequence[Int]) -> Expr:
        """The mean. With a count known only at run time, some devices divide with an error in the last digit; a correction step
        removes it.
        """
        value = load(total, at)
        quotient = value / n
        if size.value is not None:
            return quotient
        return where(is_finite(quotient), quotient + (value - quotient * n) / n, quotient)

    return result(call, spread), result(_second(call), average)


def center(x: Node, d: Sequence[int], total: Node) -> Element:
    """x minus its mean over the dimensions d, given its sum. It is recomputed where it is read: in memory it would be
    rounded.
    """
    n = index(count(x, d), DType.float32)
    return lambda at: element(x, at, DType.float32) - load(total, [i for k, i in enumerate(at) if k not in d]) / n


def softmax_parts(call: Call, x: Node, dim: int) -> tuple[Element, Element]:
    """x - max, recomputed where it is read, and the sum of its exponentials along dim."""
    d = normalize_dims(dim, x.rank)
    top = over(call, "max", x, d, dtype=x.dtype, name="_max")

    def without(at: Sequence[Int]) -> list[Int]:
        return [i for k, i in enumerate(at) if k not in d]

    def shifted(at: Sequence[Int]) -> Expr:
        """NaN in rows without a finite maximum, written such that no compiler replaces inf - inf by 0."""
        high = cast_to(load(top, without(at)), DType.float32)
        return where(is_finite(high), element(x, at, DType.float32) - high, const(math.nan))

    total = over_each(call, "sum", x.shape, d, lambda at: unary("exp", shifted(at)), DType.float32, "_sum")
    return shifted, lambda at: load(total, without(at))


@lowering(aten._softmax.default, aten.softmax.int)
def softmax(call: Call, x: Node, dim: int, *_: Any, **__: Any) -> Node:
    """exp(x - max) / sum of exp(x - max) along dim; the shape of x."""
    shifted, total = softmax_parts(call, x, dim)
    return call.map(lambda *at: unary("exp", shifted(at)) / total(at))


@lowering(aten._log_softmax.default, aten.log_softmax.int)
def log_softmax(call: Call, x: Node, dim: int, *_: Any, **__: Any) -> Node:
    """x - max - log(sum of exp(x - max)) along dim; the shape of x."""
    shifted, total = softmax_parts(call, x, dim)
    return call.map(lambda *at: shifted(at) - unary("log", total(at)))


@lowering(aten.logsumexp.default)
def logsumexp(call: Call, x: Node, dims: Dims, keepdim: bool = False) -> Node:
    """log(sum of exp(x)) over dims, computed relative to the maximum if that is finite; -inf over no elements."""
    d = normalize_dims(dims, x.rank)
    top = over(call, "max", x, d, kind=DType.float32, dtype=DType.float32, name="_max")

    def without(at: Sequence[Int]) -> list[Int]:
        return [i for k, i in enumerate(at) if k not in d]

    def offset(at: Sequence[Int]) -> Expr:
        e = load(top, at)
        return where(unary("isinf", e), const(0.0), e)

    def term(at: Sequence[Int]) -> Expr:
        return unary("exp", element(x, at, DType.float32) - offset(without(at)))

    total = over_each(call, "sum", x.shape, d, term, DType.float32, "_sum")
    kept = without if len(call.shape) == x.rank else list
    return call.map(lambda *at: unary("log", load(total, kept(at))) + offset(kept(at)))
