"""Contractions on drivers of type CPU: register tiles, no barriers (kernels/cpu_*.slang)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from lapilli.codegen.coded import block_of, columns_of_codes, in_memory, matrix_source
from lapilli.codegen.kernel import KernelSource, linear_groups
from lapilli.codegen.packing import (
    FEW_CHANNELS,
    as_words,
    channels_last,
    filter_index,
    flat,
    is_nested,
    pack_depthwise,
    repeated,
    strided_convolution,
    strided_product,
)
from lapilli.codegen.template import Context, KernelTemplate, simple_task
from lapilli.codegen.wrapper import Wrapper, batched, depths_source, source, with_sizes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Op
from lapilli.ir.integer import Int, IntLike, as_int, ceildiv, maximum, minimum
from lapilli.ir.node import Constant, Input, Map, Node, State, in_state
from lapilli.schedule.contraction import ConvolutionView, MatmulView, Operand
from lapilli.schedule.encoding import encoding_of
from lapilli.schedule.layout import Layout, estimate
from lapilli.schedule.task import Task
from lapilli.target import NOTHING, QUADS, STORAGE, Requirements, Target

_SIZE = 64  # invocations in a work group
_WIDEST = 15  # kernel of depthwise convolutions whose loop over the columns is unrolled
_COLUMNS = 8  # of a product, from which on it pays to copy the rows of its left side
_FEW_WEIGHTS = 4
"""Of a tap in a group, below which whole vectors of channels and results are mostly zeros."""
_WORTH_TRANSFORMING = 256
"""Results of a channel from which on weights that are computed, or given, are transformed for Winograd's algorithm in every run."""


def matmul_operands(task: Task, ctx: Context) -> MatmulView | None:
    """The operands of a product; None if these kernels cannot read them."""
    assert task.reduction is not None
    view = strided_product(task.reduction, ctx)
    kind = task.reduction.dtype.compute
    if view is None or any(x.node.dtype.compute is not kind for x in (view.lhs, view.rhs)):
        return None
    return replace(view, rhs=replace(view.rhs, encoding=encoding_of(task.reduction, ctx.views, ctx.tasks)))


def convolution_operands(task: Task, ctx: Context) -> ConvolutionView | None:
    """The operands of a convolution; None if these kernels cannot read them."""
    assert task.reduction is not None
    return strided_convolution(task.reduction, ctx)


def product(v: MatmulView, task: Task, ctx: Context) -> CpuMatmul | None:
    found = _matmul(v, task, ctx)
    return found if found is not None and found.is_countable(ctx.target) else None


def are_countable(rows: Sequence[Int], target: Target) -> bool:
    """Whether there are few enough rows for `divmod` of cpu_common.slang. It is exact for quotients below 2^21 with the division
    that Vulkan requires, and below 2^23 with one that is correctly rounded, as on CPUs.
    """
    most = 1 << (23 if target.texel else 21)
    return all((n.value or 0) < most for n in rows)


@dataclass(frozen=True)
class Tile:
    """rows x columns of an invocation; of a depthwise kernel, neighbouring results of a row. invocations: of a work group. turned:
    whether neighbouring work groups take neighbouring rows where the cost model would take columns, or the other way round.
    """

    rows: int
    columns: int
    invocations: int = _SIZE
    turned: bool = False

    def __str__(self) -> str:
        groups = f", groups of {self.invocations}" if self.invocations != _SIZE else ""
        return f"{self.rows}x{self.columns}{groups}{', turned' if self.turned else ''}"


_OTHERS = ((8, 16), (4, 16), (8, 8), (2, 16), (4, 4), (2, 8), (4, 8), (1, 8), (1, 16))
"""Rows and columns that only measuring can choose."""
_SIZES = (16, 32, 64, 128)


def _other_sizes(tile: Tile) -> Iterator[Tile]:
    """The tile in work groups of other sizes."""
    return (replace(tile, invocations=size) for size in _SIZES if size != tile.invocations)


