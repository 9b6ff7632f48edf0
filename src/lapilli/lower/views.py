"""Operators that only move elements: views, slices, concatenation, padding. They are index maps, and cost nothing by
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lapilli.ir.axes import reshape_index
from lapilli.ir.expr import Expr, cast_to, const, indirect, load, select
from lapilli.ir.integer import Int, IntLike, as_int, maximum, minimum, product
from lapilli.ir.node import Map, Node
from lapilli.lower.registry import Call, broadcast, lowering, normalize_dims, scalar

aten = torch.ops.aten


@lowering(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(call: Call, x: Node, _: Any) -> Map:
    """x with the same elements in row-major order, in another shape."""
    return call.map(lambda *at: load(x, reshape_index(at, call.shape, x.shape)))


@lowering(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default)
def squeeze(call: Call, x: Node, *_: Any) -> Map:
    """x with dimensions of size 1 removed or inserted."""
    return view(call, x, None)


@lowering(aten.flatten.using_ints, aten.unflatten.int)
def flatten(call: Call, x: Node, *_: Any) -> Map:
    """x with dimensions merged or split."""
    return view(call, x, None)


@lowering(aten.expand.default)
def expand(call: Call, x: Node, *_: Any, **__: Any) -> Map:
    """x broadcast to a larger shape."""
    return call.map(lambda *at: load(x, broadcast(x, at)))


@lowering(aten.permute.default)
def permute(call: Call, x: Node, dims: Sequence[int]) -> Map:
    """x with dimensions in another order: dimension i of the result is dimension dims[i] of x."""
    order = normalize_dims(dims, x.rank)

    def body(*at: Int) -> Expr:
        index: list[Int] = [as_int(0)] * x.rank
        for i, d in enumerate(order):
            index[d] = at[i]
        return load(x, index)

    return call.map(body)


@lowering(aten.transpose.int)
def transpose(call: Call, x: Node, a: int, b: int) -> Map:
    """x with dimensions a and b exchanged."""
    order = list(range(x.rank))
    if x.rank:
        a, b = a % x.rank, b % x.rank
        order[a], order[b] = order[b], order[a]
    return permute(call, x, order)


@lowering(aten.t.default)
def t(call: Call, x: Node) -> Map:
    """[m, n] -> [n, m]; vectors and scalars are unchanged."""
    return permute(call, x, list(reversed(range(x.rank))))


def _clamp_index(i: IntLike, size: Int) -> Int:
    """The start of a slice, counted from the end if negative, clamped to the dimension."""
    most = as_int(i).bounds[1]
    if most is not None and most < 0:
        return maximum(size + i, 0)
    return minimum(i, size)


@lowering(aten.slice.Tensor)
def slice_(
    call: Call, x: Node, dim: int = 0, start: IntLike | None = None, end: IntLike | None = None, step: int = 1
) -> Map:
    """x[start:end:step] along a dimension."""
    d = dim % x.rank
    first = _clamp_index(0 if start is None else start, x.shape[d])
    return call.map(lambda *at: load(x, [i if k != d else i * step + first for k, i in enumerate(at)]))


@lowering(aten.select.int)
def select_(call: Call, x: Node, dim: int, position: IntLike) -> Map:
    """x[position] along a dimension, which is removed."""
    d = dim % x.rank
    p = as_int(position)
    most = p.bounds[1]
    if most is not None and most < 0:
        p = p + x.shape[d]
    return call.map(lambda *at: load(x, [*at[:d], p, *at[d:]]))


@lowering(aten.split_with_sizes.default)
def split_with_sizes(call: Call, x: Node, sizes: Sequence[IntLike], dim: int = 0) -> list[Map]:
    """x split along a dimension into parts of the given sizes."""
    d = dim % x.rank
    parts: list[Map] = []
    start = as_int(0)
    for n, size in enumerate(sizes):
        first = start

        def body(*at: Int, first: Int = first) -> Expr:
            return load(x, [i if k != d else i + first for k, i in enumerate(at)])

        parts.append(call.map(body, shape=call.shapes[n]))
        start = start + size
    return parts


@lowering(aten.split.Tensor)
def split(call: Call, x: Node, size: IntLike, dim: int = 0) -> list[Map]:
    """x split along a dimension into parts of `size`; the last may be smaller."""
    return split_with_sizes(call, x, [s[dim % x.rank] for s in call.shapes], dim)


@lowering(aten.chunk.default)
def chunk(call: Call, x: Node, _: int, dim: int = 0) -> list[Map]:
    """x split along a dimension into at most the given number of parts of equal size; the last may be smaller."""
    return split_with_sizes(call, x, [s[dim % x.rank] for s in call.shapes], dim)


@lowering(aten.unbind.int)
def unbind(call: Call, x: Node, dim: int = 0) -> list[Map]:
    """The slices of x along a dimension, which is removed."""
    d = dim % x.rank

    def part(n: int) -> Map:
        return call.map(lambda *at: load(x, [*at[:d], as_int(n), *at[d:]]), shape=call.shapes[n])

    return [part(n) for n in range(len(call.shapes))]


_CAT = 8  # tensors concatenated by one kernel: devices bind few buffers at a time


@lowering(aten.cat.default)
def cat(call: Call, tensors: Sequence[Node], dim: int = 0) -> Map:
    """Tensors concatenated along a dimension; empty vectors are skipped, as in torch."""
    present = [x for x in tensors if not (x.rank == 1 and x.shape[0] == 0 and len(call.shape) != 1)]
    d = dim % len(call.shape)
    while len(present) > _CAT:
        present = [_join(call, present[k : k + _CAT], d) for k in range(0, len(present), _CAT)]
    return _join(call, present, d)


def _join(call: Call, tensors: Sequence[Node], d: int) -> Map:
    """Tensors concatenated along dimension d, by one kernel."""
    kind = call.dtype.compute
    starts = [as_int(0)]
    for x in tensors:
        starts.append(starts[-1] + x.shape[d])

    def body(*at: Int) -> Expr:
        result: Expr | None = None
        for x, start in reversed(list(zip(tensors, starts, strict=False))):
            e = cast_to(load(x, [i if k != d else i - start for k, i in enumerate(at)]), kind)
            # from the last to the first, so that at[d] < end decides
            result = e if result is None else select([start + x.shape[d] - 1 - at[d]], e, result)
        return result if result is not None else const(0, kind)

    return call.map(body, shape=[starts[-1] if k == d else s for k, s in enumerate(call.shape)])


@lowering(aten.stack.default)
def stack(call: Call, tensors: Sequence[Node], dim: int = 0) -> Map:
    """Tensors of equal shape stacked along a new dimension."""
    d = dim % len(call.shape)

    def widened(x: Node) -> Map:
        shape = (*x.shape[:d], as_int(1), *x.shape[d:])
        return call.map(lambda *at: load(x, [*at[:d], *at[d + 1 :]]), shape=shape, dtype=x.dtype)

    return cat(call, [widened(x) for x in tensors], d)


def _pads(pads: Sequence[IntLike], rank: int) -> list[tuple[Int, Int]]:
    """torch's flat list of paddings, last dimension first, as (before, after) for each dimension."""
    result = [(as_int(0), as_int(0))] * rank
    for n in range(len(pads) // 2):
        result[rank - 1 - n] = (as_int(pads[2 * n]), as_int(pads[2 * n + 1]))
    return result


@lowering(aten.constant_pad_nd.default)
def constant_pad(call: Call, x: Node, pads: Sequence[IntLike], value: float = 0) -> Map:
    """x padded with a number; negative widths crop."""
    widths = _pads(pads, x.rank)
    filling = scalar(value, call.dtype)

    def body(*at: Int) -> Expr:
        inner = [i - before for i, (before, _) in zip(at, widths, strict=True)]
        guards = [g for i, n in zip(inner, x.shape, strict=True) for g in (i, n - 1 - i)]
        return select(guards, load(x, inner), filling)

    return call.map(body)


@lowering(aten.pad.default)
def pad(call: Call, x: Node, pads: Sequence[IntLike], mode: str = "constant", value: float | None = None) -> Map:
    """x padded with a number, or by its elements: repeated ("circular"), at the edge ("replicate"), or reflected
    ("reflect").
    """
    if mode == "constant":
        return constant_pad(call, x, pads, value or 0)
    if mode == "circular":
        return _circular(call, x, pads)
    return (replication_pad if mode == "replicate" else reflection_pad)(call, x, pads)


def _circular(call: Call, x: Node, pads: Sequence[IntLike]) -> Map:
    """Circular padding. If a side is cropped (by a negative width), the remaining elements are repeated."""

    def place(i: Int, size: Int, before: Int, after: Int) -> Int:
        cropped = maximum(-before, 0)
        left = size - cropped - maximum(-after, 0)
        return (i - maximum(before, 0)) % left + cropped

    widths = _pads(pads, x.rank)
    return call.map(lambda *at: load(x, [place(i, n, b, a) for i, n, (b, a) in zip(at, x.shape, widths, strict=True)]))


def _bounded(call: Call, x: Node, pads: Sequence[IntLike], place: Any) -> Map:
    """x padded on some dimensions, with the index given by place(i, size)."""
    widths = _pads(pads, x.rank)
    return call.map(
        lambda *at: load(
            x, [i if b == 0 and a == 0 else place(i - b, n) for i, (b, a), n in zip(at, widths, x.shape, strict=True)]
        )
    )


@lowering(*(getattr(aten, f"replication_pad{n}d").default for n in (1, 2, 3)))
def replication_pad(call: Call, x: Node, pads: Sequence[IntLike]) -> Map:
    """x padded with copies of its edges: index i is clamped to 0 ... n - 1."""
    return _bounded(call, x, pads, lambda i, n: maximum(minimum(i, n - 1), 0))


@lowering(*(getattr(aten, f"reflection_pad{n}d").default for n in (1, 2, 3)))
def reflection_pad(call: Call, x: Node, pads: Sequence[IntLike]) -> Map:
    """x padded with its reflection at the edges, which are not repeated: index i becomes n - 1 - |n - 1 - |i||."""
    return _bounded(call, x, pads, lambda i, n: minimum(maximum(i, -i), (n - 1) * 2 - maximum(i, -i)))


@lowering(aten.flip.default)
def flip(call: Call, x: Node, dims: Sequence[int]) -> Map:
    """x reversed along dims."""
    flipped = set(normalize_dims(dims, x.rank)) if dims else set()
    return call.map(lambda *at: load(x, [x.shape[d] - 1 - i if d in flipped else i for d, i in enumerate(at)]))


@lowering(aten.roll.default)
def roll(call: Call, x: Node, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Map:
    """x shifted cyclically along dims, or as a vector without dims."""
    if not dims:
        n = product(x.shape)
        return call.map(
            lambda *at: load(x, reshape_index([(reshape_index(at, x.shape, [n])[0] - shifts[0]) % n], [n], x.shape))
        )
    by = dict(zip(normalize_dims(dims, x.rank), shifts, strict=True))
    return call.map(lambda *at: load(x, [(i - by[d]) % x.shape[d] if d in by else i for d, i in enumerate(at)]))


@lowering(aten.repeat.default)
def repeat(call: Call, x: Node, _: Any) -> Map:
    """x tiled: out[i] = x[i % n] in every dimension."""
    return call.map(lambda *at: load(x, [i % n for i, n in zip(at[len(at) - x.rank :], x.shape, strict=True)]))


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(call: Call, x: Node, r: int) -> Map:
    """[*, C * r * r, H, W] -> [*, C, H * r, W * r]."""
    return call.map(
        lambda *at: load(x, [*at[:-3], at[-3] * (r * r) + at[-2] % r * r + at[-1] % r, at[-2] // r, at[-1] // r])
    )


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(call: Call, x: Node, r: int) -> Map:
    """[*, C, H * r, W * r] -> [*, C * r * r, H, W]."""
    return call.map(
        lambda *at: load(x, [*at[:-3], at[-3] // (r * r), at[-2] * r + at[-3] // r % r, at[-1] * r + at[-3] % r])
    )


@lowering(aten.tril.default)
def tril(call: Call, x: Node, diagonal: int = 0) -> Map:
    """x [*, m, n] with zeros above a diagonal."""
    return call.map(lambda *at: select([at[-2] + diagonal - at[-1]], load(x, at), const(0, x.dtype.compute)))


@lowering(aten.triu.default)
def triu(call: Call, x: Node, diagonal: int = 0) -> Map:
    """x [*, m, n] with zeros below a diagonal."""
    return call.map(lambda *at: select([at[-1] - diagonal - at[-2]], load(x, at), const(0, x.dtype.compute)))


@lowering(aten.index_select.default)
def index_select(call: Call, x: Node, dim: int, positions: Node) -> Map:
    """x [*, n, *] and positions [m] -> [*, m, *]: the given slices along a dimension."""
    if not x.rank:
        return call.map(lambda *at: load(x, []))
    d = dim % x.rank

    def body(*at: Int) -> Expr:
        chosen = indirect(load(positions, [at[d]] if positions.rank else []), x.shape[d])
        return load(x, [i if k != d else chosen for k, i in enumerate(at)])

    return call.map(body)


@lowering(aten.embedding.default)
def embedding(call: Call, weight: Node, positions: Node, *_: Any) -> Map:
    """weight [V, D] and positions [*] -> [*, D]: rows of weight."""
    return call.map(lambda *at: load(weight, [indirect(load(positions, at[:-1]), weight.shape[0]), at[-1]]))
