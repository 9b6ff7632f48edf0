"""Packs operands into the layouts that kernels need, by generated kernels; at load if they depend on constants only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lapilli.codegen.template import Context
from lapilli.ir.axes import unravel
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, ceildiv, of, product, total
from lapilli.ir.node import Convolution, Input, Matmul, Node, Reduce
from lapilli.schedule.contraction import (
    ConvolutionView,
    Depths,
    MatmulView,
    Operand,
    convolution_view,
    matmul_view,
    merged,
    operand,
)
from lapilli.schedule.copies import Packed

WORTH_COPYING = 1 << 18
"""Multiplications from which on a contraction has its operands copied, if no kernel for it reads them as they lie."""


def strided_product(r: Reduce, ctx: Context) -> MatmulView | None:
    """A product whose operands have one stride each for batches, rows and columns, or are copied. None for little work."""
    contraction = r.contraction
    assert isinstance(contraction, Matmul)

    def copy(node: Node, index: tuple[Int, ...], groups: Sequence[Sequence[Var]]) -> Operand | None:
        return gathered(node, index, groups, ctx) if _is_worth_copying(r) else None

    return matmul_view(r, ctx.views, ctx.layouts, copy)


def _is_worth_copying(r: Reduce) -> bool:
    """Of open sizes the largest counts: a copy costs little where there is little work, and the lack of one much where there is
    much.
    """
    most = product([a.extent for a in (*r.axes, *r.raxes)]).bounds[1]
    return most is None or most >= WORTH_COPYING


def gathered(
    node: Node,
    index: Sequence[Int],
    groups: Sequence[Sequence[Var]],
    ctx: Context,
    unit: int = 1,
    dtype: DType | None = None,
) -> Operand:
    """A dense copy of `node[index]`: a dimension for each group of axes. A group that the index does not depend on has stride 0.

    unit: the last dimension is filled up with zeros to a multiple. dtype: of the copy; default: the value's.
    """
    read = {a for i in index for a in i.atoms()}
    extents = [product([a.extent for a in g]) if read & {*g} else as_int(1) for g in groups]
    real = extents[-1]
    extents[-1] = ceildiv(real, unit) * unit

    def body(*at: Int) -> tuple[list[Int], Expr]:
        place: dict[Atom, Int] = {}
        for group, i in zip(groups, at, strict=True):
            place |= unravel(i, group)
        guards = [real - 1 - at[-1]] if unit > 1 else []
        return guards, ctx.read(node, [i.substitute(place) for i in index])

    copy = ctx.packed("gathered", node, extents, body, dtype)
    strides = [product(extents[d + 1 :]) if e != 1 else as_int(0) for d, e in enumerate(extents)]
    return Operand(copy, as_int(0), tuple(strides))


def strided_convolution(r: Reduce, ctx: Context) -> ConvolutionView | None:
    """A convolution whose image has a stride for each dimension; of a 3-D one, the images of `deep` or `volume`."""
    return convolution_view(r, ctx.views, ctx.layouts) or deep(r, ctx) or volume(r, ctx)


MOST_TAPS = 1024
"""Of a depthwise kernel on GPUs: of more, which some gradients have, many invocations should share the sum."""
FEW_CHANNELS = 8
"""Results of a group of channels below which the tile of a work group is mostly empty."""
_FEW_RESULTS = 4
"""Of a channel of a volume that is repeated as often."""


def deep(r: Reduce, ctx: Context) -> ConvolutionView | None:
    """A 3-D depthwise convolution, whose kernels read the depths of an image where they are. None for others."""
    c = r.contraction
    assert isinstance(c, Convolution)
    x, weight = c.x, c.weight
    kernel = [s.value for s in weight.shape[2:]]
    if len(kernel) != 3 or None in kernel or c.groups == 1 or x.shape[1] != c.groups:
        return None
    kd, kh, kw = (k for k in kernel if k is not None)
    if kd * kh * kw > MOST_TAPS or r.shape[1].value is None or r.shape[1].value > c.groups * _FEW_RESULTS:
        return None
    depths = Depths(x.shape[2], r.shape[2], kd, c.stride[0], c.padding[0], c.dilation[0])
    return _over_depths(r, images(x, ctx)[0], x.shape[1], depths)


def _over_depths(r: Reduce, x: Operand, channels: Int, depths: Depths | None = None) -> ConvolutionView:
    """A 3-D convolution as a 2-D one that has the images of all output depths as results. x: what it reads; channels: of that."""
    c = r.contraction
    assert isinstance(c, Convolution)
    (n, _, _, h, w), (_, outs, *out) = c.x.shape, r.shape
    kh, kw = (s.const for s in c.weight.shape[3:])
    (_, *stride), (_, *padding), (_, *dilation) = c.stride, c.padding, c.dilation
    return ConvolutionView(
        n * out[0], channels, h, w, outs, out[1], out[2], (kh, kw), (stride[0], stride[1]), (padding[0], padding[1]),
        (dilation[0], dilation[1]), c.groups, x, c.weight, depths,
    )  # fmt: skip


Sizes = tuple[Int, Int, Int, Int]
"""Of images: how many, channels, rows and columns."""


def images(node: Node, ctx: Context) -> tuple[Operand, Sizes]:
    """A value [N, C, *spatial] as images, of a volume those of all depths, with strides (image, channel, row, column); a copy if
    they do not lie so.
    """
    index, outer, c, h, w = _axes_of_images(node)
    lines = [h] if h is not None else []
    sizes = product([a.extent for a in outer]), c.extent, product([a.extent for a in lines]), w.extent
    found = _lying_images(node, ctx)
    if found is None:
        copy = gathered(node, index, [outer, lines, [w], [c]], ctx)
        image, row, column, channel = copy.strides
        found = Operand(copy.node, copy.offset, (image, channel, row, column))
    return found, sizes


def _lying_images(node: Node, ctx: Context) -> Operand | None:
    """The images as they lie, if one stride leads from each to the next."""
    index, outer, c, h, w = _axes_of_images(node)
    found = operand(node, index, [*outer, c, h, w], ctx.views, ctx.layouts)
    image = merged(found.strides[: len(outer)], [a.extent for a in outer]) if found is not None else None
    if found is None or image is None:
        return None
    return Operand(found.node, found.offset, (image, *found.strides[-3:]))


def _axes_of_images(node: Node) -> tuple[tuple[Int, ...], list[Var], Var, Var | None, Var]:
    """The index of an element; the axes that count images, channels, rows (None: a line has one) and columns."""
    axes = [Var(f"x{d}", size) for d, size in enumerate(node.shape)]
    n, c, *depths, w = axes
    h = depths.pop() if depths else None
    return tuple(map(of, axes)), [n, *depths], c, h, w


def volume(r: Reduce, ctx: Context) -> ConvolutionView | None:
    """A 3-D convolution as a 2-D one over the images of all output depths, whose channels are those of the depths that its kernel
    covers: [N, C, D, H, W] is copied as [N * OD, H, W, groups, KD, C / groups]. None for little work, and for others.
    """
    c = r.contraction
    assert isinstance(c, Convolution)
    x, weight, g = c.x, c.weight, c.groups
    kernel = [s.value for s in weight.shape[2:]]
    if len(kernel) != 3 or None in kernel or not _is_worth_copying(r):
        return None
    kd = weight.shape[2].const
    (n, channels, depth, h, w), out_d = x.shape, r.shape[2]
    sd, pd, dd = c.stride[0], c.padding[0], c.dilation[0]
    per_group = channels // g

    def body(image: Int, row: Int, column: Int, channel: Int) -> tuple[list[Int], Expr]:
        tap, inside = channel // per_group % kd, channel % per_group
        at = image % out_d * sd - pd + tap * dd
        source = [image // out_d, channel // (per_group * kd) * per_group + inside, at, row, column]
        return [at, depth - 1 - at], ctx.read(x, source)

    # A transposed one may have more depths than its input.
    found = _lying_images(x, ctx) if (kd, sd, pd) == (1, 1, 0) and out_d == depth else None
    total_channels = channels * kd
    if found is None:
        copy = ctx.packed("volume", x, [n * out_d, h, w, total_channels], body)
        found = Operand(copy, as_int(0), (h * w * total_channels, as_int(1), w * total_channels, total_channels))
    return _over_depths(r, found, total_channels)


def flat(node: Node, ctx: Context) -> Callable[[Int], Expr]:
    """The element of a value at an offset in memory. A copy of a copy reads what was copied."""
    layout = ctx.layouts[node.id]

    def at(offset: Int) -> Expr:
        index: list[Int] = [as_int(0)] * node.rank
        rest = offset
        for d in reversed(layout.order):
            index[d] = rest % node.shape[d] if d != layout.order[0] else rest
            rest = rest // node.shape[d]
        if isinstance(node, Packed):
            return rewrite(node.body, dict(zip(node.axes, index, strict=True)))
        return ctx.read(node, index)

    return at


def as_words(x: Operand, sizes: Sequence[Int], ctx: Context) -> Operand:
    """x itself, or a dense copy in float32 or int32 if its elements are smaller or larger than a word."""
    if ctx.in_fours(x.node):
        return x
    element = flat(x.node, ctx)
    extents = [as_int(1) if stride == 0 else size for stride, size in zip(x.strides, sizes, strict=True)]

    def body(*index: Int) -> tuple[list[Int], Expr]:
        return [], element(total([x.offset, *(i * s for i, s in zip(index, x.strides, strict=True))]))

    node = ctx.packed("words", x.node, extents, body)
    strides = [product(extents[d + 1 :]) if x.strides[d] != 0 else as_int(0) for d in range(len(extents))]
    return Operand(node, as_int(0), tuple(strides))


def can_be_stored_as(dtype: DType, node: Node) -> bool:
    """Whether a value is stored as 16-bit floats of this type, or would be if the model had computed it: an input in float32 beside
    weights that were rounded to halves, and copies of it.
    """
    if node.dtype is DType.code:
        return True  # both have all integers of nine bits
    if isinstance(node, Packed):
        return all(can_be_stored_as(dtype, ld.node) for ld in loads(node.body))
    rounded = dtype is DType.float16 and isinstance(node, Input) and node.dtype is DType.float32
    return node.dtype is dtype or rounded


def channels_last(
    v: ConvolutionView, ctx: Context, unit: int = 4, copy: bool = False, dtype: DType | None = None, groups: int = 1
) -> Operand:
    """The convolution's images as `images_last` gives them."""
    return images_last(v.x, (v.images, v.channels, v.h, v.w), ctx, unit, copy, dtype, groups)