def _other_tiles(first: Tile, most_rows: int, vectors: Callable[[int], bool]) -> Iterator[Tile]:
    """First the one that the cost model takes. most_rows: that a tile may have. vectors: whether it may have so many of columns."""
    yield first
    if most_rows > 0:
        yield replace(first, turned=True)
    yield from _other_sizes(first)
    for rows, columns in _OTHERS:
        if rows <= most_rows and vectors(columns // 4) and (rows, columns) != (first.rows, first.columns):
            yield replace(first, rows=rows, columns=columns)


def is_aligned(x: Int) -> bool:
    return x % 4 == 0


# -- matrix products


def _quads(target: Target) -> Requirements:
    """What tiles need: quads exchange what they read where the plan has them."""
    return QUADS if target.texel else NOTHING


@dataclass(frozen=True)
class CpuMatmul(KernelTemplate):
    """batch, m, n, k; x: rows of k consecutive elements, with offset and strides in elements; w: packed."""

    batch: Int
    m: Int
    n: Int
    k: Int
    x: Operand  # strides (batch, row, k)
    w: Node
    shared_w: bool
    tile: Tile

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, *in_memory(self.w)]

    def is_countable(self, target: Target) -> bool:
        return are_countable([self.batch, ceildiv(self.m, 4 * self.tile.rows)], target)

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        rows, vectors = self.m.bounds[0] or 1, -(-(self.n.bounds[0] or 1) // 4)
        menu = _other_tiles(self.tile, rows if rows >= 4 else 0, lambda count: count <= vectors)
        made = (replace(self, tile=tile) for tile in menu)
        yield from (t for t in made if t.is_countable(ctx.target))

    @property
    def variant(self) -> str:
        return str(self.tile)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        k4, quads = ceildiv(self.k, 4), int(ctx.target.texel)
        few = (self.m.bounds[0] or 1) < 4
        w = Wrapper(task, ctx, "cpu_matmul", sizes_as_params)
        vec = w.epilogue(self.batch * self.m, self.n, batched(task, flat_rows=True))
        whole = int(not self.w.dtype.is_float)
        source(w, "X", self.x.node, vector=True)
        matrix_source(w, "W", self.w)
        w.params(
            M=self.m, N=self.n, K4=k4, B=self.batch, xOff4=self.x.offset // 4, xRow4=self.x.strides[1] // 4,
            xBatch4=self.x.strides[0] // 4, wBatch4=0 if self.shared_w else ceildiv(self.n, 4) * k4 * 4,
            mFast=int(_rows_first(self.m, self.x.strides[1]) != self.tile.turned),
        )  # fmt: skip
        n4, size, depth = ceildiv(self.n, 4), self.tile.invocations, _depth(self.k, ctx.target)
        block = max(block_of(self.w), depth)
        if few and self.m.value is None:  # rows of open size: fewer than a tile has, than a block has, or many
            tm, tn = 4, self.tile.columns
            columns = ceildiv(n4, tn // 4) * 4
            many = ceildiv(self.m, 4 * tm) * columns * (1 - _is_below(self.m, 4 * tm))
            some = ceildiv(self.m, 4) * columns * _is_below(self.m, 4 * tm)
            lanes = maximum(maximum(many, some), minimum(self.m, tm - 1) * n4 * _is_below(self.m, tm))
            groups, group = linear_groups(self.batch * lanes, size)
            given = f"(P.t, uint({group}) * {size} + li, gid.x);"
            options = f"{tn}, {depth}, {_stores(vec, self.n, tn)}, {whole}, {quads}"
            call = (
                f"if (P.t.M < {tm}) matvec<X, W, E, 1, {depth}, {block}, {int(vec)}, {whole}>{given}\n"
                f"    else if (P.t.M < {4 * tm}) matmul<X, W, E, 1, {options}>{given}\n"
                f"    else matmul<X, W, E, {tm}, {options}>{given}"
            )
            written = w.finish(call, groups, (size, 1, 1), "matmul", "MatmulParams")
            written.needs = _quads(ctx.target)
        elif few:
            rows = self.m.value or 1
            groups, group = linear_groups(self.batch * n4, size)
            call = f"matvec<X, W, E, {rows}, {depth}, {block}, {int(vec)}, {whole}>(P.t, uint({group}) * {size} + li, gid.x);"
            written = w.finish(call, groups, (size, 1, 1), "matvec", "MatmulParams")
        else:
            tm, tn = self.tile.rows, self.tile.columns
            blocks = self.batch * ceildiv(self.m, 4 * tm) * ceildiv(n4, tn // 4)
            groups, group = linear_groups(blocks * 4, size)
            call = (
                f"matmul<X, W, E, {tm}, {tn}, {depth}, {_stores(vec, self.n, tn)}, {whole}, {quads}>"
                f"(P.t, uint({group}) * {size} + li, gid.x);"
            )
            written = w.finish(call, groups, (size, 1, 1), "matmul", "MatmulParams")
            written.needs = _quads(ctx.target)
        written.flops = self.batch * self.m * self.n * self.k * 2
        return written


def _is_below(m: Int, limit: int) -> Int:
    """1 if m < limit, else 0."""
    return minimum(maximum(limit - m, 0), 1)


def _depth(k: Int, target: Target) -> int:
    """Vectors of four along k that a step of the kernels' loop takes."""
    return 2 if target.texel and k % 8 == 0 else 1


_WORTH_COMPILING = 1 << 22
"""Multiplications from which on the fastest tile pays: the driver takes 60 ms longer to compile it, a run a quarter less."""
_FASTEST = Tile(4, 16, 16)
_BLOCK = 4 * _FASTEST.rows  # rows of a quad
_LINE = 16  # invocations of a work group for a row: 576 columns of 64 are three work groups, of which two cores do two at a time


def _tile(m: Int, n: Int, multiplications: Int, least_rows: int, target: Target) -> Tile:
    """What is taken without measuring for m rows of n columns. least_rows: from which on there are several in a tile. Devices
    without texel buffers may be GPUs, whose subgroups and registers a large tile does not suit.
    """
    is_long = m.value is None or m.value >= _BLOCK
    rows = 4 if (m.bounds[0] or 1) >= (4 if m.value is None else least_rows) else 1
    count = estimate(n)
    if target.texel and m.value is not None and m.value < 4:
        return Tile(rows, 8 if count > 4 else 4, _LINE)
    worth = target.texel and is_long and estimate(multiplications) >= _WORTH_COMPILING
    if worth and _fits(count, _FASTEST.columns):
        return replace(_FASTEST, rows=rows)
    return Tile(rows, 8 if count > 4 else 4)


def _fits(n: int, columns: int) -> bool:
    """Whether tiles of so many columns compute less than a fifth of them twice."""
    return -(-n // columns) * columns * 5 < n * 6


def matmul_tile(batch: Int, m: Int, n: Int, k: Int, target: Target) -> Tile:
    return _tile(m, n, batch * m * n * k, _BLOCK, target)


_SAME_LINES = 512
"""Rows of a multiple of so many elements (2 KiB) start in two of the 64 sets of 8 lines that a core's first cache often has."""


def _rows_first(m: Int, k: Int | None) -> bool:
    """Whether neighbouring invocations take neighbouring rows, rather than columns: where rows are few, so that weights stay in the
    cache, and do not drive each other out of it. k: elements from one row to the next.
    """
    return estimate(m) < 128 and (k is None or k % _SAME_LINES != 0)


def _stores(vectors: bool, n: Int, columns: int) -> int:
    """How tiles of so many columns store rows of n, as `storeRow` of cpu_common.slang counts it."""
    if not vectors:
        return 0
    return 1 if (n.bounds[0] or 0) > columns - 4 else 2


def _matmul(v: MatmulView, task: Task, ctx: Context) -> CpuMatmul | None:
    if v.m == 1 and isinstance(v.rhs.node, Input | State):
        return None  # to pack what changes from run to run costs three times as much as to read it once
    x = as_words(v.lhs, (v.batch, v.m, v.k), ctx)
    v = replace(v, lhs=x)
    if x.strides[2] != 1 or not all(is_aligned(i) for i in (v.k, x.offset, *x.strides[:2])):
        if estimate(v.n) < _COLUMNS:
            return None
        x = _rows(v, ctx)
    tile = matmul_tile(v.batch, v.m, v.n, v.k, ctx.target)
    coded = columns_of_codes(v, task, ctx)
    if coded is not None:
        return CpuMatmul(v.batch, v.m, v.n, v.k, x, coded.node, True, tile)
    shared = v.rhs.strides[0] == 0 or v.batch == 1
    return CpuMatmul(v.batch, v.m, v.n, v.k, x, pack_matrix(v.rhs, v, ctx), shared, tile)


_FEW = 8
"""Rows up to which an argument or a state is read where it lies; for more it is packed in every run."""


@dataclass(frozen=True)
class CpuLying(KernelTemplate):
    """A few rows x against w, which is not packed. turned: whether consecutive elements of w are of a column, else of a row."""

    batch: Int
    m: int
    n: Int
    k: Int
    x: Operand  # strides (batch, row, k)
    w: Operand  # strides (batch, k, column)
    turned: bool

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, self.w.node]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = Wrapper(task, ctx, "cpu_matmul", sizes_as_params)
        vec = w.epilogue(self.batch * self.m, self.n, batched(task, flat_rows=True))
        source(w, "X", self.x.node, vector=True)
        source(w, "W", self.w.node, vector=True)
        line = self.w.strides[2 if self.turned else 1]
        w.params(
            N=self.n, K4=self.k // 4, B=self.batch, xOff4=self.x.offset // 4, xRow4=self.x.strides[1] // 4,
            xBatch4=self.x.strides[0] // 4, wOff4=self.w.offset // 4, wLine4=line // 4, wBatch4=self.w.strides[0] // 4,
        )  # fmt: skip
        groups, group = linear_groups(self.batch * ceildiv(self.n, 4), _SIZE)
        call = f"lying<X, W, E, {self.m}, {int(self.turned)}, {int(vec)}>(P.t, uint({group}) * {_SIZE} + li, gid.x);"
        written = w.finish(call, groups, (_SIZE, 1, 1), "lying", "LyingParams")
        written.flops = self.batch * self.m * self.n * self.k * 2
        return written


def lying(v: MatmulView, task: Task, ctx: Context) -> CpuLying | None:
    """A few rows against an argument or a part of a state: to pack it in every run takes longer than to read it."""
    m, w = v.m.value, v.rhs
    if m is None or not 0 < m <= _FEW or not (isinstance(w.node, Input) or in_state(w.node)):
        return None
    if not ctx.is_whole(w.node) or not w.node.dtype.is_float:
        return None
    turned = w.strides[1] == 1
    if not turned and w.strides[2] != 1:
        return None
    line = w.strides[2 if turned else 1]
    if not all(is_aligned(i) for i in (v.k, w.offset, w.strides[0], line)):
        return None
    x = as_words(v.lhs, (v.batch, v.m, v.k), ctx)
    if x.strides[2] != 1 or not all(is_aligned(i) for i in (x.offset, *x.strides[:2])):
        x = _rows(replace(v, lhs=x), ctx)
    made = CpuLying(v.batch, m, v.n, v.k, x, w, turned)
    return made if are_countable([v.batch], ctx.target) else None


def _rows(v: MatmulView, ctx: Context) -> Operand:
    """A copy of lhs[b, m, k] with consecutive rows, zero-padded in k to multiples of 4."""
    x, k4 = v.lhs, ceildiv(v.k, 4) * 4
    shared = x.strides[0] == 0 or v.batch == 1
    element = flat(x.node, ctx)

    def body(b: Int, m: Int, k: Int) -> tuple[list[Int], Expr]:
        return [v.k - 1 - k], element(x.offset + b * x.strides[0] + m * x.strides[1] + k * x.strides[2])

    key = ("rows", x.node.id, x.offset, x.strides, v.batch, v.m, v.k)
    if key not in ctx.copies:
        ctx.copies[key] = ctx.packed("rows", x.node, [as_int(1) if shared else v.batch, v.m, k4], body)
    return Operand(ctx.copies[key], as_int(0), (as_int(0) if shared else v.m * k4, k4, as_int(1)))


def pack_matrix(rhs: Operand, v: MatmulView, ctx: Context) -> Node:
    """rhs[b, k, n] as [b, n / 4, k, n % 4], zero-padded in k and n to multiples of 4."""
    shared = rhs.strides[0] == 0 or v.batch == 1
    element = flat(rhs.node, ctx)
    batch = as_int(1) if shared else v.batch

    def body(b: Int, n4: Int, k: Int, lane: Int) -> tuple[list[Int], Expr]:
        n = n4 * 4 + lane
        at = rhs.offset + b * rhs.strides[0] + k * rhs.strides[1] + n * rhs.strides[2]
        return [v.k - 1 - k, v.n - 1 - n], element(at)

    return ctx.packed("matrix", rhs.node, [batch, ceildiv(v.n, 4), ceildiv(v.k, 4) * 4, 4], body)


# -- convolutions


@dataclass(frozen=True)
class CpuConvolution(KernelTemplate):
    """Direct or depthwise; x has channel stride 1, and all other strides are multiples of 4 elements. columns: of a group of a
    direct one, with padding.
    """

    v: ConvolutionView
    x: Operand
    w: Node
    depthwise: bool
    tile: Tile
    columns: Int

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, self.w]

    def is_countable(self, target: Target) -> bool:
        v, tile = self.v, self.tile
        if self.depthwise:
            return are_countable([v.n * ceildiv(v.out_h, tile.rows) * ceildiv(v.out_w, tile.columns)], target)
        return are_countable([v.n * v.out_h, ceildiv(v.rows, 4 * tile.rows)], target)

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        v, first = self.v, self.tile
        if self.depthwise:
            menu: Iterator[Tile] = chain(
                [first],
                (t for t in _strips(v, ctx.target) if t != first),
                _other_sizes(first),
            )
        else:
            least = -(-(v.out_channels.bounds[0] or 1) // 4)
            menu = _other_tiles(
                first, v.rows.bounds[0] or 1, lambda c: self.columns % (4 * c) == 0 if v.groups > 1 else c <= least
            )
        made = (replace(self, tile=tile) for tile in menu)
        yield from (t for t in made if t.is_countable(ctx.target))

    @property
    def variant(self) -> str:
        return str(self.tile)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        v = self.v
        w = Wrapper(task, ctx, "cpu_conv", sizes_as_params)
        groups = 1 if self.depthwise else v.groups
        columns = v.out_channels // groups
        vec = w.epilogue(v.rows, columns, batched(task, flat_rows=True, groups=groups))
        source(w, "X", self.x.node, vector=True)
        source(w, "W", self.w, vector=True)
        per_group, whole = v.channels // v.groups, int(not v.weight.dtype.is_float)
        column4 = ceildiv(self.columns, 4)
        tw, size = self.tile.columns, self.tile.invocations
        strips = v.n * ceildiv(v.out_h, self.tile.rows) * ceildiv(v.out_w, tw) * ceildiv(v.out_channels, 4)
        w.params(
            M=v.rows, N=columns, C4=ceildiv(per_group, 4), OH=v.out_h, OW=v.out_w, H=v.h, W=v.w, KH=v.kernel[0],
            KW=v.kernel[1], SH=v.stride[0], SW=v.stride[1], PH=v.padding[0], PW=v.padding[1], DH=v.dilation[0],
            DW=v.dilation[1], xOff=self.x.offset // 4, xN=self.x.strides[0] // 4, xH=self.x.strides[2] // 4,
            xW=self.x.strides[3] // 4, mFast=int(_rows_first(v.rows, None) != self.tile.turned),
            groupN4=column4, count=strips if self.depthwise else column4 * groups,
        )  # fmt: skip
        if self.depthwise:
            work_groups, group = linear_groups(strips, size)
            share, width = int(v.dilation[1] == 1), v.kernel[1]
            lane, depths = f"uint({group}) * {size} + li", depths_source(w, v.depths)
            numbers = f"{tw}, {width}, {v.stride[1]}, {share}, {int(vec)}, {whole}"
            call = f"convDepthwise<X, W, E, {depths}, {numbers}>(P.t, {lane}, gid.x);"
            if width > _WIDEST:
                share = int(v.stride[1] == 1 and v.dilation[1] == 1)
                call = f"convDepthwiseWide<X, W, E, {depths}, {tw}, {share}, {int(vec)}, {whole}>(P.t, {lane}, gid.x);"
            if self.tile.rows > 1:
                taps = f"{v.kernel[0]}, {v.kernel[1]}, {v.stride[1]}"
                call = f"convDepthwiseTile<X, W, E, {self.tile.rows}, {tw}, {taps}, {int(vec)}, {whole}>(P.t, {lane}, gid.x);"
            written = w.finish(call, work_groups, (size, 1, 1), "depthwise", "ConvParams")
            written.flops = v.rows * v.out_channels * (2 * v.taps)
            return written
        tm, tn, quads = self.tile.rows, self.tile.columns, int(ctx.target.texel)
        q = (per_group.value or 4) if (per_group.value or 4) < 4 else 4
        blocks = ceildiv(v.rows, 4 * tm) * ceildiv(column4 * groups, tn // 4)
        work_groups, group = linear_groups(blocks * 4, size)
        depth = _depth(ceildiv(per_group, 4) * 4 if groups > 1 else per_group, ctx.target)
        stores = 2 if vec and self.columns != columns else _stores(vec, columns, tn)
        call = (
            f"convDirect<X, W, E, {tm}, {tn}, {depth}, {q}, {stores}, {whole}, {quads}>"
            f"(P.t, uint({group}) * {size} + li, gid.x);"
        )
        written = w.finish(call, work_groups, (size, 1, 1), "convolution", "ConvParams")
        written.needs = _quads(ctx.target)
        written.flops = v.rows * v.out_channels * per_group * (2 * v.kernel[0] * v.kernel[1])
        return written


_MOST_TAPS = 25
_WORTH_ROWS = 1 << 20
"""Multiplications from which on two rows at once pay, which the driver takes longer to compile: all taps are written out."""


def _strips(v: ConvolutionView, target: Target) -> list[Tile]:
    """Neighbouring outputs of an invocation of the depthwise kernel, which only measuring can choose."""
    taps = v.kernel[0] * v.kernel[1]
    is_plain = v.depths is None and v.dilation == (1, 1) and v.stride[0] == v.stride[1] and taps <= _MOST_TAPS
    menu = [(1, 4), (1, 7), (1, 8), (1, 2), (1, 1)]
    if target.texel and is_plain:
        menu += [(2, 4), (2, 7)]
    height, width = v.out_h.bounds[0] or 1, v.out_w.bounds[0] or 1
    return [Tile(rows, columns) for rows, columns in menu if rows <= height and columns <= width]


def _strip(v: ConvolutionView, target: Target) -> Tile:
    """What is taken without measuring."""
    possible = _strips(v, target)
    two_rows = Tile(2, 7 if v.out_w in (7, 14) else 4)
    if two_rows in possible and estimate(v.rows * v.out_channels * v.taps) >= _WORTH_ROWS:
        return two_rows
    widths = (8, 4, 2, 1) if v.kernel[1] > _WIDEST else (4, 2, 1)
    return next(t for t in (Tile(1, width) for width in widths) if t in possible)


def _direct_tile(v: ConvolutionView, target: Target) -> Tile:
    per_group, terms = v.out_channels // v.groups, v.channels // v.groups * (v.kernel[0] * v.kernel[1])
    tile = _tile(v.rows, per_group, v.rows * v.out_channels * terms, 4, target)
    if v.groups == 1:
        return tile
    count = estimate(per_group)
    return replace(tile, columns=next(c for c in (tile.columns, 8, 4) if c == 4 or _fits(count, c)))


def _readable(v: ConvolutionView, ctx: Context) -> ConvolutionView | None:
    """The convolution, with as many channels as results if it is depthwise; None if these kernels cannot read its operands. An
    image of one channel alone is faster with three channels of zeros.
    """
    if v.x.node.dtype.compute is not v.weight.dtype.compute:
        return None
    if v.weight.id not in ctx.layouts and v.weight.id not in ctx.views:
        return None
    c = v.out_channels.value  # the number of groups, which must be known
    if c is None or v.channels != v.groups or v.groups in (1, c):
        return v
    return repeated(v, c, ctx)


def depthwise(given: ConvolutionView, task: Task, ctx: Context) -> CpuConvolution | None:
    v = _readable(given, ctx)
    if v is None or not v.is_depthwise:
        return None
    x, w = channels_last(v, ctx), pack_depthwise(v, ctx)
    found = CpuConvolution(v, x, w, True, _strip(v, ctx.target), as_int(1))
    return found if found.is_countable(ctx.target) else None


def _windows(given: ConvolutionView, ctx: Context) -> tuple[ConvolutionView, Operand] | None:
    """The convolution with its image channels last; None if these kernels cannot read it, or one for depthwise ones does better."""
    v = _readable(given, ctx)
    if v is None or v.is_depthwise:
        return None
    return v, channels_last(v, ctx, groups=v.groups)


def pointwise(given: ConvolutionView, task: Task, ctx: Context) -> CpuMatmul | None:
    """A convolution that is a matrix product over all places."""
    found = _windows(given, ctx)
    if found is None:
        return None
    v, x = found
    if not (v.is_pointwise and is_aligned(v.channels) and is_nested(x, v) and (v.rows.bounds[0] or 0) >= 4):
        return None
    operand = Operand(x.node, x.offset, (as_int(0), x.strides[3], as_int(1)))
    made = CpuMatmul(
        as_int(1),
        v.rows,
        v.out_channels,
        v.channels,
        operand,
        _pack_filter(v, v.out_channels, ctx),
        True,
        matmul_tile(as_int(1), v.rows, v.out_channels, v.channels, ctx.target),
    )
    return made if made.is_countable(ctx.target) else None


def winograd(given: ConvolutionView, task: Task, ctx: Context) -> _Winograd | None:
    found = _windows(given, ctx)
    if found is None or not _winograd_pays(found[0]) or _has_infinity(found[0].weight):
        return None
    return _winograd(task, *found, WINOGRAD_TILES[0], ctx)


def direct(given: ConvolutionView, task: Task, ctx: Context) -> CpuConvolution | None:
    found = _windows(given, ctx)
    if found is None:
        return None
    v, x = found
    tile, columns = _direct_tile(v, ctx.target), v.out_channels // v.groups
    if v.groups > 1:
        columns = ceildiv(columns, tile.columns) * tile.columns
    made = CpuConvolution(v, x, _pack_filter(v, columns, ctx), False, tile, columns)
    return made if made.is_countable(ctx.target) else None


def small_groups(given: ConvolutionView, task: Task, ctx: Context) -> CpuConvolution | None:
    """On GPUs, groups with so few results that the tiles of work groups would be mostly empty: those of invocations are not, unless
    there are hardly any weights.
    """
    if given.groups == 1:
        return None
    channels, outs = given.channels // given.groups, given.out_channels // given.groups
    suits = estimate(outs) < FEW_CHANNELS and estimate(channels * outs) >= _FEW_WEIGHTS
    return direct(given, task, ctx) if suits else None


def _pack_filter(v: ConvolutionView, columns: Int, ctx: Context) -> Node:
    """[O, C, kh, kw] as [O / 4, kh, kw, C, O % 4], zero-padded in C to multiples of 4, and in O to multiples of 4 of a group's
    `columns`.
    """
    per_in, per_out = v.channels // v.groups, v.out_channels // v.groups
    kh, kw = v.kernel
    out4 = ceildiv(columns, 4)

    def body(o4: Int, h: Int, w: Int, c: Int, lane: Int) -> tuple[list[Int], Expr]:
        group, n = (o4 // out4, o4 % out4 * 4 + lane) if v.groups > 1 else (as_int(0), o4 * 4 + lane)
        return [per_out - 1 - n, per_in - 1 - c], ctx.read(v.weight, filter_index(v, group * per_out + n, c, h, w))

    return ctx.packed("filter", v.weight, [out4 * v.groups, kh, kw, ceildiv(per_in, 4) * 4, 4], body)


# -- Winograd


def _winograd_pays(v: ConvolutionView) -> bool:
    plain = v.kernel == (3, 3) and v.stride == (1, 1) and v.dilation == (1, 1) and v.groups == 1
    return (
        plain
        and v.weight.dtype.is_float
        and not _is_of_integers(v.weight)
        and (isinstance(v.weight, Constant) or estimate(v.rows) >= _WORTH_TRANSFORMING)
        and is_aligned(v.channels)
        and is_aligned(v.out_channels)
        and estimate(v.channels) >= 32
        and estimate(v.out_channels) >= 32
        and all((size.bounds[1] or 0) * DType.float32.size <= STORAGE for size in _winograd_sizes(v, WINOGRAD_TILES[0]))
    )


def _is_of_integers(weight: Node) -> bool:
    """Whether weights are integers as floats: sums of their products are exact, and those of Winograd's algorithm would not be."""
    body = weight.body if isinstance(weight, Map) else None
    return isinstance(body, Op) and body.op == "cast" and body.args[0].dtype is DType.int32


def _has_infinity(weight: Node) -> bool:
    """Whether weights contain infinity: Winograd's transform would then give NaN where the direct product does not."""
    return isinstance(weight, Constant) and not bool(np.isfinite(weight.numbers).all())


def _winograd_sizes(v: ConvolutionView, t: int) -> tuple[Int, Int, Int]:
    """Elements of the transformed weights, inputs and products: for tiles of 4, 4 and 2.25 times the originals."""
    points, tiles = (t + 2) * (t + 2), v.n * ceildiv(v.out_h, t) * ceildiv(v.out_w, t)
    return v.out_channels * v.channels * points, tiles * v.channels * points, tiles * v.out_channels * points


WINOGRAD_TILES = (4, 2)
"""Outputs of a tile in each direction; what is taken without measuring first."""


@dataclass(frozen=True)
class _Winograd(KernelTemplate):
    """One of the three steps around the matrix product; `step` names the kernel."""

    step: str
    v: ConvolutionView
    tile: int
    source: Operand
    before: tuple[Task, ...] = ()
    image: Operand | None = None  # of the last step: what the first one reads

    @property
    def steps(self) -> tuple[Task, ...]:
        return self.before

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        yield self
        assert self.image is not None
        for t in WINOGRAD_TILES[1:]:
            if all((size.bounds[1] or 0) * DType.float32.size <= STORAGE for size in _winograd_sizes(self.v, t)):
                yield _winograd(task, self.v, self.image, t, ctx)

    @property
    def variant(self) -> str:
        return f"{self.tile}x{self.tile}"

    @property
    def operands(self) -> list[Node]:
        return [self.source.node]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        v, t = self.v, self.tile
        w = Wrapper(task, ctx, "cpu_winograd", sizes_as_params)
        th, tw = ceildiv(v.out_h, t), ceildiv(v.out_w, t)
        tiles = v.n * th * tw
        if self.step == "winogradWeight":
            rows = ((t + 2) * (t + 2)) * ceildiv(v.out_channels, 4) * v.channels
            w.epilogue(rows, as_int(4), batched(task), vector=False)
            source(w, "W", self.source.node, vector=False)
            w.params(N=v.out_channels, C=v.channels)
            count = v.out_channels * v.channels * (t + 2)
            struct, generics = "WinogradWeightParams", "W, E"
        else:
            first = self.step == "winogradInput"
            if first:
                w.epilogue(tiles * ((t + 2) * (t + 2)), v.channels, batched(task))
            else:
                w.epilogue(v.rows, v.out_channels, batched(task, flat_rows=True))
            source(w, "X", self.source.node, vector=True)
            x = self.source
            n4 = (v.channels if first else v.out_channels) // 4
            offsets = (x.offset, x.strides[0], x.strides[2], x.strides[3]) if first else (as_int(0),) * 4
            w.params(
                tiles=tiles, tilesH=th, tilesW=tw, N4=n4, OH=v.out_h, OW=v.out_w, H=v.h, W=v.w, PH=v.padding[0],
                PW=v.padding[1], xOff=offsets[0] // 4, xN=offsets[1] // 4, xH=offsets[2] // 4, xW=offsets[3] // 4,
                N=v.out_channels,
            )  # fmt: skip
            count = tiles * n4
            struct, generics = "WinogradParams", "X, E"
        groups, group = linear_groups(count, _SIZE)
        call = f"{self.step}<{generics}, {t}>(P.t, uint({group}) * {_SIZE} + li, gid.x);"
        return w.finish(call, groups, (_SIZE, 1, 1), self.step, struct)


def _winograd(task: Task, v: ConvolutionView, x: Operand, t: int, ctx: Context) -> _Winograd:
    """The output transform, with tasks for the other transforms and the matrix product. t: outputs of a tile in each direction."""
    points = as_int((t + 2) * (t + 2))
    tiles = v.n * ceildiv(v.out_h, t) * ceildiv(v.out_w, t)
    c, o = v.channels, v.out_channels
    name = task.out.name

    def node(shape: list[Int], what: str) -> Node:
        made = Node(tuple(shape), DType.float32, f"{name}_{what}", "winograd")
        ctx.dense(made)
        return made

    weight = node([points * ceildiv(o, 4) * c, as_int(4)], "winograd_weight")
    inputs = node([points * tiles, c], "winograd_input")
    products = node([points * tiles, o], "winograd_product")
    origins = task.origins[:1]
    steps = []
    for out, template, label in (
        (
            weight,
            _Winograd("winogradWeight", v, t, Operand(_row_major(v, ctx), as_int(0), ())),
            "winograd weights",
        ),
        (inputs, _Winograd("winogradInput", v, t, x), "winograd input"),
        (
            products,
            CpuMatmul(
                points,
                tiles,
                o,
                c,
                Operand(inputs, as_int(0), (tiles * c, c, as_int(1))),
                weight,
                False,
                matmul_tile(points, tiles, o, c, ctx.target),
            ),
            "winograd product",
        ),
    ):
        step = simple_task(out, [f"{origins[0]} ({label})"], label)
        step.template = template
        steps.append(step)
    return _Winograd("winogradOutput", v, t, Operand(products, as_int(0), ()), tuple(steps), x)


def _row_major(v: ConvolutionView, ctx: Context) -> Node:
    """The filters as [out, in, kh, kw]."""
    filters = v.weight
    if filters.rank == 4 and ctx.layouts.get(filters.id) == Layout.of(filters.shape, range(filters.rank)):
        return filters
    shape: list[IntLike] = [v.out_channels, v.channels, *v.kernel]
    return ctx.packed("filter", filters, shape, lambda *at: ([], ctx.read(filters, filter_index(v, *at))))
