"""Packs operands into the layouts that kernels need, by generated kernels; at load if they depend on constants only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lapilli.codegen.template import Context
from lapilli.ir.expr import Expr, load
from lapilli.ir.integer import Int, as_int, ceildiv, product, total
from lapilli.ir.node import Node
from lapilli.schedule.contraction import ConvolutionView, Operand


def flat(node: Node, ctx: Context) -> Callable[[Int], Expr]:
    """The element of a value at an offset in memory."""
    layout = ctx.layouts[node.id]

    def at(offset: Int) -> Expr:
        index: list[Int] = [as_int(0)] * node.rank
        rest = offset
        for d in reversed(layout.order):
            index[d] = rest % node.shape[d] if d != layout.order[0] else rest
            rest = rest // node.shape[d]
        return load(node, tuple(index))

    return at


def as_words(x: Operand, sizes: Sequence[Int], ctx: Context) -> Operand:
    """x itself, or a dense copy in float32 or int32 if its elements are smaller or larger than a word."""
    if ctx.is_whole(x.node):
        return x
    element = flat(x.node, ctx)
    extents = [as_int(1) if stride == 0 else size for stride, size in zip(x.strides, sizes, strict=True)]

    def body(*index: Int) -> tuple[list[Int], Expr]:
        return [], element(total([x.offset, *(i * s for i, s in zip(index, x.strides, strict=True))]))

    node = ctx.packed("words", x.node, extents, body)
    strides = [product(extents[d + 1 :]) if x.strides[d] != 0 else as_int(0) for d in range(len(extents))]
    return Operand(node, as_int(0), tuple(strides))


def channels_last(v: ConvolutionView, ctx: Context, unit: int = 4, copy: bool = False) -> Operand:
    """x itself if its channels are consecutive floats aligned to `unit`, else a copy padded to whole vectors of channels."""
    x = v.x
    copy = copy or not ctx.is_whole(x.node)
    aligned = all(s % unit == 0 for s in (v.channels, x.offset, x.strides[0], x.strides[2], x.strides[3]))
    if not copy and x.strides[1] == 1 and aligned:
        return x
    c = ceildiv(v.channels, unit) * unit
    strides = (v.h * v.w * c, as_int(1), v.w * c, c)
    key = (x.node.id, x.offset, x.strides, v.n, v.h, v.w, v.channels, c)
    if key in ctx.copies:
        return Operand(ctx.copies[key], as_int(0), strides)
    element = flat(x.node, ctx)

    def body(n: Int, h: Int, w: Int, channel: Int) -> tuple[list[Int], Expr]:
        at = x.offset + n * x.strides[0] + channel * x.strides[1] + h * x.strides[2] + w * x.strides[3]
        return [v.channels - 1 - channel], element(at)

    node = ctx.copies[key] = ctx.packed("channels_last", x.node, [v.n, v.h, v.w, c], body)
    return Operand(node, as_int(0), strides)


def filter_index(v: ConvolutionView, o: Int, c: Int, h: Int, w: Int) -> list[Int]:
    return [o, c, w] if v.weight.rank == 3 else [o, c, h, w]


def pack_depthwise(v: ConvolutionView, ctx: Context) -> Node:
    """[C, 1, kh, kw] as [kh, kw, C]."""
    zero = as_int(0)
    return ctx.packed(
        "depthwise", v.weight, [*v.kernel, v.out_channels],
        lambda h, w, c: ([], ctx.read(v.weight, filter_index(v, c, zero, h, w))),
    )  # fmt: skip


def is_nested(x: Operand, v: ConvolutionView) -> bool:
    """Whether all positions can be enumerated with one stride."""
    h_ok = v.h == 1 or x.strides[2] == x.strides[3] * v.w
    return h_ok and (v.n == 1 or x.strides[0] == x.strides[3] * v.w * v.h)