def images_last(
    x: Operand,
    sizes: Sizes,
    ctx: Context,
    unit: int = 4,
    copy: bool = False,
    dtype: DType | None = None,
    groups: int = 1,
) -> Operand:
    """x itself if its channels are consecutive floats aligned to `unit`, else a copy padded to whole vectors of channels. dtype:
    the type that it must have. groups: of channels, each of which is aligned and padded.
    """
    count, channels, h, w = sizes
    real = channels // groups
    copy = copy or not ctx.in_fours(x.node) or (dtype is not None and x.node.dtype not in (dtype, DType.code))
    aligned = all(s % unit == 0 for s in (real, x.offset, x.strides[0], x.strides[2], x.strides[3]))
    if not copy and x.strides[1] == 1 and aligned:
        return x
    padded = ceildiv(real, unit) * unit
    c = padded * groups
    strides = (h * w * c, as_int(1), w * c, c)
    key = (x.node.id, x.offset, x.strides, *sizes, c, groups, dtype)
    if key in ctx.copies:
        return Operand(ctx.copies[key], as_int(0), strides)
    element = flat(x.node, ctx)

    def body(n: Int, row: Int, column: Int, channel: Int) -> tuple[list[Int], Expr]:
        inside = channel % padded if groups > 1 else channel
        channel = channel // padded * real + inside if groups > 1 else channel
        at = x.offset + n * x.strides[0] + channel * x.strides[1] + row * x.strides[2] + column * x.strides[3]
        return [real - 1 - inside], element(at)

    node = ctx.copies[key] = ctx.packed("channels_last", x.node, [count, h, w, c], body, dtype)
    return Operand(node, as_int(0), strides)


