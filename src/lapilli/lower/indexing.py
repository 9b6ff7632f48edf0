"""Gathers: operators that read a tensor at computed indices. Like views, they are index maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.axes import reshape_index
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, where
from lapilli.ir.integer import Int, IntLike, as_int, product
from lapilli.ir.node import Map, Node
from lapilli.lower.registry import Call, Entries, broadcast, lowering

aten = torch.ops.aten
Indices = Sequence[Node | None]


def wrapped(e: Expr, size: Int) -> Int:
    """A computed index into a dimension; a negative one counts from the end."""
    return indirect(where(binary("lt", e, 0), e + index(size), e), size)


def at_dim(at: Sequence[Int], d: int, i: Int) -> list[Int]:
    """The index `at` with dimension d replaced by i."""
    return [*at[:d], i, *at[d + 1 :]]


def flat(at: Sequence[Int], shape: Sequence[Int]) -> Int:
    """The row-major position of an element."""
    result = as_int(0)
    for i, n in zip(at, shape, strict=True):
        result = result * n + i
    return result


def unflat(linear: Int, shape: Sequence[Int]) -> list[Int]:
    """The index of an element given its row-major position."""
    return reshape_index([linear], [product(tuple(shape))], shape)


@lowering(aten.gather.default)
def gather(call: Call, x: Node, dim: int, positions: Node, **_: Any) -> Map:
    """x [*, n, *], positions [*, m, *] -> [*, m, *]: out[.., i, ..] = x[.., positions[.., i, ..], ..] along dim."""
    if not x.rank or product(call.shape) == 0:
        return call.map(lambda *at: load(x, [as_int(0)] * x.rank))
    d = dim % x.rank
    if not positions.rank:
        return call.map(lambda: load(x, [indirect(load(positions, []), x.shape[0])]))
    return call.map(lambda *at: load(x, at_dim(at, d, indirect(load(positions, at), x.shape[d]))))


@lowering(aten.take.default)
def take(call: Call, x: Node, positions: Node) -> Map:
    """Elements of x, viewed as a vector, at `positions`; the result has the shape of positions."""
    n = product(x.shape)
    return call.map(lambda *at: load(x, unflat(wrapped(load(positions, at), n), x.shape)))


class Places:
    """The elements that advanced indexing reads or writes: x[indices], with None for whole dimensions.

    The index tensors broadcast to the shape `loop`. In the result it replaces the indexed dimensions if these are adjacent,
    and comes first otherwise, as in NumPy.
    """

    def __init__(self, op: str, x: Node, indices: Indices) -> None:
        for i in indices:
            if i is not None and i.dtype in (DType.bool, DType.uint8):
                raise TypeError(f"{op}: the number of elements that a mask chooses is not known before it runs")
        self.x = x
        self.indices = [*indices, *[None] * (x.rank - len(indices))]
        self.dims = [d for d, i in enumerate(self.indices) if i is not None]
        self.kept = [d for d in range(x.rank) if d not in self.dims]
        self.loop = broadcast_shape([i.shape for i in self.indices if i is not None])
        together = bool(self.dims) and self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.first = self.dims[0] if together else 0

    def split(self, at: Sequence[Int]) -> tuple[list[Int], list[Int]]:
        """A result's index, split into its part in `loop` and its part in the dimensions that are not indexed."""
        end = self.first + len(self.loop)
        return list(at[self.first : end]), [*at[: self.first], *at[end:]]

    def joined(self, loop: Sequence[Int], kept: Sequence[Int]) -> list[Int]:
        """The inverse of `split`."""
        return [*kept[: self.first], *loop, *kept[self.first :]]

    def of(self, at: Sequence[Int]) -> list[Int]:
        """The index in x of a result."""
        loop, kept = self.split(at)
        rest = iter(kept)
        return [self.chosen(d, loop) if d in self.dims else next(rest) for d in range(self.x.rank)]

    def chosen(self, d: int, loop: Sequence[Int]) -> Int:
        """The index in the indexed dimension d."""
        node = self.indices[d]
        assert node is not None
        return wrapped(load(node, broadcast(node, loop)), self.x.shape[d])


