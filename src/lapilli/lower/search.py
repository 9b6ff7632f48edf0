"""Searches in sorted sequences and sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, unary, where
from lapilli.ir.integer import Int, product
from lapilli.ir.node import Map, Node
from lapilli.lower.indexing import unflat
from lapilli.lower.registry import Call, Operand, convert, lowering, member
from lapilli.lower.scan import bound, scan
from lapilli.lower.sort import before

aten = torch.ops.aten


def places_below(
    call: Call, boundaries: Node, row: Sequence[Int], value: Expr, right: bool, sorter: Node | None
) -> Expr:
    """int32: the number of boundaries in a row that are less than the value (or equal, if `right`), by an unrolled binary
    search.
    """
    n = boundaries.shape[-1]
    most = bound(call, n)
    count: Expr = const(0)
    step = (1 << most.bit_length()) // 2
    while step:
        tried = count + step
        place = indirect(binary("max", binary("min", tried - 1, index(n - 1)), 0), n)
        if sorter is not None:
            place = indirect(load(sorter, [*row, place]), n)
        b = cast_to(load(boundaries, [*row, place]), value.dtype)
        below = unary("not", before(value, b)) if right else before(b, value)
        count = where(binary("and", binary("le", tried, index(n)), below), tried, count)
        step //= 2
    return count


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    call: Call,
    boundaries: Node,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Node | None = None,
) -> Map:
    """The index at which each value would be inserted into its row of sorted boundaries: boundaries [*, n] or [n], values
    [*, m] -> [*, m].
    """
    kind = DType.int32 if call.common is DType.bool else call.common

    def body(*at: Int) -> Expr:
        row = [] if boundaries.rank == 1 else at[:-1]
        return places_below(call, boundaries, row, member(values, at, kind), right or side == "right", sorter)

    return call.map(body)


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(call: Call, values: Operand, boundaries: Node, *, out_int32: bool = False, right: bool = False) -> Map:
    """As `searchsorted`, with one row of boundaries [n]; the shape of values."""
    return searchsorted(call, boundaries, values, right=right)


@lowering(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(call: Call, values: Operand, members: Operand, *, assume_unique: bool = False, invert: bool = False) -> Node:
    """Whether each value equals any member, bool of the shape of values; each is compared with all."""
    if not isinstance(members, Node):
        wanted = "ne" if invert else "eq"
        return call.map(lambda *at: binary(wanted, member(values, at, call.common), member(members, [], call.common)))
    listed = members

    def same(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        other = convert(load(listed, unflat(r[0], listed.shape)), call.common)
        return cast_to(binary("eq", member(values, at, call.common), other), DType.bool)

    found = call.reduce("any", same, call.shape, [product(listed.shape)], DType.bool)
    return call.map(lambda *at: unary("not", load_bool(found, at)) if invert else load_bool(found, at))


def load_bool(node: Node, at: Sequence[Int]) -> Expr:
    return cast_to(load(node, list(at)), DType.bool)


@lowering(aten.nonzero_static.default)
def nonzero_static(call: Call, x: Node, *, size: int, fill_value: int = -1) -> Map:
    """[*] -> int64 [size, rank]: the indices of the first `size` nonzero elements, by a search in their cumulative
    count.
    """
    n = product(x.shape)
    if not x.rank or n == 0:
        return call.map(lambda *at: const(fill_value))
    ones = call.map(lambda i: _is_set(load(x, unflat(i, x.shape))), [n], DType.int32)
    before_ = scan(call, "sum", ones, 0)

    def body(row: Int, d: Int) -> Expr:
        found = places_below(call, before_, [], index(row), True, None)  # the first with a count above the row
        place = unflat(indirect(binary("min", found, index(n - 1)), n), x.shape)
        result: Expr = index(place[-1])
        for k in range(x.rank - 1):
            result = select([k - d, d - k], index(place[k]), result)
        return where(binary("lt", found, index(n)), result, const(fill_value))

    return call.map(body)


def _is_set(e: Expr) -> Expr:
    zero = const(0, e.dtype)
    return cast_to(e if e.dtype is DType.bool else binary("ne", e, zero), DType.int32)
