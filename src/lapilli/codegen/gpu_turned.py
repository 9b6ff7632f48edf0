"""Convolutions with few results and a large kernel on GPUs: gradients of weights (kernels/gpu_conv.slang, TurnedParams).

The gradient of a weight is a convolution whose images are the input's channels, whose channels are the batch, and whose kernel is
the gradient of the output. Rows of a tile are all results of all images then, and its columns the filters.
"""

from __future__ import annotations

import math

from lapilli.codegen.gpu_tiles import Rows, Tiles
from lapilli.codegen.packing import filter_index, flat
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import BatchMapping, all_multiples, on_units
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr
from lapilli.ir.integer import Int, IntLike, Var, as_int, of, total
from lapilli.ir.node import Constant
from lapilli.schedule.contraction import ConvolutionView, Operand, merged, operand
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task

_FEW = 16
"""Columns of a group below which a tile is mostly empty."""
_MORE = 3
"""Places of a kernel for each result of an image, from which on a convolution counts as the gradient of a weight."""


def turned(v: ConvolutionView, task: Task, ctx: Context) -> Tiles | None:
    """A convolution whose kernel has more places than an image has results; on matrix units where they multiply both operands."""
    assert task.reduction is not None
    axes = task.reduction.axes
    taps, places, outs = math.prod(v.kernel), v.out_h * v.out_w, v.out_channels // v.groups
    many = places.value is not None and taps >= max(_FEW, _MORE * places.value)
    if (
        len(axes) > 4
        or isinstance(v.weight, Constant)
        or not many
        or estimate(outs) < _FEW
        or v.n % 4 != 0
        or outs % 4 != 0
    ):
        return None
    dtype = on_units(ctx.target, v.weight)
    if v.x.node.dtype is not dtype and (dtype is not DType.float16 or v.x.node.dtype is not DType.float32):
        dtype = None
    matrix = dtype is not None
    if matrix and not (v.n % 8 == 0 and outs % 8 == 0):
        return None  # an ordinary convolution may have matrix units
    unit = 8 if matrix else 4
    x = _images_last(v, unit, dtype, ctx)
    channels = v.channels // v.groups
    words: dict[str, IntLike] = {
        "H": v.h, "W": v.w, "images": v.n // unit, "OW": v.out_w, "KH": v.kernel[0], "KW": v.kernel[1], "strideH": v.stride[0],
        "strideW": v.stride[1], "padH": v.padding[0], "padW": v.padding[1], "dilationH": v.dilation[0], "dilationW": v.dilation[1],
        "pixel": x.strides[3] // unit, "line": x.strides[2] // unit, "channel": x.strides[1] // unit,
        "batchA": channels * x.strides[1] // unit, "offset": x.offset // unit,
    }  # fmt: skip
    policy, modules = ("TurnedA8<X>", ("gpu_conv_coopmat", "gpu_conv")) if matrix else ("TurnedA<X>", ("gpu_conv",))
    rows = Rows(policy, "TurnedParams", words, x.node, unit, modules, transposed=True)
    w = _columns(v, unit, dtype, ctx)
    image, column, *spatial = axes
    batch, k = as_int(v.groups), channels * taps
    return Tiles(
        rows, w.node, batch, v.n * places, outs, k, matrix, w.strides[0] if v.groups > 1 else as_int(0), w.strides[1], w.offset,
        groups=v.groups, mapping=BatchMapping([], [*spatial, image], column, v.groups),
    )  # fmt: skip


def _images_last(v: ConvolutionView, unit: int, dtype: DType | None, ctx: Context) -> Operand:
    """x itself if its images are adjacent, as they are if the input of the layer lies channels last; else a copy."""
    x = v.x
    fits = x.node.dtype is dtype if dtype is not None else ctx.is_whole(x.node)
    if fits and x.strides[0] == 1 and all_multiples(unit, x.offset, *x.strides[1:]):
        return x
    element = flat(x.node, ctx)

    def body(channel: Int, row: Int, column: Int, image: Int) -> tuple[list[Int], Expr]:
        at = (image, channel, row, column)
        return [], element(total([x.offset, *(i * s for i, s in zip(at, x.strides, strict=True))]))

    node = ctx.packed("images_last", x.node, [v.channels, v.h, v.w, v.n], body, dtype)
    return Operand(node, as_int(0), (as_int(1), v.h * v.w * v.n, v.w * v.n, v.n))


def _columns(v: ConvolutionView, unit: int, dtype: DType | None, ctx: Context) -> Operand:
    """The weights as [group, channel and place, filter], as they lie or packed; strides of groups and of rows."""
    channels, outs, (kh, kw) = v.channels // v.groups, v.out_channels // v.groups, v.kernel
    g, c, y, x, o = (
        Var(name, as_int(e)) for name, e in (("g", v.groups), ("c", channels), ("y", kh), ("x", kw), ("o", outs))
    )
    index = filter_index(v, of(g) * outs + of(o), of(c), of(y), of(x))
    found = operand(v.weight, tuple(index), (g, c, y, x, o), ctx.views, ctx.layouts)
    if found is not None and (found.node.dtype is dtype if dtype is not None else ctx.is_whole(found.node)):
        group, *inner, column = found.strides
        line = merged(inner, [a.extent for a in (c, y, x)])
        if line is not None and column == 1 and all_multiples(unit, found.offset, line, group):
            return Operand(found.node, found.offset, (group, line))

    def body(group: Int, at: Int, n: Int) -> tuple[list[Int], Expr]:
        place = filter_index(v, group * outs + n, at // (kh * kw), at // kw % kh, at % kw)
        return [], ctx.read(v.weight, place)

    k = channels * (kh * kw)
    node = ctx.packed("columns", v.weight, [as_int(v.groups), k, outs], body, dtype)
    return Operand(node, as_int(0), (k * outs, outs))
