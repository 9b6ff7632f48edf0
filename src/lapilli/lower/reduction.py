"""Reductions over dimensions, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, is_finite, load, unary, where
from lapilli.ir.integer import Int, as_int, product
from lapilli.ir.node import Node, Reduce
from lapilli.lower.registry import LONG, Call, element, lowering, normalize_dims

aten = torch.ops.aten
Dims = int | Sequence[int] | None
Element = Callable[[Sequence[Int]], Expr]

_ON_BOOLS = {"max": "any", "min": "all"}  # bools have no order in a shader


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
    """Reduce f of the elements of x over dims; the result has the other dimensions only."""
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
    """Reduce f(index), over all indices of a shape, over dims."""
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
    """The result of `over` in the shape of the call (with or without the reduced dimensions)."""
    if len(call.shape) == rank:
        return call.map(lambda *at: f(load(r, [i for d, i in enumerate(at) if d not in dims])))
    return call.map(lambda *at: f(load(r, at)))


def count(x: Node, dims: Sequence[int]) -> Int:
    return product([x.shape[d] for d in dims])


@lowering(aten.sum.dim_IntList, aten.sum.default)
def sum_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False, **_: Any) -> Node:
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "sum", x, d, kind=call.dtype.compute), d, x.rank)


@lowering(aten.mean.dim, aten.mean.default)
def mean(call: Call, x: Node, dims: Dims = None, keepdim: bool = False, **_: Any) -> Node:
    d = normalize_dims(dims, x.rank)
    n = index(count(x, d), DType.float32)
    return keep(call, over(call, "sum", x, d, dtype=DType.float32), d, x.rank, lambda e: e / n)


def _extremum(op: str) -> Callable[..., Node]:
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
    def build(call: Call, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
        d = normalize_dims(dim, x.rank)
        call.some(*(x.shape[k] for k in d))
        value = keep(call, over(call, op, x, d), d, x.rank)
        place = position(call, op, x, d, "_index")
        indices = keep(_second(call), place, d, x.rank)
        return value, indices

    return build


def position(call: Call, op: str, x: Node, d: Sequence[int], name: str = "") -> Reduce:
    """Where the first maximum or minimum (or the first NaN) lies in the dimensions d, counted row by row."""
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
    def build(call: Call, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
        d = normalize_dims(dim, x.rank)
        call.some(*(x.shape[k] for k in d))
        return keep(call, position(call, op, x, d), d, x.rank)

    return build


for _name in ("max", "min"):
    lowering(getattr(aten, f"arg{_name}").default)(_arg(_name))


@lowering(aten.prod.default)
def prod_all(call: Call, x: Node, **_: Any) -> Node:
    d = list(range(x.rank))
    return keep(call, over(call, "prod", x, d, kind=call.dtype.compute), d, x.rank)


@lowering(aten.prod.dim_int)
def prod(call: Call, x: Node, dim: int, keepdim: bool = False, **_: Any) -> Node:
    d = normalize_dims(dim, x.rank)
    return keep(call, over(call, "prod", x, d, kind=call.dtype.compute), d, x.rank)


@lowering(aten.any.default, aten.any.dim, aten.any.dims)
def any_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False) -> Node:
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "any", x, d, kind=DType.bool), d, x.rank)


@lowering(aten.all.default, aten.all.dim, aten.all.dims)
def all_(call: Call, x: Node, dims: Dims = None, keepdim: bool = False) -> Node:
    d = normalize_dims(dims, x.rank)
    return keep(call, over(call, "all", x, d, kind=DType.bool), d, x.rank)


@lowering(aten.var.correction)
def var(call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """Two passes, as numerically safe as Welford's for one kernel per row."""
    d = normalize_dims(dims, x.rank)
    centered, n = _deviations(call, x, d, correction)
    total = over_each(call, "sum", x.shape, d, lambda at: centered(at) * centered(at), DType.float32)
    return keep(call, total, d, x.rank, lambda e: e / n)


def _deviations(call: Call, x: Node, d: Sequence[int], correction: float | None) -> tuple[Element, Expr]:
    """Distances from the mean, and what the sum of their squares is divided by."""
    centered = center(x, d, over(call, "sum", x, d, kind=DType.float32, dtype=DType.float32, name="_mean"))
    size, less = count(x, d), float(1 if correction is None else correction)
    nothing = size.value is not None and size.value <= less
    return centered, const(0.0) if nothing else binary("max", index(size, DType.float32) - less, 0.0)


@lowering(aten.std.correction)
def std(call: Call, x: Node, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Node:
    """The root of the variance, of numbers too whose squares overflow: these are made small first."""
    d = normalize_dims(dims, x.rank)
    centered, n = _deviations(call, x, d, correction)

    def squares(scale: float, name: str = "") -> Reduce:
        def f(at: Sequence[Int]) -> Expr:
            distance = centered(at) * scale
            return distance * distance

        return over_each(call, "sum", x.shape, d, f, DType.float32, name)

    total, small = squares(1.0), squares(2.0**-70, "_small")

    def body(*at: Int) -> Expr:
        at = tuple(i for k, i in enumerate(at) if k not in d) if len(at) == x.rank else at
        value = load(total, at)
        return where(is_finite(value), unary("sqrt", value / n), unary("sqrt", load(small, at) / n) * 2.0**70)

    return call.map(body)


def center(x: Node, d: Sequence[int], total: Node) -> Element:
    """x minus its mean over the dimensions d, given its sum. Readers compute it again: it gets no memory, in which it would
    be rounded."""
    n = index(count(x, d), DType.float32)
    return lambda at: element(x, at, DType.float32) - load(total, [i for k, i in enumerate(at) if k not in d]) / n


def softmax_parts(call: Call, x: Node, dim: int) -> tuple[Element, Element]:
    """x - max, which is computed where it is read, and the sum of its exponentials over dim."""
    d = normalize_dims(dim, x.rank)
    top = over(call, "max", x, d, dtype=x.dtype, name="_max")

    def without(at: Sequence[Int]) -> list[Int]:
        return [i for k, i in enumerate(at) if k not in d]

    def shifted(at: Sequence[Int]) -> Expr:
        """NaN in rows without a finite maximum, said so that no compiler finds 0 for inf - inf."""
        high = cast_to(load(top, without(at)), DType.float32)
        return where(is_finite(high), element(x, at, DType.float32) - high, const(math.nan))

    total = over_each(call, "sum", x.shape, d, lambda at: unary("exp", shifted(at)), DType.float32, "_sum")
    return shifted, lambda at: load(total, without(at))


@lowering(aten._softmax.default, aten.softmax.int)
def softmax(call: Call, x: Node, dim: int, *_: Any, **__: Any) -> Node:
    shifted, total = softmax_parts(call, x, dim)
    return call.map(lambda *at: unary("exp", shifted(at)) / total(at))


@lowering(aten._log_softmax.default, aten.log_softmax.int)
def log_softmax(call: Call, x: Node, dim: int, *_: Any, **__: Any) -> Node:
    shifted, total = softmax_parts(call, x, dim)
    return call.map(lambda *at: shifted(at) - unary("log", total(at)))


@lowering(aten.logsumexp.default)
def logsumexp(call: Call, x: Node, dims: Dims, keepdim: bool = False) -> Node:
    """Relative to the greatest element, where one can subtract it; of nothing, the logarithm of 0."""
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