def dense_images(x: Operand, sizes: Sizes, ctx: Context) -> Operand:
    """The same with nothing between the images, as kernels read them that know their sizes alone."""
    count, channels, h, w = sizes
    found, c = images_last(x, sizes, ctx), ceildiv(channels, 4) * 4
    steps = zip((count, h, w), (h * w * c, w * c, c), (found.strides[0], *found.strides[2:]), strict=True)
    dense = found.offset == 0 and all(size == 1 or step == stride for size, step, stride in steps)
    return found if dense else images_last(x, sizes, ctx, copy=True)


def filter_index(v: ConvolutionView, o: Int, c: Int, h: Int, w: Int) -> list[Int]:
    if v.weight.rank == 5:
        per_group = v.weight.shape[1]
        return [o, c % per_group, c // per_group, h, w]
    return [o, c, w] if v.weight.rank == 3 else [o, c, h, w]


def repeated(v: ConvolutionView, groups: int, ctx: Context) -> ConvolutionView:
    """With several results of a channel: with as many copies of it, so that there is one of each."""
    x, element, c = v.x, flat(v.x.node, ctx), as_int(groups)
    per_channel = v.out_channels // v.channels

    def body(n: Int, h: Int, w: Int, o: Int) -> tuple[list[Int], Expr]:
        strides = zip((n, o // per_channel, h, w), x.strides, strict=True)
        return [], element(total([x.offset, *(i * s for i, s in strides)]))

    copy = ctx.packed("repeated", x.node, [v.images, v.h, v.w, c], body)
    made = Operand(copy, as_int(0), (v.h * v.w * c, as_int(1), v.w * c, c))
    return replace(v, channels=c, groups=groups, x=made)


def pack_depthwise(v: ConvolutionView, ctx: Context) -> Node:
    """[C, 1, kh, kw] as [kh, kw, C], zero-padded in C to a multiple of 4; with depths, [C, 1, kd, kh, kw] as [kd * kh, kw, C]."""
    zero, channels = as_int(0), v.out_channels
    if v.depths is not None:
        kh, kw = v.kernel
        return ctx.packed(
            "depthwise", v.weight, [v.depths.kernel * kh, kw, ceildiv(channels, 4) * 4],
            lambda h, w, c: ([channels - 1 - c], ctx.read(v.weight, [c, zero, h // kh, h % kh, w])),
        )  # fmt: skip
    return ctx.packed(
        "depthwise", v.weight, [*v.kernel, ceildiv(channels, 4) * 4],
        lambda h, w, c: ([channels - 1 - c], ctx.read(v.weight, filter_index(v, c, zero, h, w))),
    )  # fmt: skip


def is_nested(x: Operand, v: ConvolutionView) -> bool:
    """Whether all positions can be enumerated with one stride."""
    h_ok = v.h == 1 or x.strides[2] == x.strides[3] * v.w
    return h_ok and (v.n == 1 or x.strides[0] == x.strides[3] * v.w * v.h)
