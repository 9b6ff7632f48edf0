"""Matrix products."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, cast_to, load, select
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Matmul, Node, Reduce
from lapilli.lower.registry import (
    BESIDE,
    LEAST_PART,
    LONGEST,
    MOST_PARTS,
    Call,
    Number,
    broadcast,
    element,
    lowering,
    scalar,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class _Factors:
    """Of a product. batch: how many batch dimensions there are."""

    a: Node
    b: Node
    transposed: bool
    batch: int

    def indices(self, at: Sequence[Int], k: Int) -> tuple[list[Int], list[Int]]:
        """Where a and b are read for a term of the result at some place."""
        column = [at[-1], k] if self.transposed else [k, at[-1]]
        return [*at[:-1], k], [*at[: self.batch], *column]

    def term(self, at: Sequence[Int], k: Int, kind: DType) -> Expr:
        left, right = self.indices(at, k)
        return cast_to(load(self.a, left), kind) * cast_to(load(self.b, right), kind)


def product(call: Call, a: Node, b: Node, transposed: bool = False, batch: int = 0) -> Reduce:
    """out[batch, rows, n] = sum over k of a[batch, rows, k] * b[batch, k, n] (b[batch, n, k] if transposed), with `batch`
    batch dimensions.
    """
    factors = _Factors(a, b, transposed, batch)
    shape = (*a.shape[:-1], b.shape[-2] if transposed else b.shape[-1])
    kind, size = call.dtype.compute, a.shape[-1]
    longest = call.longest(size)
    if longest is not None and longest <= LONGEST:
        axes, at = fresh_axes(shape)
        raxes, (k,) = fresh_axes((size,), "k")
        left, right = factors.indices(at, k)
        note = Matmul(a, b, axes[:batch], axes[batch:-1], axes[-1], raxes[0], tuple(left), tuple(right))
        return Reduce(
            shape, call.storage(call.dtype), call.name, call.op, axes=axes, raxes=raxes, op="sum",
            body=factors.term(at, k, kind), contraction=note if kind is not DType.bool else None,
        )  # fmt: skip
    if size.value is not None and size.value <= _MOST_TERMS and kind is DType.float32:
        return _product_in_parts(call, factors, shape, size.value)
    return call.reduce("sum", lambda at, r: factors.term(at, r[0], kind), shape, [size])  # in two steps


def _product_in_parts(call: Call, factors: _Factors, shape: tuple[Int, ...], terms: int) -> Reduce:
    """The same for a known inner dimension: a batch of products, each of a part of the sum, so that kernels for products compute
    them. Their results are added, with the terms that are left over.
    """
    a, b, batch = factors.a, factors.b, factors.batch
    sizes = [_USUAL if x.value is None else max(x.value, 1) for x in shape[batch:]]
    rows, columns = math.prod(sizes[:-1]), sizes[-1]
    most = min((rows + columns) * terms // (BESIDE * rows * columns), terms // LEAST_PART, MOST_PARTS)
    count = max(most, -(-terms // LONGEST))
    count = next((c for c in range(count, 2 * count) if terms % (8 * c) == 0), count)
    each = terms // count // 8 * 8
    axes, (part, *at) = fresh_axes((as_int(count), *shape))
    raxes, (r,) = fresh_axes((as_int(each),), "k")
    k = part * each + r
    left, right = factors.indices(at, k)
    note = Matmul(a, b, axes[: 1 + batch], axes[1 + batch : -1], axes[-1], raxes[0], tuple(left), tuple(right))
    parts = Reduce(
        (as_int(count), *shape), DType.float32, f"{call.name}_parts", call.op, axes=axes, raxes=raxes, op="sum",
        body=factors.term(at, k, DType.float32), contraction=note,
    )  # fmt: skip

    def added(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        left_over = factors.term(at, r[0] - count + count * each, DType.float32)
        return select([count - 1 - r[0]], load(parts, [r[0], *at]), left_over)

    return call.reduce("sum", added, shape, [as_int(count + terms - count * each)], longest=None)


_MOST_TERMS = LONGEST << 11
"""Of a sum: parts of LONGEST terms, and the terms left over, are no more than one invocation adds."""
_USUAL = 1024
"""What an open size is taken for."""


def _plus(call: Call, r: Node, bias: Node | None, beta: Number = 1, alpha: Number = 1) -> Node:
    """alpha * r + beta * bias, with broadcasting; bias is not read if beta is 0."""
    kind = call.dtype.compute
    if bias is None or beta == 0:
        return r if alpha == 1 else call.map(lambda *at: load(r, at) * scalar(alpha, kind))
    return call.map(lambda *at: load(r, at) * scalar(alpha, kind) + element(bias, at, kind) * scalar(beta, kind))


@lowering(aten.linear.default)
def linear(call: Call, x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x [*, k], weight [n, k] or [k], bias [n] or [] -> [*, n] or [*]: x @ weight^T + bias."""
    if weight.rank == 1:
        return _vector(call, x, weight) if bias is None else _plus(call, _vector(call, x, weight), bias)
    return _plus(call, product(call, x, weight, transposed=True), bias)


