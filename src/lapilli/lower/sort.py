"""Sorting and selection. Only the permutation is computed; values are gathered at the end.

Chunks are sorted by counting the elements that precede each. Sorted runs are then merged in pairs: every element of the
result finds its source in one of two runs by binary search ("merge path", Green, McColl and Bader 2012), so that a pass is
one kernel without shared memory or barriers. The sort is stable. NaN is the largest number, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, unary, where
from lapilli.ir.integer import Int, IntLike, as_int, minimum, product
from lapilli.ir.node import Map, Node
from lapilli.lower.indexing import at_dim, unflat
from lapilli.lower.registry import Call, lowering
from lapilli.lower.scan import bound

aten = torch.ops.aten

CHUNK = 64
"""The number of elements that are sorted by counting."""


def second(call: Call) -> Call:
    """The call with its second result, the indices, as the first."""
    return replace(call, name=call.name + "_index", shapes=call.shapes[1:], dtypes=call.dtypes[1:])


def key(e: Expr) -> Expr:
    """The value that is compared: bools as integers."""
    return cast_to(e, DType.int32) if e.dtype is DType.bool else e


def before(a: Expr, b: Expr, descending: bool = False) -> Expr:
    """Whether a precedes b, and is not equal to it."""
    if descending:
        return before(b, a)
    less = binary("lt", a, b)
    if a.dtype is not DType.float32:
        return less
    return binary("or", less, binary("and", unary("isnan", b), unary("not", unary("isnan", a))))


def permutation(call: Call, x: Node, d: int, descending: bool = False) -> Node:
    """Indices along dimension d of the elements in sorted order: int32, of the shape of x."""
    n = x.shape[d]
    longest = bound(call, n)
    order = _sorted_chunks(call, x, d, descending, whole=longest <= CHUNK)
    run = CHUNK
    while run < longest:
        order = _merged(call, x, order, d, run, descending)
        run *= 2
    return order


def _sorted_chunks(call: Call, x: Node, d: int, descending: bool, whole: bool) -> Node:
    """The permutation that sorts every chunk. The first kernel counts the elements of the chunk that precede each one; the
    second finds the element whose count is a given position.

    whole: the dimension is a single chunk.
    """
    n = x.shape[d]

    def peer(at: Sequence[Int], r: Int) -> Int:
        """Index of element r of the chunk; it may be beyond the end."""
        return r if whole else at[d] // CHUNK * CHUNK + r

    size = n if whole else as_int(CHUNK)

    def earlier(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        j = peer(at, r[0])
        mine, other = key(load(x, at)), key(load(x, at_dim(at, d, j)))
        equal_and_left = binary(
            "and", unary("not", before(mine, other, descending)), binary("lt", index(j), index(at[d]))
        )
        comes = binary("or", before(other, mine, descending), equal_and_left)
        return select([n - 1 - j], where(comes, const(1), const(0)), const(0))

    rank = call.reduce("sum", earlier, x.shape, [size], DType.int32, "_rank")

    def holder(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        j = peer(at, r[0])
        place = at[d] - (j - r[0])
        found = where(binary("eq", load(rank, at_dim(at, d, j)), index(place)), index(j), const(0))
        return select([n - 1 - j], found, const(0))

    return call.reduce("sum", holder, x.shape, [size], DType.int32, "_chunks")


def _merged(call: Call, x: Node, order: Node, d: int, run: int, descending: bool) -> Node:
    """Merges pairs of sorted runs of length `run`."""
    n = x.shape[d]

    def body(*at: Int) -> Expr:
        left = at[d] // (2 * run) * (2 * run)
        place = index(at[d] - left)  # within the merged run
        sizes = [index(minimum(n - left, run)), index(minimum(n - left - run, run))]
        sizes = [binary("max", s, 0) for s in sizes]

        def element(side: int, number: Expr) -> tuple[Expr, Expr]:
            """Index and key of an element of the left (0) or right (1) run; those of any other element if it does not
            exist.
            """
            inside = binary("max", binary("min", number, sizes[side] - 1), 0)
            at_ = at_dim(at, d, indirect(binary("min", inside + index(left + side * run), index(n - 1)), n))
            position = load(order, at_)
            return position, key(load(x, at_dim(at, d, indirect(position, n))))

        # the number of elements of the left run among the first `place`: the largest whose last element precedes its rival
        count = binary("max", place - sizes[1], 0)
        most = binary("min", place, sizes[0])
        step = run
        while step:
            tried = count + step
            _, mine = element(0, tried - 1)
            _, rival = element(1, place - tried)
            fits = binary("and", binary("le", tried, most), unary("not", before(rival, mine, descending)))
            count = where(fits, tried, count)
            step //= 2
        from_left, mine = element(0, count)
        from_right, rival = element(1, place - count)
        has_left, has_right = binary("lt", count, sizes[0]), binary("lt", place - count, sizes[1])
        first = binary("or", unary("not", has_right), unary("not", before(rival, mine, descending)))
        return where(binary("and", has_left, first), from_left, from_right)

    return call.map(body, x.shape, DType.int32)


def values_at(call: Call, x: Node, order: Node, d: int) -> Map:
    """The elements of x at the first indices of an order."""
    return call.map(lambda *at: load(x, at_dim(at, d, indirect(load(order, at), x.shape[d]))))


def _pair(call: Call, x: Node, order: Node, d: int) -> tuple[Map, Map]:
    """Sorted values and their indices, in the shape of the call."""
    return values_at(call, x, order, d), second(call).map(lambda *at: load(order, at))


def _only(call: Call, x: Node) -> tuple[Map, Map]:
    """The results for a scalar: itself and index 0."""
    return call.map(lambda: load(x, [])), second(call).map(lambda: const(0))


@lowering(aten.sort.default)
def sort(call: Call, x: Node, dim: int = -1, descending: bool = False) -> tuple[Map, Map]:
    """Sorted values and their indices (int64) along a dimension, both of the shape of x; stable."""
    if not x.rank:
        return _only(call, x)
    return _pair(call, x, permutation(call, x, dim % x.rank, descending), dim % x.rank)


@lowering(aten.sort.stable)
def sort_stable(
    call: Call, x: Node, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Map, Map]:
    """As `sort`."""
    return sort(call, x, dim, descending)


@lowering(aten.argsort.default)
def argsort(call: Call, x: Node, dim: int = -1, descending: bool = False) -> Map:
    """The indices (int64) that sort a dimension, of the shape of x; stable."""
    return argsort_stable(call, x, dim=dim, descending=descending)


@lowering(aten.argsort.stable)
def argsort_stable(call: Call, x: Node, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Map:
    """As `argsort`."""
    if not x.rank:
        return call.map(lambda: const(0))
    order = permutation(call, x, dim % x.rank, descending)
    return call.map(lambda *at: load(order, at))


@lowering(aten.topk.default)
def topk(call: Call, x: Node, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Map, Map]:
    """[*, n, *] -> the k largest (or smallest) elements along a dimension, in order, and their indices (int64), both [*, k,
    *].
    """
    if not x.rank:
        return _only(call, x)
    return _pair(call, x, permutation(call, x, dim % x.rank, largest), dim % x.rank)


def _chosen(call: Call, x: Node, d: int, place: Callable[[Sequence[Int]], Int], order: Node) -> tuple[Map, Map]:
    """The element at one position of the order, and its index, with or without the dimension."""

    def position(at: tuple[Int, ...]) -> tuple[list[Int], Expr]:
        full = list(at) if len(call.shape) == x.rank else [*at[:d], as_int(0), *at[d:]]
        return full, load(order, at_dim(full, d, place([*full[:d], *full[d + 1 :]])))

    def value(*at: Int) -> Expr:
        full, p = position(at)
        return load(x, at_dim(full, d, indirect(p, x.shape[d])))

    return call.map(value), second(call).map(lambda *at: position(at)[1])


@lowering(aten.kthvalue.default)
def kthvalue(call: Call, x: Node, k: IntLike, dim: int = -1, keepdim: bool = False) -> tuple[Map, Map]:
    """The k-th smallest element along a dimension (k from 1) and its index (int64)."""
    if not x.rank:
        return _only(call, x)
    d = dim % x.rank
    call.some(x.shape[d], least=k if isinstance(k, int) else 1)
    return _chosen(call, x, d, lambda _: as_int(k) - 1, permutation(call, x, d))


def _nans(call: Call, x: Node, d: int) -> Node | None:
    """int32, without dimension d: the number of NaN along it; None for integers."""
    if x.dtype.compute is not DType.float32:
        return None
    return call.reduce(
        "sum",
        lambda at, r: cast_to(unary("isnan", load(x, [*at[:d], r[0], *at[d:]])), DType.int32),
        [*x.shape[:d], *x.shape[d + 1 :]],
        [x.shape[d]],
        DType.int32,
        "_nans",
    )


def _median(call: Call, x: Node, d: int, ignore_nan: bool) -> tuple[Map, Map]:
    """The lower of the two middle elements along dimension d, and its index. If there is a NaN, a NaN, unless those are
    ignored.
    """
    n = x.shape[d]
    nans = _nans(call, x, d)

    def place(kept: Sequence[Int]) -> Int:
        if nans is None:
            return (n - 1) // 2
        many = load(nans, kept)
        numbers = index(n) - many
        if ignore_nan:
            middle = binary("shr", binary("max", numbers - 1, 0), 1)
        else:
            middle = where(binary("gt", many, 0), numbers, index((n - 1) // 2))
        return indirect(middle, n)

    return _chosen(call, x, d, place, permutation(call, x, d))


def _register_medians() -> None:
    def along(ignore_nan: bool) -> Any:
        def build(call: Call, x: Node, dim: int, keepdim: bool = False) -> tuple[Map, Map]:
            if not x.rank:
                return _only(call, x)
            call.some(x.shape[dim % x.rank])
            return _median(call, x, dim % x.rank, ignore_nan)

        return build

    def of_all(ignore_nan: bool) -> Any:
        def build(call: Call, x: Node) -> Map:
            n = product(x.shape)
            if not call.dtype.is_float:
                call.some(*x.shape)
            if n == 0:
                return call.map(lambda: const(math.nan))
            line = call.map(lambda i: load(x, unflat(i, x.shape)), [n], x.dtype)
            both = replace(call, shapes=(call.shape, call.shape), dtypes=(call.dtype, DType.int64))
            found = _median(both, line, 0, ignore_nan)[0]
            return call.map(lambda: select([n - 1], load(found, []), const(math.nan))) if call.dtype.is_float else found

        return build

    for name, ignore_nan in (("median", False), ("nanmedian", True)):
        lowering(getattr(aten, name).dim)(along(ignore_nan))
        lowering(getattr(aten, name).default)(of_all(ignore_nan))


_register_medians()


@lowering(aten.mode.default)
def mode(call: Call, x: Node, dim: int = -1, keepdim: bool = False) -> tuple[Map, Map]:
    """The most frequent element along a dimension, the smallest of several, and its last index (int64).

    Every element counts its equals, so that the work is quadratic in the size of the dimension.
    """
    if not x.rank:
        return _only(call, x)
    d = dim % x.rank
    n = x.shape[d]
    call.some(n)
    order = permutation(call, x, d)
    ordered = call.map(
        lambda *at: key(load(x, at_dim(at, d, indirect(load(order, at), n)))),
        x.shape,
        DType.int32 if x.dtype is DType.bool else x.dtype,
    )

    def equals(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        return cast_to(binary("eq", load(ordered, at), load(ordered, at_dim(at, d, r[0]))), DType.int32)

    equal = call.reduce("sum", equals, x.shape, [n], DType.int32, "_equals")
    kept = [*x.shape[:d], *x.shape[d + 1 :]]

    def of(node: Node) -> Callable[[tuple[Int, ...], tuple[Int, ...]], Expr]:
        return lambda at, r: load(node, [*at[:d], r[0], *at[d:]])

    most = call.reduce("max", of(equal), kept, [n], DType.int32, "_most")

    def first_place(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        return where(binary("eq", of(equal)(at, r), load(most, at)), index(r[0]), index(n - 1))

    first = call.reduce("min", first_place, kept, [n], DType.int32, "_first")

    def place(at: Sequence[Int]) -> Int:
        return indirect(binary("min", load(first, at) + binary("max", load(most, at), 1) - 1, index(n - 1)), n)

    return _chosen(call, x, d, place, order)
