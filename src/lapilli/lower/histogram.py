"""Histograms and segment reductions. Every result reads all elements that may belong to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, load, where
from lapilli.ir.integer import Int, product
from lapilli.ir.node import Map, Node, neutral
from lapilli.lower.indexing import unflat
from lapilli.lower.linalg import part, step
from lapilli.lower.reduction import over
from lapilli.lower.registry import Call, lowering
from lapilli.lower.scan import scan

aten = torch.ops.aten


@lowering(aten.histc.default)
def histc(call: Call, x: Node, bins: int = 100, lo: float = 0, hi: float = 0) -> Node:
    """x [*] -> [bins]: the number of elements in equal bins from lo to hi. If both are equal, the bins span the
    range of x.
    """
    if not x.dtype.is_float:
        raise TypeError(f"{call.op}: only floating-point tensors are supported; convert the tensor to float first")
    n = product(x.shape)
    low, high = (const(float(lo)), const(float(hi))) if lo != hi else _extent(call, x, 1.0)

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        e = cast_to(load(x, unflat(r[0], x.shape)), DType.float32)
        scaled = (e - low) * float(bins) / (high - low)
        number = binary("max", binary("min", scaled, float(bins - 1)), 0.0)  # the last bin includes its end
        inside = binary("and", binary("ge", e, low), binary("le", e, high))
        inside = binary("and", inside, binary("eq", cast_to(number, DType.int32), index(at[0])))
        return where(inside, const(1.0), const(0.0))

    return call.reduce("sum", body, call.shape, [n])


def _extent(call: Call, x: Node, margin: float) -> tuple[Expr, Expr]:
    """The minimum and the maximum of x; extended by `margin` if they are equal, and 0 and 1 if x is empty."""
    if product(x.shape).value == 0:
        return const(0.0), const(1.0)
    every = list(range(x.rank))
    least, most = (
        load(over(call, op, x, every, dtype=DType.float32, name=f"_{op}"), []) for op in ("min", "max")
    )  # fmt: skip
    same = binary("eq", least, most)
    return where(same, least - margin, least), where(same, most + margin, most)


@lowering(aten.histogram.bin_ct)
def histogram(
    call: Call,
    x: Node,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Node | None = None,
    density: bool = False,
) -> list[Node]:
    """x [*] -> counts [bins] and edges [bins + 1]: equal bins over `range`, or over the range of x."""
    if range is None:
        low, high = _extent(call, x, 0.5)
    else:
        margin = 0.5 if range[0] == range[1] else 0.0
        low, high = const(range[0] - margin), const(range[1] + margin)
    second = part(call, 1)
    edges = step(second, second.shape, lambda i: _between(low, high, i, bins))
    return histogram_of(call, x, edges, weight=weight, density=density)


def _between(low: Expr, high: Expr, i: Int, bins: int) -> Expr:
    """Edge i of `bins` equal bins from low to high, computed from the nearer end, so that both ends are exact."""
    width = (high - low) / float(bins)
    number = index(i, DType.float32)
    return where(
        binary("lt", number, bins / 2), low + number * width, high - (const(float(bins)) - number) * width
    )  # fmt: skip


@lowering(aten.histogram.bins_tensor)
def histogram_of(call: Call, x: Node, edges: Node, *, weight: Node | None = None, density: bool = False) -> list[Node]:
    """x [*], edges [bins + 1] -> [bins] and the edges: counts of the elements in each bin, or sums of their weights (of the
    shape of x).

    The last bin includes its upper edge. density: divided by the total and by the width of the bin.
    """
    n = product(x.shape)
    bins = edges.shape[0] - 1

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        e = cast_to(load(x, unflat(r[0], x.shape)), DType.float32)
        end = load(edges, [at[0] + 1])
        last = binary("and", binary("eq", e, end), binary("eq", index(at[0]), index(bins - 1)))
        inside = binary("and", binary("ge", e, load(edges, at)), binary("or", binary("lt", e, end), last))
        one = const(1.0) if weight is None else cast_to(load(weight, unflat(r[0], weight.shape)), DType.float32)
        return where(inside, one, const(0.0))

    counts = call.reduce("sum", body, [bins], [n], DType.float32)
    result: Node = call.map(lambda i: load(counts, [i]))
    if density:
        total = call.reduce("sum", lambda at, r: load(counts, [r[0]]), [], [bins], DType.float32, "_total")
        result = call.map(lambda i: load(counts, [i]) / load(total, []) / (load(edges, [i + 1]) - load(edges, [i])))
    return [result, part(call, 1).map(lambda i: load(edges, [i]))]


_OPS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "max", "min": "min"}


@lowering(aten.segment_reduce.default)
def segment_reduce(
    call: Call,
    x: Node,
    reduce: str,
    *,
    lengths: Node | None = None,
    indices: Node | None = None,
    offsets: Node | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Map:
    """x [*, n, *] -> [*, segments, *]: each segment of an axis reduced to one element. Segments are given by lengths [*,
    segments] or offsets [*, segments + 1], from 0 to n.

    An empty segment is `initial`, or by default the identity element of the reduction (NaN for a mean).
    """
    d = axis % x.rank
    given = lengths if lengths is not None else offsets
    if given is None:
        raise TypeError(f"{call.op}: give the lengths or the offsets of the segments")
    ends = scan(call, "sum", given, d) if lengths is not None else given
    op = _OPS[reduce]

    def span(at: Sequence[Int]) -> tuple[Expr, Expr]:
        head, s = list(at[:d]), at[d]
        if lengths is not None:
            end = load(ends, [*head, s])
            return end - load(lengths, [*head, s]), end
        return load(ends, [*head, s]), load(ends, [*head, s + 1])

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        start, end = span(at)
        inside = binary("and", binary("ge", index(r[0]), start), binary("lt", index(r[0]), end))
        e = cast_to(load(x, [*at[:d], r[0], *at[d + 1 :]]), DType.float32)
        return where(inside, e, neutral(op, DType.float32))

    total = call.reduce(op, body, call.shape, [x.shape[d]], DType.float32)

    def result(*at: Int) -> Expr:
        start, end = span(at)
        e, many = load(total, at), cast_to(end - start, DType.float32)
        if initial is not None:
            meet = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}[op]
            e = binary(meet, e, float(initial))
        if reduce != "mean":
            return e
        empty = const(float("nan") if initial is None else float(initial))
        return where(binary("eq", many, 0.0), empty, e / many)

    return call.map(result)