def _vector(call: Call, x: Node, w: Node) -> Node:
    """x [*, k], w [k] -> [*]: the dot product of every row of x and w."""
    k = x.shape[-1]
    kind = call.dtype.compute
    return call.reduce(
        "sum", lambda at, r: cast_to(load(x, [*at, r[0]]), kind) * cast_to(load(w, [r[0]]), kind), x.shape[:-1], [k]
    )


@lowering(aten.mm.default)
def mm(call: Call, a: Node, b: Node) -> Node:
    """[m, k] @ [k, n] -> [m, n]."""
    return product(call, a, b)


@lowering(aten._int_mm.default)
def int_mm(call: Call, a: Node, b: Node) -> Node:
    """int8 or uint8 [m, k] @ int8 [k, n] -> int32 [m, n].

    Sums of floats in parts that are exact: their kernels are the faster ones, and decode a weight's bytes as they read them. Longer
    sums are of 32-bit integers.
    """
    k = a.shape[1].value
    largest = 1
    for given in call.given:
        kind = torch.iinfo(given.dtype)
        largest *= max(kind.max, -kind.min)
    terms = _EXACT // largest
    if not k or k > _MOST_PARTS * terms:
        return product(call, a, b)
    parts = [_part(call, a, b, first, min(first + terms, k)) for first in range(0, k, terms)]

    def total(*at: Int) -> Expr:
        sums = [cast_to(load(part, at), DType.int32) for part in parts]
        return functools.reduce(operator.add, sums)

    return call.map(total)


_EXACT = 1 << 24
"""All integers up to this one are float32, so sums that cannot exceed it are exact in any order."""
_MOST_PARTS = 4
"""Further ones would cost more than integers."""


def _part(call: Call, a: Node, b: Node, first: int, end: int) -> Reduce:
    """Terms of a sum of products of bytes, as floats. Nothing of it is rounded, in whatever precision."""
    count = as_int(end - first)
    left = call.map(lambda i, k: cast_to(load(a, [i, k + first]), DType.float32), [a.shape[0], count], DType.float32)
    right = call.map(lambda k, j: cast_to(load(b, [k + first, j]), DType.float32), [count, b.shape[1]], DType.float32)
    axes, (i, j) = fresh_axes(call.shape)
    raxes, (k,) = fresh_axes((count,), "k")
    note = Matmul(left, right, (), axes[:1], axes[1], raxes[0], (i, k), (k, j))
    body = cast_to(load(left, [i, k]), DType.float32) * cast_to(load(right, [k, j]), DType.float32)
    return Reduce(
        call.shape, DType.float32, call.name, call.op, axes=axes, raxes=raxes, op="sum", body=body, contraction=note
    )


@lowering(aten.bmm.default)
def bmm(call: Call, a: Node, b: Node) -> Node:
    """[B, m, k] @ [B, k, n] -> [B, m, n]."""
    return product(call, a, b, batch=1)


@lowering(aten.addmm.default)
def addmm(call: Call, bias: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * (a @ b): a [m, k], b [k, n] -> [m, n]; bias broadcasts."""
    return _plus(call, product(call, a, b), bias, beta, alpha)


@lowering(aten.baddbmm.default)
def baddbmm(call: Call, bias: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * (a @ b): a [B, m, k], b [B, k, n] -> [B, m, n]; bias broadcasts."""
    return _plus(call, product(call, a, b, batch=1), bias, beta, alpha)


@lowering(aten.mv.default)
def mv(call: Call, a: Node, v: Node) -> Node:
    """[m, k] @ [k] -> [m]."""
    return _vector(call, a, v)


@lowering(aten.dot.default)
def dot(call: Call, a: Node, b: Node) -> Node:
    """[k] . [k] -> []."""
    return _vector(call, a, b)


@lowering(aten.matmul.default)
def matmul(call: Call, a: Node, b: Node) -> Node:
    """torch.matmul: [*, m, k] @ [*, k, n] -> [*, m, n] with broadcast batch dimensions. A vector [k] on either side drops m
    or n.
    """
    if b.rank == 1:
        return _vector(call, a, b)
    if a.rank == 1:
        kind = call.dtype.compute
        return call.reduce(
            "sum",
            lambda at, r: cast_to(load(a, [r[0]]), kind) * cast_to(load(b, [*at[:-1], r[0], at[-1]]), kind),
            call.shape,
            [a.shape[0]],
        )
    if b.rank == 2:
        return product(call, a, b)
    batch = call.shape[:-2]

    def expanded(x: Node) -> Map:
        shape = (*batch, *x.shape[-2:])
        return call.map(lambda *at: load(x, broadcast(x, at)), shape=shape, dtype=x.dtype)

    return product(call, expanded(a), expanded(b), batch=len(batch))