def broadcast_shape(shapes: Sequence[Sequence[Int]]) -> list[Int]:
    rank = max((len(s) for s in shapes), default=0)
    result: list[Int] = [as_int(1)] * rank
    for shape in shapes:
        for k, size in enumerate(reversed(shape)):
            if size != 1:
                result[rank - 1 - k] = size
    return result


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(call: Call, x: Node, indices: Indices) -> Map:
    """x[indices], advanced indexing; see `Places` for the shape of the result."""
    places = Places(call.op, x, indices)

    def body(*at: Int) -> Expr:
        loop, kept = places.split(at)
        rest = iter(kept)
        return load(x, [places.chosen(d, loop) if d in places.dims else next(rest) for d in range(x.rank)])

    return call.map(body)


def diagonal_place(offset: int, i: Int) -> tuple[Int, Int]:
    """Row and column of element i of a diagonal."""
    return i + max(-offset, 0), i + max(offset, 0)


@lowering(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call, x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Map:
    """The diagonal of dimensions dim1 and dim2, which is the last dimension of the result: [*, a, b] -> [*, length]."""
    a, b = dim1 % x.rank, dim2 % x.rank

    def body(*at: Int) -> Expr:
        row, column = diagonal_place(offset, at[-1])
        rest = iter(at[:-1])
        return load(x, [row if d == a else column if d == b else next(rest) for d in range(x.rank)])

    return call.map(body)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call, x: Node, source: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Map:
    """x with a diagonal replaced by `source`, which has the shape of `diagonal`'s result."""
    a, b = dim1 % x.rank, dim2 % x.rank

    def body(*at: Int) -> Expr:
        i = at[a] - max(-offset, 0)
        distance = at[b] - at[a] - offset
        rest = [j for d, j in enumerate(at) if d not in (a, b)]
        inside = [i, source.shape[-1] - 1 - i, distance, -distance]
        return select(inside, cast_to(load(source, [*rest, i]), call.dtype.compute), load(x, at))

    return call.map(body)


@lowering(aten.select_scatter.default)
def select_scatter(call: Call, x: Node, source: Node, dim: int, position: IntLike) -> Map:
    """x with x.select(dim, position) replaced by `source`, which has the shape of x without `dim`."""
    d = dim % x.rank
    p = as_int(position)
    if p.value is not None and p.value < 0:
        p = p + x.shape[d]

    def value(at: Sequence[Int]) -> Expr:
        return cast_to(load(source, at), call.dtype.compute)

    def body(*at: Int) -> Expr:
        return select([at[d] - p, p - at[d]], value([*at[:d], *at[d + 1 :]]), load(x, at))

    return call.update(x, body, Entries(source.shape, lambda at: [*at[:d], p, *at[d:]], value))


@lowering(aten.slice_scatter.default)
def slice_scatter(
    call: Call,
    x: Node,
    source: Node,
    dim: int = 0,
    start: IntLike | None = None,
    end: IntLike | None = None,
    step: int = 1,
) -> Map:
    """x with the slice start:end:step of `dim` replaced by `source`, which has the shape of that slice."""
    d = dim % x.rank
    first = as_int(0 if start is None else start)
    if first.value is not None and first.value < 0:
        first = first + x.shape[d]

    def value(at: Sequence[Int]) -> Expr:
        return cast_to(load(source, broadcast(source, at)), call.dtype.compute)

    def body(*at: Int) -> Expr:
        i = (at[d] - first) // step
        inside = [at[d] - first, source.shape[d] - 1 - i, -((at[d] - first) % step)]
        return select(inside, value(at_dim(at, d, i)), load(x, at))

    entries = at_dim(call.shape, d, source.shape[d])
    return call.update(x, body, Entries(entries, lambda at: at_dim(at, d, first + at[d] * step), value))


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(call: Call, x: Node, size: Any, stride: Sequence[IntLike], offset: IntLike | None = None) -> Map:
    """out[i, j, ...] = element offset + i * stride[0] + j * stride[1] + ... of x's memory: [*] -> [*size]. x must
    be dense.
    """
    _require_dense(call)

    def body(*at: Int) -> Expr:
        linear = as_int(offset or 0)
        for i, s in zip(at, stride, strict=True):
            linear = linear + i * s
        return load(x, unflat(linear, x.shape))

    return call.map(body)


@lowering(aten.as_strided_scatter.default)
def as_strided_scatter(
    call: Call, x: Node, source: Node, size: Any, stride: Sequence[IntLike], offset: IntLike | None = None
) -> Map:
    """x with the elements that as_strided(size, stride, offset) would read replaced by `source` [*size].

    The index of an element in `source` is computed from its position digit by digit, as in a mixed-radix number. Raises
    TypeError for strides that overlap.
    """
    _require_dense(call)
    strides = [as_int(s).value for s in stride]
    sizes = [n.value for n in source.shape]
    moving = sorted((d for d, n in enumerate(sizes) if n != 1), key=lambda d: -(strides[d] or 0))
    reach = 0
    for d in reversed(moving):
        step, n = strides[d], sizes[d]
        if step is None or n is None or step <= reach:
            raise TypeError(f"{call.op}: strides that overlap or vary are not supported on the GPU")
        reach += step * (n - 1)

    def body(*at: Int) -> Expr:
        rest = flat(at, x.shape) - (offset or 0)
        place: list[Int] = [as_int(0)] * source.rank
        inside = [rest]
        for d in moving:
            place[d] = rest // as_int(strides[d] or 1)
            rest = rest % as_int(strides[d] or 1)
            inside.append(source.shape[d] - 1 - place[d])
        return select([*inside, -rest], cast_to(load(source, place), call.dtype.compute), load(x, at))

    return call.map(body)


def _require_dense(call: Call) -> None:
    if not call.dense:
        raise TypeError(
            f"{call.op}: the memory of a tensor that is not contiguous, or part of another, has no meaning on the GPU"
        )


@lowering(aten.unfold.default, aten.unfold_copy.default)
def unfold(call: Call, x: Node, dim: int, size: int, step: int) -> Map:
    """Windows of `size` elements, `step` apart, along a dimension: [*, n, *] -> [*, (n - size) // step + 1, *, size]."""
    if not x.rank:
        return call.map(lambda *at: load(x, []))
    d = dim % x.rank
    return call.map(lambda *at: load(x, at_dim(at[:-1], d, at[d] * step + at[-1])))


def _two(sizes: int | Sequence[int]) -> list[int]:
    """One or two numbers as one for each of two dimensions."""
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * 2 if len(listed) == 1 else listed


def _positions(size: Int, k: int, dilation: int, padding: int, stride: int) -> Int:
    """The number of windows in a padded dimension."""
    return (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1


@lowering(aten.im2col.default)
def im2col(
    call: Call, x: Node, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Map:
    """[N, C, H, W] -> [N, C * kh * kw, windows], or both without N: the patches under a sliding window, as columns."""
    kernel, dilation, padding, stride = map(_two, (kernel, dilation, padding, stride))
    windows = [_positions(x.shape[d - 2], kernel[d], dilation[d], padding[d], stride[d]) for d in range(2)]

    def body(*at: Int) -> Expr:
        c, ky, kx = unflat(at[-2], [x.shape[-3], as_int(kernel[0]), as_int(kernel[1])])
        oy, ox = unflat(at[-1], windows)
        inner = [o * stride[d] + k * dilation[d] - padding[d] for d, (o, k) in enumerate(((oy, ky), (ox, kx)))]
        guards = [g for d, i in enumerate(inner) for g in (i, x.shape[d - 2] - 1 - i)]
        return select(guards, load(x, [*at[:-2], c, *inner]), const(0, x.dtype.compute))

    return call.map(body)


@lowering(aten.col2im.default)
def col2im(
    call: Call,
    x: Node,
    size: Any,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Node:
    """[N, C * kh * kw, windows] -> [N, C, H, W], or both without N: every pixel is the sum of its copies in all windows. It
    is the adjoint of `im2col`.
    """
    kernel, dilation, padding, stride = map(_two, (kernel, dilation, padding, stride))
    windows = [_positions(call.shape[d - 2], kernel[d], dilation[d], padding[d], stride[d]) for d in range(2)]
    kh, kw = (as_int(k) for k in kernel)

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        reach = [at[d - 2] + padding[d] - r[d] * dilation[d] for d in range(2)]
        place = [i // s for i, s in zip(reach, stride, strict=True)]
        guards = [
            g
            for i, o, n, s in zip(reach, place, windows, stride, strict=True)
            for g in (i, n - 1 - o, -(i % s))
        ]  # fmt: skip
        entry = load(x, [*at[:-3], flat([at[-3], *r], [call.shape[-3], kh, kw]), flat(place, windows)])
        return select(guards, entry, const(0, entry.dtype))

    return call.reduce("sum", body, call.shape, [kh, kw])


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    call: Call,
    weight: Node,
    positions: Node,
    offsets: Node,
    scale_grad: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Node | None = None,
    include_last_offset: bool = False,
    padding: int = -1,
) -> list[Node]:
    """weight [V, D], positions [n], offsets [bags] -> [bags, D]: the sum, mean or maximum (mode 0, 1, 2) of the rows of
    each bag.

    Every bag reads all positions. The other three results serve a backward pass, and are empty where torch's meta function has
    them so: the bag of each position, the number of rows of each bag, and of a maximum the row of `weight` that has it.
    """
    n = positions.shape[0]
    bags = call.shape[0]

    def belongs(bag: Int, j: Int) -> Expr:
        start = load(offsets, [bag])
        inside = binary("ge", index(j), start)
        following = indirect(index(bag + 1), offsets.shape[0])
        end: Expr = (
            load(offsets, [following])
            if include_last_offset
            else select([offsets.shape[0] - 2 - bag], load(offsets, [following]), index(n))
        )
        inside = binary("and", inside, binary("lt", index(j), end))
        skipped = padding + weight.shape[0] if padding < -1 else as_int(padding)
        return inside if padding == -1 else binary("and", inside, binary("ne", load(positions, [j]), index(skipped)))

    def row(j: Int, column: Int) -> Expr:
        e = load(weight, [wrapped(load(positions, [j]), weight.shape[0]), column])
        return e if weights is None else e * load(weights, [j])

    def gathered(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        neutral = const(float("-inf") if mode == 2 else 0.0)
        return where(belongs(at[0], r[0]), row(r[0], at[1]), neutral)

    members = call.reduce(
        "sum",
        lambda at, r: cast_to(belongs(at[0], r[0]), DType.int32),
        [bags],
        [n],
        DType.int32,
        "_count",
    )
    total = call.reduce("max" if mode == 2 else "sum", gathered, call.shape, [n], DType.float32)

    def result(*at: Int) -> Expr:
        e, many = load(total, at), load(members, [at[0]])
        if mode == 1:
            e = e / cast_to(binary("max", many, 1), DType.float32)
        return where(binary("eq", many, 0), const(0.0), e)

    def bag(*at: Int) -> Expr:
        begun = call.reduce(
            "sum",
            lambda j, r: cast_to(binary("le", load(offsets, [r[0]]), index(j[0])), DType.int32),
            [n],
            [bags],
            DType.int32,
            "_begun",
        )
        return load(begun, at) - 1

    def count(b: Int) -> Expr:
        return select([bags - 1 - b], load(members, [b]), const(0))

    def row_of_maximum(*at: Int) -> Expr:
        if mode != 2:
            return const(0)
        place = call.reduce("argmax", gathered, call.shape, [n], DType.int32, "_place")
        # among numbers that are all -inf, the first is not one of other bags'
        first = binary("max", load(place, at), load(offsets, [at[0]]))
        found = load(positions, [indirect(binary("min", first, index(n - 1)), n)])
        return where(binary("eq", load(members, [at[0]]), 0), const(0), found)

    def saved(k: int, body: Callable[..., Expr]) -> Map:
        made = replace(call, name=f"{call.name}_{k}", shapes=call.shapes[k:], dtypes=call.dtypes[k:])
        return made.map((lambda *_: const(0)) if 0 in made.shape else body)

    return [call.map(result), saved(1, bag), saved(2, count), saved(3, row_of_maximum)]


@lowering(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call, x: Node, repeats: IntLike, dim: int | None = None, **_: Any) -> Map:
    """Every element, or every slice along `dim`, repeated `repeats` times in a row: [*, n, *] -> [*, n * repeats, *].
    Without dim, x is viewed as a vector.
    """
    times = as_int(repeats)
    if dim is None or not x.rank:
        return call.map(lambda i: load(x, unflat(i // times, x.shape)))
    d = dim % x.rank
    return call.map(lambda *at: load(x, at_dim(at, d, at[d] // times)))


@lowering(aten.diag_embed.default)
def diag_embed(call: Call, x: Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Map:
    """The last dimension of x as a diagonal of dimensions dim1 and dim2, with zeros elsewhere: [*, n] -> [*, n + |offset|,
    n + |offset|].
    """
    a, b = dim1 % len(call.shape), dim2 % len(call.shape)

    def body(*at: Int) -> Expr:
        i = at[a] - max(-offset, 0)
        distance = at[b] - at[a] - offset
        rest = [j for d, j in enumerate(at) if d not in (a, b)]
        inside = [i, x.shape[-1] - 1 - i, distance, -distance]
        return select(inside, load(x, [*rest, i]), const(0, x.dtype.compute))

    return call.map(body)
