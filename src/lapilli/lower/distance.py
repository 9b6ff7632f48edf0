"""Distances between vectors, and products of three tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, indirect, is_finite, load, select, unary, where
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Constant, Map, Node
from lapilli.lower.indexing import flat, unflat
from lapilli.lower.matmul import product
from lapilli.lower.registry import Call, broadcast, lowering

aten = torch.ops.aten


def _norm(call: Call, difference: Callable[[Sequence[Int], Int], Expr], p: float, size: Int) -> Node:
    """The p-norm of difference(at, r) over r below `size`, for every index `at` of the result.

    (sum |d|^p)^(1/p); the number of nonzero elements for p = 0, and the maximum for p = inf.
    """

    def term(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        e = unary("abs", cast_to(difference(at, r[0]), DType.float32))
        if p == 0:
            return binary("min", unary("ceil", e), const(1.0))  # NaN remains, as in torch
        if p in (1, float("inf")):
            return e
        return e * e if p == 2 else binary("pow", e, const(float(p)))

    if size == 0:
        return call.map(lambda *at: const(0.0))
    total = call.reduce("max" if p == float("inf") else "sum", term, call.shape, [size], DType.float32)

    def root(e: Expr) -> Expr:
        if p in (0, 1, float("inf")):
            return e
        return unary("sqrt", e) if p == 2 else binary("pow", e, const(1 / p))

    return call.map(lambda *at: root(load(total, at)))


def _exceeds(product: Expr) -> Expr:
    """Whether a product is infinity or NaN, by its bits: compilers may assume that it is neither."""
    return binary("and", unary("not", is_finite(product)), binary("ne", unary("as_int", product), -(2**23)))


@lowering(aten._cdist_forward.default, aten.cdist.default)
def cdist(call: Call, a: Node, b: Node, p: float = 2.0, compute_mode: int | None = None) -> Node:
    """a [*, P, M] and b [*, R, M] -> [*, P, R]: the p-norm of the difference of every row of a and every row of b.

    compute_mode, for p = 2: 1 is torch's |a|^2 - 2 a b + |b|^2, 2 the sum of squares, None or 0 the first where P or R is
    more than 25. Here both are the sum of squares, which keeps all digits; but where a coordinate is infinite, the first
    may be infinity minus infinity, and is NaN here too.
    """

    def difference(at: Sequence[Int], r: Int) -> Expr:
        x, y = load(a, broadcast(a, [*at[:-1], r])), load(b, broadcast(b, [*at[:-2], at[-1], r]))
        if p == float("inf"):  # torch leaves out coordinates that are NaN here, though not in pdist
            return where(unary("isnan", x - y), const(0.0), x - y)
        if p != 2 or compute_mode == 2:
            return x - y
        of_products = where(_exceeds(x * y), const(float("nan")), x - y)
        if compute_mode == 1:
            return of_products
        few = select([b.shape[-2] - 26], of_products, x - y)
        return select([a.shape[-2] - 26], of_products, few)

    return _norm(call, difference, p, a.shape[-1])


@lowering(aten._pdist_forward.default, aten.pdist.default)
def pdist(call: Call, x: Node, p: float = 2.0) -> Node:
    """x [N, M] -> [N (N - 1) / 2]: the p-norm of the difference of every pair of rows, in the order of an upper
    triangle.
    """
    n = x.shape[0].value
    if n is None:
        raise TypeError(f"{call.op}: the number of rows must be known when the model is compiled")
    pairs = np.stack(np.triu_indices(n, 1)).astype(np.int32)
    table = Constant((as_int(2), as_int(pairs.shape[1])), DType.int32, f"{call.name}_pairs", "constant", value=pairs)

    def difference(at: Sequence[Int], r: Int) -> Expr:
        first, other = (load(x, [indirect(load(table, [as_int(k), at[0]]), n), r]) for k in range(2))
        return first - other

    return _norm(call, difference, p, x.shape[1])


@lowering(aten._trilinear.default)
def trilinear(
    call: Call,
    a: Node,
    b: Node,
    c: Node,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    sumdim: Sequence[int],
    unroll: int = 1,
) -> Node:
    """The sum over `sumdim` of the product of three broadcast tensors, after each is expanded by dimensions of size 1.

    Dimensions that `c` lacks are summed before the product is multiplied by `c`, as torch does. Another order would give
    NaN for other inputs, where infinities of opposite signs meet.
    """
    rank = a.rank + len(expand_a)
    kind = call.dtype.compute
    has = [[d for d in range(rank) if d not in new] for new in (expand_a, expand_b, expand_c)]
    sizes: list[Int] = [as_int(1)] * rank
    for x, dims in zip((a, b, c), has, strict=True):
        for d, size in zip(dims, x.shape, strict=True):
            sizes[d] = size if size != 1 else sizes[d]
    summed = sorted(d % rank for d in sumdim)
    first = [d for d in summed if d not in has[2] and d != unroll % rank]

    def factor(x: Node, dims: Sequence[int], full: Mapping[int, Int]) -> Expr:
        return cast_to(load(x, broadcast(x, [full[d] for d in dims])), kind)

    def of(x: Node, dims: Sequence[int]) -> _Factor:
        return _Factor(frozenset(dims), lambda full: factor(x, dims, full), x.dtype)

    factors = [of(x, dims) for x, dims in zip((a, b, c), has, strict=True)]
    rest = [d for d in summed if d not in first]
    kept = [d for d in range(rank) if d not in summed]
    if first:
        left = [d for d in range(rank) if d not in first and (d in has[0] or d in has[1])]
        exact = replace(call, name=f"{call.name}_pair", dtypes=(DType.float32,), half=False)
        pair = _summed(exact if kind is DType.float32 else call, sizes, [(factors[0], factors[1])], left, first)
        ways = [(of(pair, left), factors[2])]
    else:
        one, two, three = factors
        ways = [(one * two, three), (one * three, two), (two * three, one)]
    return _summed(call, sizes, ways, kept, rest)


@dataclass(frozen=True)
class _Factor:
    """Of a sum of products: the axes on which it depends, its element at a place of all axes, and as what it is stored (None: as
    the result is).
    """

    axes: frozenset[int]
    at: Callable[[Mapping[int, Int]], Expr]
    dtype: DType | None

    def __mul__(self, other: _Factor) -> _Factor:
        return _Factor(self.axes | other.axes, lambda full: self.at(full) * other.at(full), None)


def _summed(
    call: Call, sizes: Sequence[Int], ways: Sequence[tuple[_Factor, _Factor]], kept: Sequence[int], over: Sequence[int]
) -> Node:
    """[*kept]: the sum over some axes of a product of two factors, which may be divided up in several ways. It is a matrix product
    in one in which both factors have all axes that are added up, and each has further ones for itself.
    """
    for x, y in ways:
        rows, columns = ([d for d in kept if d in p.axes - q.axes] for p, q in ((x, y), (y, x)))
        if over and rows and columns and {*over} <= x.axes & y.axes and all(sizes[d] != 0 for d in (*kept, *over)):
            return _as_product(call, sizes, x, y, kept, rows, columns, over)
    x, y = ways[0]

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        full = {**dict(zip(kept, at, strict=True)), **dict(zip(over, r, strict=True))}
        return x.at(full) * y.at(full)

    shape = [sizes[d] for d in kept]
    return (
        call.reduce("sum", body, shape, [sizes[d] for d in over]) if over else call.map(lambda *at: body(at, ()), shape)
    )


def _as_product(
    call: Call, sizes: Sequence[Int], x: _Factor, y: _Factor, kept: Sequence[int], rows: Sequence[int], columns: Sequence[int],
    over: Sequence[int],
) -> Map:  # fmt: skip
    """x as [*batch, *rows, terms], y as [*batch, terms, columns], and their product as [*kept]."""
    batch = [d for d in kept if d not in (*rows, *columns)]
    terms, width = ([sizes[d] for d in dims] for dims in (over, columns))
    count, wide = math.prod(terms, start=as_int(1)), math.prod(width, start=as_int(1))

    def operand(
        name: str, factor: _Factor, shape: Sequence[Int], place: Callable[[Sequence[Int]], dict[int, Int]]
    ) -> Map:
        # The product of two factors is no value of the model: as a half, it may be infinite or zero where the sum is neither.
        made = replace(call, name=f"{call.name}_{name}", half=False)
        return made.map(lambda *at: factor.at(place(at)), shape, factor.dtype or call.dtype)

    def of_left(at: Sequence[Int]) -> dict[int, Int]:
        return dict(zip([*batch, *rows, *over], [*at[:-1], *unflat(at[-1], terms)], strict=True))

    def of_right(at: Sequence[Int]) -> dict[int, Int]:
        place = [*at[:-2], *unflat(at[-2], terms), *unflat(at[-1], width)]
        return dict(zip([*batch, *over, *columns], place, strict=True))

    outer = [sizes[d] for d in batch]
    left = operand("left", x, [*outer, *(sizes[d] for d in rows), count], of_left)
    right = operand("right", y, [*outer, count, wide], of_right)
    made = product(call, left, right, batch=len(batch))

    def result(*at: Int) -> Expr:
        full = dict(zip(kept, at, strict=True))
        return load(made, [*(full[d] for d in (*batch, *rows)), flat([full[d] for d in columns], width)])

    return call.map(result, [sizes[d] for d in kept])
