"""Contractions on GPUs: shared-memory tiles, on matrix units where the device has them (kernels/gpu_*.slang)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lapilli.codegen.coded import lines_of_codes
from lapilli.codegen.fragments import SIDE, by_fragments
from lapilli.codegen.gpu_tiles import Rows, Tiles
from lapilli.codegen.kernel import MAX_GROUPS, KernelSource
from lapilli.codegen.open_rows import likely_rows, many_rows, may_be_few
from lapilli.codegen.packing import (
    FEW_CHANNELS,
    MOST_TAPS,
    as_words,
    can_be_stored_as,
    channels_last,
    dense_images,
    filter_index,
    flat,
    is_nested,
    pack_depthwise,
    repeated,
    strided_convolution,
    strided_product,
)
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.tiles import fragments_pay
from lapilli.codegen.wrapper import SHORT, Wrapper, all_multiples, batched, depths_source, on_units, source, with_sizes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr
from lapilli.ir.integer import Int, IntLike, as_int, ceildiv, total
from lapilli.ir.node import Constant, Node
from lapilli.schedule.contraction import ConvolutionView, MatmulView, Operand
from lapilli.schedule.encoding import encoding_of
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import WORTH_PACKING

SHORTS, BYTES = 8, 16
"""Elements in 16 bytes, which matrix units read at once."""
_SMALL_IMAGE = 256
"""Places of an image below which a tile of its own would be partly empty."""


def matmul_operands(task: Task, ctx: Context) -> MatmulView | None:
    """The operands of a product; None if these kernels cannot read them."""
    assert task.reduction is not None
    view = strided_product(task.reduction, ctx)
    kind = task.reduction.dtype.compute
    if view is None or any(x.node.dtype.compute is not kind for x in (view.lhs, view.rhs)):
        return None
    rhs = replace(view.rhs, encoding=encoding_of(task.reduction, ctx.views, ctx.tasks))
    return replace(view, lhs=as_words(view.lhs, (view.batch, view.m, view.k), ctx), rhs=rhs)


def convolution_operands(task: Task, ctx: Context) -> ConvolutionView | None:
    """The operands of a convolution; None if these kernels cannot read them."""
    assert task.reduction is not None
    conv = strided_convolution(task.reduction, ctx)
    if conv is None or conv.x.node.dtype.compute is not conv.weight.dtype.compute:
        return None
    return conv if ctx.in_fours(conv.x.node) else replace(conv, x=channels_last(conv, ctx))


# -- the left operand of a tile kernel: how rows are read


def matmul_rows(x: Operand, m: Int, k: Int, units: int) -> Rows | None:
    """units: elements in 16 bytes, as matrix units read them; 0 without these."""
    batch, row, step = x.strides
    if units:
        # So many rows are read at once: beyond the last there may be no memory. (Of a single column, any step is a multiple.)
        transposed = units == SHORTS and row == 1 and all_multiples(units, m, batch, step, x.offset)
        if not transposed and (step != 1 or not all_multiples(units, k, batch, row, x.offset)):
            return None
        line = step if transposed else row
        words: dict[str, IntLike] = {"lda8": line // units, "batchA8": batch // units, "offset8": x.offset // units}
        return Rows("MatmulA<X>", "MatmulParams", words, x.node, units, (), transposed)
    wide = step == 1 and all_multiples(4, k, batch, row, x.offset)
    unit = 4 if wide else 1
    words = {"K": k, "lda": row // unit, "columnA": step, "batchA": batch // unit, "offset": x.offset // unit}
    if wide:
        return Rows("VectorA<X>", "MatmulParams4", words, x.node, 4, (), places="MatmulRows")
    return Rows("ScalarA<X>", "MatmulParams4", words, x.node, 1, ())


def _conv_rows(v: ConvolutionView, x: Operand, units: int, batch: Int, flat_rows: bool) -> Rows | None:
    """units: as for `matmul_rows`. batch: the stride between images, or between groups. flat_rows: rows run over all images."""
    c = v.channels // v.groups
    common: dict[str, IntLike] = {
        "strideH": v.stride[0], "strideW": v.stride[1], "padH": v.padding[0], "padW": v.padding[1],
    }  # fmt: skip
    image, positions = (x.strides[0], v.out_h * v.out_w) if flat_rows else (as_int(0), as_int(0))
    if units:
        line = x.strides[3] * v.w
        aligned = all_multiples(units, c, batch, x.strides[3], x.offset, image)
        if x.strides[1] != 1 or not aligned or (v.h != 1 and x.strides[2] != line):
            return None
        words = {
            "H": v.h, "W": v.w, "C8": c // units, "OW": v.out_w, "KW": v.kernel[1], **common, "dilationH": v.dilation[0],
            "dilationW": v.dilation[1], "pixel8": x.strides[3] // units, "batchA8": batch // units, "offset8": x.offset // units,
            "image8": image // units, "positions": positions,
        }  # fmt: skip
        return Rows("ConvA<X>", "ConvParams", words, x.node, units, ("gpu_conv_coopmat",))
    wide = x.strides[1] == 1 and all_multiples(4, c, batch, x.strides[2], x.strides[3], x.offset, image)
    unit = 4 if wide else 1
    words = {
        "H": v.h, "W": v.w, "C": c // unit, "OW": v.out_w, "KW": v.kernel[1], "K": c * (v.kernel[0] * v.kernel[1]), **common,
        "dilationH": v.dilation[0], "dilationW": v.dilation[1], "pixel": x.strides[3] // unit, "batchA": batch // unit,
        "line": x.strides[2] // unit, "channel": x.strides[1] // unit if unit == 1 else 1,
        "offset": x.offset // unit, "image": image // unit, "positions": positions,
    }  # fmt: skip
    if wide:
        return Rows("ConvVectorA<X>", "ConvParams4", words, x.node, 4, ("gpu_conv",), places="WindowRows")
    return Rows("ConvScalarA<X>", "ConvParams4", words, x.node, 1, ("gpu_conv",))


def _first_layer_rows(v: ConvolutionView) -> Rows | None:
    """An image with few channels, read element by element with any strides."""
    c = v.channels.value
    if c is None or c > 4 or v.dilation != (1, 1) or v.groups != 1:
        return None
    words: dict[str, IntLike] = {
        "H": v.h, "W": v.w, "OW": v.out_w, "strideH": v.stride[0], "strideW": v.stride[1], "padH": v.padding[0],
        "padW": v.padding[1], "batch": v.x.strides[0], "channel": v.x.strides[1], "line": v.x.strides[2], "column": v.x.strides[3],
        "offset": v.x.offset,
    }  # fmt: skip
    policy = f"ConvFirstA<{SHORT.get(v.weight.dtype)}, X, {c}, {v.kernel[0]}, {v.kernel[1]}>"
    return Rows(policy, "ConvFirstParams", words, v.x.node, 1, ("gpu_conv_coopmat",))


# -- matrix products and convolutions


def product(v: MatmulView, task: Task, ctx: Context) -> Tiles | None:
    """A matrix product without matrix units."""
    rows = matmul_rows(v.lhs, v.m, v.k, 0)
    if rows is None:
        return None
    if (coded := lines_of_codes(v, task, ctx)) is not None:
        return _tiles_of_codes(v, rows, coded, False)
    rhs = v.rhs
    if ctx.is_whole(rhs.node) and rhs.strides[2] == 1 and all_multiples(4, v.n, rhs.offset, *rhs.strides[:2]):
        return Tiles(rows, rhs.node, v.batch, v.m, v.n, v.k, False, rhs.strides[0], rhs.strides[1], rhs.offset)
    lies = (
        ctx.is_whole(rhs.node)
        and rhs.strides[1] == 1
        and all_multiples(4, v.k, rhs.offset, rhs.strides[0], rhs.strides[2])
    )
    if lies and (may_be_few(v.m, ctx.target) or rhs.node in ctx.kept):  # other kernels read it so, too
        return Tiles(
            rows, rhs.node, v.batch, v.m, v.n, v.k, False, rhs.strides[0], rhs.strides[2], rhs.offset, transposed_w=True
        )
    return _with_packed_columns(v, rows, False, ctx)


def _tiles_of_codes(v: MatmulView, rows: Rows, coded: Operand, matrix: bool) -> Tiles:
    return Tiles(rows, coded.node, v.batch, v.m, v.n, v.k, matrix, as_int(0), v.k, transposed_w=True)


def matrix_product(v: MatmulView, task: Task, ctx: Context) -> Tiles | None:
    """A matrix product on matrix units. They read vectors of eight elements, along K or across it; other operands are packed, the
    left one only if the product is large enough.
    """
    dtype = on_units(ctx.target, v.rhs.node)
    if dtype is None or not can_be_stored_as(dtype, v.lhs.node):
        return None
    rhs = v.rhs
    rows = _rows_on_units(v, dtype, ctx)
    if rows is None:
        return None
    if (coded := lines_of_codes(v, task, ctx)) is not None:
        return _tiles_of_codes(v, rows, coded, True)
    # A chunk of the left operand has zeros where the last eight k are not full, if it does not lie across K as well.
    if rhs.strides[2] == 1 and all_multiples(8, v.n, rhs.offset, *rhs.strides[:2]):
        return Tiles(rows, rhs.node, v.batch, v.m, v.n, v.k, True, rhs.strides[0], rhs.strides[1], rhs.offset)
    packs = isinstance(rhs.node, Constant) and rhs.node not in ctx.kept and not may_be_few(v.m, ctx.target)  # once
    across = rhs.strides[1] == 1 and not packs
    if across and all_multiples(8, v.k, rhs.offset, rhs.strides[0], rhs.strides[2]):
        return Tiles(
            rows, rhs.node, v.batch, v.m, v.n, v.k, True, rhs.strides[0], rhs.strides[2], rhs.offset, transposed_w=True
        )
    return _with_packed_columns(v, rows, True, ctx)


def fragment_product(v: MatmulView, task: Task, ctx: Context) -> Tiles | None:
    """A large product on matrix units whose right operand is packed by fragments, in each run if it is no constant."""
    rhs, constant = v.rhs, isinstance(v.rhs.node, Constant)
    dtype = on_units(ctx.target, rhs.node)
    if dtype is None or not can_be_stored_as(dtype, v.lhs.node) or lines_of_codes(v, task, ctx) is not None:
        return None
    if constant and (rhs.node in ctx.kept or ctx.kept.is_shared(rhs.node) or may_be_few(v.m, ctx.target)):
        return None  # other kernels read it as it lies, or may pack it by columns
    batch, n, k = estimate(v.batch), estimate(v.n), estimate(v.k)
    if not fragments_pay(batch, many_rows(v.m), n, k, ctx.target, rhs.strides[1] == 1 and not constant, not constant):
        return None
    rows = _rows_on_units(v, dtype, ctx)
    if rows is None:
        return None
    w = by_fragments(v, dtype, ctx)
    step = w.shape[2] * (SIDE * SIDE)  # along k
    batch_w = as_int(0) if w.shape[0] == 1 else w.shape[1] * step
    return Tiles(rows, w, v.batch, v.m, v.n, v.k, True, batch_w, step, fragments=True)


def lying_product(v: MatmulView, task: Task, ctx: Context) -> Tiles | None:
    """A matrix product on matrix units whose constant right operand is read as it lies, along K, instead of packed."""
    rhs = v.rhs
    if not isinstance(rhs.node, Constant) or rhs.node in ctx.kept or rhs.strides[1] != 1 or rhs.strides[2] == 1:
        return None  # it is read so anyway, or cannot be
    if not all_multiples(8, v.k, rhs.offset, rhs.strides[0], rhs.strides[2]):
        return None
    found = matrix_product(v, task, ctx)
    if found is None:
        return None
    return replace(
        found, w=rhs.node, batch_w=rhs.strides[0], row_w=rhs.strides[2], offset_w=rhs.offset, transposed_w=True
    )


def _rows_on_units(v: MatmulView, dtype: DType, ctx: Context) -> Rows | None:
    """The left operand for matrix units: as it lies, or packed if the product is large enough for that."""
    rows = matmul_rows(v.lhs, v.m, v.k, SHORTS) if v.lhs.node.dtype in (dtype, DType.code) else None
    if rows is None and estimate(v.batch * v.n * v.k) * likely_rows(v.m) >= WORTH_PACKING:
        return _packed_rows(v, dtype, ctx)
    return rows


def _packed_rows(v: MatmulView, dtype: DType, ctx: Context) -> Rows:
    """The left operand copied to rows of 16-bit floats, padded with zeros to a multiple of eight."""
    lhs, element = v.lhs, flat(v.lhs.node, ctx)
    batch, row, step = lhs.strides
    k, shared = ceildiv(v.k, 8) * 8, batch == 0

    def body(b: Int, m: Int, at: Int) -> tuple[list[Int], Expr]:
        return [v.k - 1 - at], element(lhs.offset + b * batch + m * row + at * step)

    key = ("rows", lhs.node.id, lhs.offset, lhs.strides, v.batch, v.m, v.k, dtype)
    if key not in ctx.copies:
        ctx.copies[key] = ctx.packed("rows", lhs.node, [as_int(1) if shared else v.batch, v.m, k], body, dtype)
    node = ctx.copies[key]
    found = matmul_rows(Operand(node, as_int(0), (as_int(0) if shared else v.m * k, k, as_int(1))), v.m, k, SHORTS)
    assert found is not None
    return found


def _with_packed_columns(v: MatmulView, rows: Rows, matrix: bool, ctx: Context) -> Tiles:
    """With the right operand copied to rows of whole vectors."""
    rhs, unit = v.rhs, 8 if matrix else 4
    shared = rhs.strides[0] == 0 or v.batch == 1
    element = flat(rhs.node, ctx)
    n_padded = ceildiv(v.n, unit) * unit

    def body(b: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        return [v.n - 1 - n], element(rhs.offset + b * rhs.strides[0] + k * rhs.strides[1] + n * rhs.strides[2])

    packed = ctx.packed("matrix", rhs.node, [as_int(1) if shared else v.batch, v.k, n_padded], body)
    return Tiles(rows, packed, v.batch, v.m, v.n, v.k, matrix, as_int(0) if shared else v.k * n_padded, n_padded)


def first_layer(v: ConvolutionView, ctx: Context) -> Tiles | None:
    """A convolution of an image with few channels, on matrix units."""
    rows = _first_layer_rows(v) if on_units(ctx.target, v.weight) is not None else None
    found = None if rows is None else Windows(v, rows, v.channels, False)
    return None if found is None else _tiles_of_convolution(found, True, ctx, "channels first")


_LONG_PATCH = 192
"""Terms of a window from which on a copy of it should pay: of 16x16 patches by the times of others, not measured as a whole."""


def patches(v: ConvolutionView, ctx: Context) -> Tiles | None:
    """A convolution of an image with few channels whose large windows do not overlap, on matrix units: each is copied to a row."""
    dtype, (kh, kw), channels = on_units(ctx.target, v.weight), v.kernel, v.channels.value
    apart = v.stride == v.kernel and v.padding == (0, 0) and v.dilation == (1, 1) and v.groups == 1
    if dtype is None or channels is None or channels > 4 or not apart or not can_be_stored_as(dtype, v.x.node):
        return None
    k = as_int(channels * kh * kw)
    if channels * kh * kw < _LONG_PATCH:
        return None
    element, padded = flat(v.x.node, ctx), ceildiv(k, SHORTS) * SHORTS

    def body(n: Int, oy: Int, ox: Int, at: Int) -> tuple[list[Int], Expr]:
        channel, y, x = at // (kh * kw), oy * kh + at // kw % kh, ox * kw + at % kw
        steps = zip((n, channel, y, x), v.x.strides, strict=True)
        return [k - 1 - at], element(total([v.x.offset, *(i * step for i, step in steps)]))

    copy = ctx.packed("patches", v.x.node, [v.n, v.out_h, v.out_w, padded], body, dtype)
    rows = matmul_rows(Operand(copy, as_int(0), (as_int(0), padded, as_int(1))), v.rows, padded, SHORTS)
    return (
        None if rows is None else _tiles_of_convolution(Windows(v, rows, v.channels, True), True, ctx, "channels first")
    )


@dataclass(frozen=True)
class Windows:
    """The left operand of a convolution as an implicit product. real: channels of a group that the weights have, if others of `v`
    are padding. flat_rows: the rows run over all images.
    """

    v: ConvolutionView
    rows: Rows
    real: Int
    flat_rows: bool

    @property
    def batch(self) -> Int:
        return as_int(self.v.groups) if self.v.groups > 1 else as_int(1) if self.flat_rows else self.v.n

    @property
    def m(self) -> Int:
        return self.v.rows if self.flat_rows else self.v.out_h * self.v.out_w


def convolution(v: ConvolutionView, ctx: Context) -> Tiles | None:
    """An implicit matrix product whose rows are windows; on matrix units where they can read it."""
    dtype = on_units(ctx.target, v.weight)
    found = None
    if dtype is not None and can_be_stored_as(dtype, v.x.node):
        found = windows(v, ctx, SHORTS, dtype)
    if found is not None:
        return _tiles_of_convolution(found, True, ctx)
    found = windows(v, ctx)
    return None if found is None else _tiles_of_convolution(found, False, ctx)


def windows(v: ConvolutionView, ctx: Context, units: int = 0, dtype: DType | None = None) -> Windows | None:
    """units: as for `matmul_rows`. dtype: the type that x must have, if it is no code."""
    if v.groups > 1 and estimate(v.out_channels // v.groups) < FEW_CHANNELS:
        return None  # most columns of a tile would be empty: an invocation for each element is faster
    real = v.channels // v.groups
    padded = v.groups == 1 and real % 4 != 0 and estimate(real) > 4  # with channels of zeros
    unit = units or 4
    if units and not (padded or real % units == 0):
        return None
    x = channels_last(v, ctx, unit, dtype=dtype) if padded or real % 4 == 0 else v.x
    if padded:
        v = replace(v, channels=ceildiv(v.channels, unit) * unit)
    per_group = v.channels // v.groups
    batch = per_group * x.strides[1] if v.groups > 1 else x.strides[0]
    if v.is_pointwise and is_nested(x, v):
        operand = Operand(x.node, x.offset, (as_int(0), x.strides[3], x.strides[1]))
        rows = matmul_rows(operand, v.rows, v.channels, units)
        if rows is not None:
            return Windows(v, rows, real, True)
    # The batch runs over groups; or the images are too small for the rows of a tile.
    most = v.rows.bounds[1]
    small = most is not None and most <= 16 * MAX_GROUPS and estimate(v.out_h * v.out_w) < _SMALL_IMAGE
    flat_rows = v.n != 1 and (v.groups > 1 or small)
    rows = _conv_rows(v, x, units, batch, flat_rows)
    return None if rows is None else Windows(v, rows, real, flat_rows)


def _tiles_of_convolution(found: Windows, matrix: bool, ctx: Context, order: str = "channels last") -> Tiles:
    """Weights packed as [groups, K, N], with K in the order in which rows are read."""
    v, rows = found.v, found.rows
    c, o = v.channels // v.groups, v.out_channels // v.groups
    unit = 8 if matrix else 4
    k = c * (v.kernel[0] * v.kernel[1])
    k_padded, o_padded = (ceildiv(k, 8) * 8 if matrix else k), ceildiv(o, unit) * unit

    packed = ctx.packed("filter", v.weight, [as_int(v.groups), k_padded, o_padded], window_weights(found, ctx, order))
    batch_w = k_padded * o_padded if v.groups > 1 else as_int(0)
    return Tiles(
        rows, packed, found.batch, found.m, o, k, matrix, batch_w, o_padded, flat_rows=found.flat_rows, groups=v.groups
    )


def window_weights(
    found: Windows, ctx: Context, order: str = "channels last"
) -> Callable[[Int, Int, Int], tuple[list[Int], Expr]]:
    """For a group, a place in a window and an output channel of the group: guards, and the weight. order: of places, "channels
    last" or "channels first".
    """
    v, real = found.v, found.real
    c, o = v.channels // v.groups, v.out_channels // v.groups
    kh, kw = v.kernel
    k = c * (kh * kw)

    def weight(g: Int, at: Int, n: Int) -> tuple[list[Int], Expr]:
        if order == "channels last":
            index = (at % c, at // (c * kw), at // c % kw)
        else:
            index = (at // (kh * kw), at // kw % kh, at % kw)
        channel, y, x = index
        guards = [k - 1 - at, o - 1 - n] if real == c else [k - 1 - at, o - 1 - n, real - 1 - channel]
        return guards, ctx.read(v.weight, filter_index(v, g * o + n, channel, y, x))

    return weight


# -- the other kernels


@dataclass(frozen=True)
class _Direct(KernelTemplate):
    v: ConvolutionView
    w: Node
    size: int = 64  # of a work group

    @property
    def operands(self) -> list[Node]:
        return [self.v.x.node, self.w]

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        yield from (replace(self, size=size) for size in (64, 32, 128) if size <= ctx.target.invocations)

    @property
    def variant(self) -> str:
        return f"groups of {self.size}"

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        v, size = self.v, self.size
        w = Wrapper(task, ctx, "gpu_conv_direct", sizes_as_params=sizes_as_params)
        w.epilogue(v.out_h * v.out_w, v.out_channels, batched(task))
        source(w, "X", v.x.node, vector=False)
        source(w, "W", self.w, vector=True)
        s = v.x.strides
        w.params(
            H=v.h, W=v.w, OH=v.out_h, OW=v.out_w, N=v.out_channels, strideH=v.stride[0], strideW=v.stride[1], padH=v.padding[0],
            padW=v.padding[1], batch=s[0], channel=s[1], line=s[2], column=s[3], offset=v.x.offset,
        )  # fmt: skip
        wide = 8 if v.out_channels % 8 == 0 else 4
        groups = (ceildiv(v.out_h * v.out_w, size), v.out_channels // wide, v.n)
        call = f"conv_direct<X, W, E, {v.channels}, {v.kernel[0]}, {v.kernel[1]}, {wide}, {size}>(P.t, gid, li);"
        written = w.finish(call, groups, (size, 1, 1), "convolution_direct", "ConvDirectParams")
        taps = (v.channels.value or 1) * v.kernel[0] * v.kernel[1]
        written.shared = 4 * taps * wide
        written.flops = v.rows * v.out_channels * (2 * taps)
        return written


def direct(v: ConvolutionView, ctx: Context) -> _Direct | None:
    """A convolution of an image with few channels, with all weights of some outputs in shared memory."""
    kh, kw = v.kernel
    few = _first_layer_rows(v) is not None and kh * kw * (v.channels.value or 4) <= 192
    if not few or v.out_channels % 4 != 0 or not v.weight.dtype.is_float:
        return None

    def body(k: Int, n: Int) -> tuple[list[Int], Expr]:
        return [], ctx.read(v.weight, filter_index(v, n, k // (kh * kw), k // kw % kh, k % kw))

    return _Direct(v, ctx.packed("filter", v.weight, [v.channels * (kh * kw), v.out_channels], body))


@dataclass(frozen=True)
class Depthwise(KernelTemplate):
    v: ConvolutionView
    x: Operand
    w: Node
    size: int = 128  # of a work group; one pixel and four channels an invocation: more of either lost

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, self.w]

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        yield from (replace(self, size=size) for size in (128, 64, 256) if size <= ctx.target.invocations)

    @property
    def variant(self) -> str:
        return f"groups of {self.size}"

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        v, size = self.v, self.size
        w = Wrapper(task, ctx, "gpu_depthwise", sizes_as_params=sizes_as_params)
        w.epilogue(v.out_h * v.out_w, v.out_channels, batched(task))
        source(w, "X", self.x.node, vector=True)
        source(w, "W", self.w, vector=True)
        w.params(
            H=v.h, W=v.w, OW=v.out_w, N=v.channels, groups=ceildiv(v.channels, 4), padH=v.padding[0], padW=v.padding[1],
            strideH=v.stride[0], dilationH=v.dilation[0], dilationW=v.dilation[1],
        )  # fmt: skip
        groups = (ceildiv(v.out_w * ceildiv(v.channels, 4), size), v.out_h, v.n)
        whole, depths = int(not v.weight.dtype.is_float), depths_source(w, v.depths)
        call = f"depthwise4<X, W, E, {depths}, {v.kernel[0]}, {v.kernel[1]}, {v.stride[1]}, 1, {size}, {whole}>(P.t, gid, li);"
        written = w.finish(call, groups, (size, 1, 1), "depthwise", "DepthwiseParams")
        written.flops = v.rows * v.out_channels * (2 * v.taps)
        return written


def depthwise(v: ConvolutionView, ctx: Context) -> Depthwise | None:
    if v.groups == 1 or v.channels != v.groups or v.taps > MOST_TAPS:
        return None
    if not v.is_depthwise:
        if v.out_channels.value is None:
            return None
        v = repeated(v, v.out_channels.value, ctx)
    x = dense_images(v.x, (v.images, v.channels, v.h, v.w), ctx)
    return Depthwise(v, x, pack_depthwise(v, ctx))
