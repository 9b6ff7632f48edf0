"""Scatters, written as gathers: every element of the result reduces over the source entries that are written to it.

This is deterministic and needs no atomics. The work is the number of results times the number of entries that may match
one: those along `dim` for scatter and index operators (other dimensions run in parallel), and all entries for index_put and
put. Where that is much, additions sort the entries first (`added`). If several entries replace the same element, the last one
wins, where torch leaves it undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, where
from lapilli.ir.integer import Int, as_int, product
from lapilli.ir.node import Map, Node, Reduce, neutral
from lapilli.lower.indexing import Indices, Places, at_dim, flat, unflat, wrapped
from lapilli.lower.registry import (
    LONGEST,
    Call,
    Entries,
    Operand,
    broadcast,
    element,
    exactly,
    lowering,
    scalar,
)
from lapilli.lower.scan import scan
from lapilli.lower.search import places_below
from lapilli.lower.sort import permutation

aten = torch.ops.aten

Matches = Callable[[Sequence[Int], Int], Expr]  # (result, entry) -> whether the entry is written there
Value = Callable[[Sequence[Int], Int], Expr]  # (result, entry) -> value of the entry


def last_match(call: Call, entries: Int, matches: Matches, shape: Sequence[Int] | None = None) -> Reduce:
    """int32, of the shape of the result: the number of the last entry written to each element, or -1."""
    return call.reduce(
        "max",
        lambda at, r: where(matches(at, r[0]), index(r[0]), const(-1)),
        call.shape if shape is None else shape,
        [entries],
        DType.int32,
        "_last",
    )


def replaced(call: Call, x: Node, entries: Int, matches: Matches, value: Value, given: Entries | None = None) -> Map:
    """x with elements replaced by the entries written to them. given: the same entries, if each has one index."""
    kind = call.dtype.compute
    if entries == 0:
        return call.map(lambda *at: load(x, at))
    last = last_match(call, entries, matches)

    def body(*at: Int) -> Expr:
        e = load(last, at)
        new = value(at, indirect(binary("max", e, 0), entries))
        return where(binary("ge", e, 0), cast_to(new, kind), load(x, at))

    return call.map(body) if given is None else call.update(x, body, given)


_COMBINE: dict[str, tuple[str, str]] = {  # reduction, operation that combines it with the old value
    "sum": ("sum", "add"), "add": ("sum", "add"), "mean": ("sum", "add"), "prod": ("prod", "mul"),
    "multiply": ("prod", "mul"), "amax": ("max", "max"), "amin": ("min", "min"),
}  # fmt: skip


def combined(
    call: Call, x: Node, entries: Int, matches: Matches, value: Value, how: str = "sum", include_self: bool = True
) -> Map:
    """x combined with all entries written to an element: their sum, product, mean, maximum or minimum."""
    if how not in _COMBINE:
        raise TypeError(f"{call.op}: there is no reduction {how!r}; take one of {', '.join(_COMBINE)}")
    op, meet = _COMBINE[how]
    kind = call.dtype.compute
    if entries == 0:
        return call.map(lambda *at: load(x, at))
    if kind is DType.bool:
        op, meet = {"sum": ("any", "or"), "max": ("any", "or")}.get(op, ("all", "and"))

    def entry(at: Sequence[Int], j: Int) -> Expr:
        return where(matches(at, j), cast_to(value(at, j), kind), neutral(op, kind))

    floats = DType.float32 if kind is DType.float32 else None
    total = call.reduce(op, lambda at, r: entry(at, r[0]), call.shape, [entries], floats)
    needs_count = how == "mean" or not include_self
    if not needs_count:
        return _met(call, x, total, meet)
    many = call.reduce(
        "sum", lambda at, r: cast_to(matches(at, r[0]), DType.int32), call.shape, [entries], DType.int32, "_count"
    )

    def body(*at: Int) -> Expr:
        old, new, n = load(x, at), cast_to(load(total, at), kind), load(many, at)
        result = binary(meet, old, new) if include_self else new
        if how == "mean":
            n = n + 1 if include_self else n
            result = mean(result, n)
        return result if include_self else where(binary("eq", load(many, at), 0), old, result)

    return call.map(body)


def _met(call: Call, x: Node, total: Node, how: str) -> Map:
    """x combined with the total of the entries of each element."""
    kind = call.dtype.compute

    def body(*at: Int) -> Expr:
        old, new = load(x, at), cast_to(load(total, at), kind)
        if how == "add" and kind is DType.float32:  # -0 stays -0 without entries
            return where(binary("eq", new, 0.0), old, old + new)
        return binary(how, old, new)

    return call.map(body)


_MANY_PAIRS = 1 << 24
"""Of elements and entries, from which on entries are sorted first."""
_MANY = 64
"""Entries from which on they are sorted."""
_FEW_PLACES = 4
"""Elements of each place, from which on few entries are sorted too."""


def added(
    call: Call, x: Node, entries: Int, goes: Callable[[Int], Expr], place: Callable[[Sequence[Int]], Int], count: Int, value: Value
) -> Map | None:  # fmt: skip
    """x with the entries added that go to the place of an element: sorted by their places, so that each element adds its own
    only, in their order. None if comparing all elements with all entries is little work, or sizes are open.

    goes: an entry's place (int32), of `count`, or `count` itself to leave it out; place: an element's.
    """
    kind, n, pairs = call.dtype.compute, entries.value, (product(call.shape) * entries).value
    if kind is DType.bool or n is None or pairs is None or not _MANY <= n <= LONGEST or pairs < _MANY_PAIRS:
        return None
    kept = (product(call.shape).value or 0) // max(count.value or 0, 1)
    if n < 16 * _MANY and kept < _FEW_PLACES:  # what is stored for each place is as large as x
        return None
    inner = replace(call, half=False)
    targets = inner.map(goes, [entries], DType.int32)
    order = permutation(inner, targets, 0)
    ordered = inner.map(lambda j: load(targets, [indirect(load(order, [j]), n)]), [entries], DType.int32)
    starts = inner.map(lambda v: places_below(inner, ordered, [], index(v), False, None), [count + 1], DType.int32)

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        first, end = (indirect(load(starts, [place(at) + k]), n + 1) for k in (0, 1))
        mine = indirect(binary("min", index(first + r[0]), n - 1), n)
        entry = indirect(load(order, [mine]), n)
        return select([end - first - 1 - r[0]], cast_to(value(at, entry), kind), const(0, kind))

    floats = DType.float32 if kind is DType.float32 else None
    return _met(call, x, call.reduce("sum", body, call.shape, [entries], floats, longest=n), "add")


def mean(total: Expr, n: Expr) -> Expr:
    """The mean of n terms with this total; for integers rounded down, as in torch."""
    n = binary("max", n, 1)
    return total / cast_to(n, DType.float32) if total.dtype is DType.float32 else binary("floordiv", total, n)


# -- one index along a dimension for every entry: `positions` has the shape of the source


def _along(x: Node, dim: int, positions: Node) -> tuple[Int, Matches, Callable[[Sequence[Int], Int], list[Int]]]:
    """The number of entries along dim, which of them are written to an element of x, and the index of entry j in positions
    and source.
    """
    if not x.rank or not positions.rank:
        n = product(positions.shape)
        inner: Callable[[Sequence[Int], Int], list[Int]] = lambda at, j: [j] if positions.rank else []  # noqa: E731
        return n, lambda at, j: binary("eq", load(positions, inner(at, j)), index(at[0]) if at else const(0)), inner
    d = dim % x.rank

    def place(at: Sequence[Int], j: Int) -> list[Int]:
        return at_dim(at, d, j)

    def matches(at: Sequence[Int], j: Int) -> Expr:
        inside = [positions.shape[k] - 1 - i for k, i in enumerate(at) if k != d]
        return select(inside, binary("eq", load(positions, place(at, j)), index(at[d])), const(False))

    return positions.shape[d], matches, place


def _source(src: Operand, place: Callable[[Sequence[Int], Int], list[Int]]) -> Value:
    return lambda at, j: (
        load(src, place(at, j) if src.rank else []) if isinstance(src, Node) else element(src, [])
    )  # fmt: skip


@lowering(aten.scatter.src, aten.scatter.value)
def scatter(call: Call, x: Node, dim: int, positions: Node, src: Operand) -> Map:
    """x with x[.., positions[.., j, ..], ..] = src[.., j, ..] along dim; src may be a number. The shape of x."""
    n, matches, place = _along(x, dim, positions)
    value = _source(exactly(src, call.dtype), place)
    if not x.rank or not positions.rank:
        return replaced(call, x, n, matches, value)
    d = dim % x.rank

    def goes(at: Sequence[Int]) -> list[Int]:
        return at_dim(at, d, indirect(load(positions, at), x.shape[d]))

    return replaced(call, x, n, matches, value, Entries(positions.shape, goes, lambda at: value(at, at[d])))


@lowering(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_op(call: Call, x: Node, dim: int, positions: Node, src: Operand, *, reduce: str) -> Map:
    """As `scatter`, adding to or multiplying the old value (reduce: "add" or "multiply")."""
    n, matches, place = _along(x, dim, positions)
    return combined(call, x, n, matches, _source(src, place), reduce)


@lowering(aten.scatter_add.default)
def scatter_add(call: Call, x: Node, dim: int, positions: Node, src: Node) -> Map:
    """As `scatter`, adding src to the old values."""
    n, matches, place = _along(x, dim, positions)
    return combined(call, x, n, matches, _source(src, place))


@lowering(aten.scatter_reduce.two)
def scatter_reduce(
    call: Call, x: Node, dim: int, positions: Node, src: Node, reduce: str, *, include_self: bool = True
) -> Map:
    """As `scatter`, combining all entries, and the old value if include_self, by their sum, product, mean, maximum or
    minimum.
    """
    n, matches, place = _along(x, dim, positions)
    return combined(call, x, n, matches, _source(src, place), reduce, include_self)


# -- one index along a dimension for every slice of the source: `positions` is a vector


def _slices(x: Node, dim: int, positions: Node) -> tuple[Int, Matches, Callable[[Sequence[Int], Int], list[Int]]]:
    """The number of slices, which of them are written to an element of x, and the index of slice j in the source."""
    d = dim % x.rank if x.rank else 0

    def matches(at: Sequence[Int], j: Int) -> Expr:
        size = x.shape[d] if x.rank else as_int(1)
        target = wrapped(load(positions, [j] if positions.rank else []), size)
        return binary("eq", index(target), index(at[d]) if at else const(0))

    n = positions.shape[0] if positions.rank else as_int(1)
    return n, matches, lambda at, j: at_dim(at, d, j) if at else [j]


def _slice_source(src: Operand, place: Callable[[Sequence[Int], Int], list[Int]]) -> Value:
    return lambda at, j: element(src, place(at, j)) if not isinstance(src, Node) or src.rank else load(src, [])


def _replaced_slices(call: Call, x: Node, dim: int, positions: Node, src: Operand) -> Map:
    n, matches, place = _slices(x, dim, positions)
    value = _slice_source(src, place)
    if not x.rank:
        return replaced(call, x, n, matches, value)
    d = dim % x.rank

    def goes(at: Sequence[Int]) -> list[Int]:
        return at_dim(at, d, wrapped(load(positions, [at[d]] if positions.rank else []), x.shape[d]))

    given = Entries(at_dim(x.shape, d, n), goes, lambda at: value(at, at[d]))
    return replaced(call, x, n, matches, value, given)


@lowering(aten.index_add.default)
def index_add(call: Call, x: Node, dim: int, positions: Node, src: Node, *, alpha: float = 1) -> Map:
    """x [*, n, *] with alpha * src[.., j, ..] added at index positions[j] of dim: positions [m], src [*, m, *] -> the shape
    of x.
    """
    n, matches, place = _slices(x, dim, positions)
    value = _slice_source(src, place)
    kind = call.dtype.compute
    if kind is DType.bool:
        return combined(
            call, x, n, matches, lambda at, j: binary("and", cast_to(value(at, j), kind), const(bool(alpha)))
        )

    def scaled(at: Sequence[Int], j: Int) -> Expr:
        return cast_to(value(at, j), kind) * scalar(alpha, call.dtype)

    if x.rank and positions.rank:
        d = dim % x.rank
        size = x.shape[d]
        sorted_first = added(
            call, x, n, lambda j: index(wrapped(load(positions, [j]), size)), lambda at: at[d], size, scaled
        )  # fmt: skip
        if sorted_first is not None:
            return sorted_first
    return combined(call, x, n, matches, scaled)


@lowering(aten.index_copy.default)
def index_copy(call: Call, x: Node, dim: int, positions: Node, src: Node) -> Map:
    """x [*, n, *] with slice positions[j] of dim replaced by src[.., j, ..]: positions [m], src [*, m, *] -> the shape of
    x.
    """
    return _replaced_slices(call, x, dim, positions, src)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(call: Call, x: Node, dim: int, positions: Node, value: Operand) -> Map:
    """x [*, n, *] with the slices positions [m] of dim filled with a number; the shape of x."""
    return _replaced_slices(call, x, dim, positions, exactly(value, call.dtype))


@lowering(aten.index_reduce.default)
def index_reduce(
    call: Call, x: Node, dim: int, positions: Node, src: Node, reduce: str, *, include_self: bool = True
) -> Map:
    """As `index_add`, combining slices by their product, mean, maximum or minimum."""
    n, matches, place = _slices(x, dim, positions)
    return combined(call, x, n, matches, _slice_source(src, place), reduce, include_self)


# -- any indices


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call, x: Node, indices: Indices, values: Node, accumulate: bool = False) -> Map:
    """x with x[indices] = values, or x[indices] += values if accumulate. Masks are supported if all selected elements get
    the same values. The shape of x.
    """
    masks = [i for i in indices if i is not None and i.dtype in (DType.bool, DType.uint8)]
    if masks:
        return _masked_put(call, x, indices, values, accumulate)
    places = Places(call.op, x, indices)
    entries = product(tuple(places.loop))

    def matches(at: Sequence[Int], j: Int) -> Expr:
        loop = unflat(j, places.loop)
        found = const(True)
        for d in places.dims:
            found = binary("and", found, binary("eq", index(places.chosen(d, loop)), index(at[d])))
        return found

    def value(at: Sequence[Int], j: Int) -> Expr:
        full = places.joined(unflat(j, places.loop), [at[d] for d in places.kept])
        return load(values, broadcast(values, full))

    if accumulate:
        sizes = [x.shape[d] for d in places.dims]

        def goes(j: Int) -> Expr:
            at = [places.chosen(d, unflat(j, places.loop)) for d in places.dims]
            inside = const(True)
            for i, size in zip(at, sizes, strict=True):
                within = binary("and", binary("ge", index(i), 0), binary("lt", index(i), index(size)))
                inside = binary("and", inside, within)
            return where(inside, index(flat(at, sizes)), index(product(sizes)))

        sorted_first = added(
            call, x, entries, goes, lambda at: flat([at[d] for d in places.dims], sizes), product(sizes), value
        )  # fmt: skip
        return sorted_first or combined(call, x, entries, matches, value)
    shape = places.joined(places.loop, [x.shape[d] for d in places.kept])
    given = Entries(shape, places.of, lambda at: load(values, broadcast(values, at)))
    return replaced(call, x, entries, matches, value, given)


def _masked_put(call: Call, x: Node, indices: Indices, values: Node, accumulate: bool) -> Map:
    """x with x[mask] = values, or +=."""
    known = [i for i in indices if i is not None]
    mask = known[0]
    first = list(indices).index(mask)
    spread = values.rank and (
        values.rank > x.rank - mask.rank - first and values.shape[-(x.rank - mask.rank - first) - 1] != 1
    )
    if len(known) > 1 or mask.dtype is not DType.bool or (first and values.rank) or spread:
        raise TypeError(f"{call.op}: the number of elements that a mask chooses is not known before it runs")
    kind = call.dtype.compute
    trailing = x.rank - mask.rank - first

    def body(*at: Int) -> Expr:
        inner = list(at[len(at) - trailing :])
        e = cast_to(load(values, broadcast(values, [as_int(0), *inner])), kind)
        old = load(x, at)
        new = binary("add" if kind is not DType.bool else "or", old, e) if accumulate else e
        return where(load(mask, at[first : first + mask.rank]), new, old)

    return call.map(body)


@lowering(aten.put.default)
def put(call: Call, x: Node, positions: Node, source: Node, accumulate: bool = False) -> Map:
    """x, viewed as a vector, with x[positions] = source, or += if accumulate. The shape of x."""
    n = product(x.shape)

    def matches(at: Sequence[Int], j: Int) -> Expr:
        target = wrapped(load(positions, unflat(j, positions.shape)), n)
        return binary("eq", index(target), index(flat(at, x.shape)))

    def value(at: Sequence[Int], j: Int) -> Expr:
        return load(source, unflat(j, source.shape))

    return (combined if accumulate else replaced)(call, x, product(positions.shape), matches, value)


@lowering(aten.masked_scatter.default)
def masked_scatter(call: Call, x: Node, mask: Node, source: Node) -> Map:
    """x with the elements where the mask holds replaced by elements of source, in order. The shape of x."""
    n = product(call.shape)

    def chosen(*at: Int) -> Expr:
        return element(mask, unflat(at[0], call.shape), DType.int32)

    ones = call.map(chosen, [n], DType.int32)
    before = scan(call, "sum", ones, 0)

    def body(*at: Int) -> Expr:
        number = indirect(binary("max", load(before, [flat(at, call.shape)]) - 1, 0), product(source.shape))
        new = load(source, unflat(number, source.shape))
        return where(element(mask, at, DType.bool), new, element(x, at))

    return call.map(body)
