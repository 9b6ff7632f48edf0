"""Contractions of codes on GPUs that multiply numbers of 8 bits: four at once (kernels/gpu_dot.slang), or on matrix units
(kernels/gpu_matmul_coopmat.slang). Activations are read as the words in which they lie, and weights are packed in fours along the
sum, or lie so in the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lapilli.codegen import tiles
from lapilli.codegen.gpu import BYTES, matmul_rows, window_weights, windows
from lapilli.codegen.gpu_tiles import Rows, finish_on_units
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.open_rows import RowTemplate
from lapilli.codegen.template import Context
from lapilli.codegen.tiles import DotTile, MatrixTile
from lapilli.codegen.wrapper import Wrapper, batched, with_sizes
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Op, binary, cast_to, const, rewrite, select
from lapilli.ir.integer import Int, as_int, ceildiv, of
from lapilli.ir.node import Constant, Matmul, Node
from lapilli.ir.ranges import is_signed_byte
from lapilli.schedule.contraction import ConvolutionView, MatmulView
from lapilli.schedule.layout import Layout, estimate
from lapilli.schedule.task import Task
from lapilli.target import BYTE_UNITS, DOT_PRODUCTS

_FOUR = 4
_MIDDLE = 128
"""What a byte stands for beyond the signed number that it is with its highest bit inverted."""

Element = Callable[[Int, Int, Int], tuple[list[Int], Expr]]
"""Of the right operand, for batch, place in the sum and column: guards, and the element where they hold."""


@dataclass(frozen=True)
class DotTiles(RowTemplate):
    """out[b, m, n], with rows of codes, and columns in words [batch, n, k / 4]. On matrix units if rows are read in so many."""

    rows: Rows
    w: Node
    batch: Int
    m: Int
    n: Int
    k4: Int
    batch_w: Int  # words between batches of w, 0 for weights
    flat_rows: bool = False
    groups: int = 1
    tile: DotTile | MatrixTile | None = None  # None: not chosen yet

    @property
    def own_operands(self) -> list[Node]:
        return [self.rows.node, self.w]

    @property
    def matrix(self) -> bool:
        return self.rows.width == BYTES

    @property
    def _shift(self) -> int:
        """What an element of the left operand stands for beyond its byte with the highest bit inverted."""
        return self.rows.node.least + _MIDDLE

    def row_count(self, task: Task) -> Int:
        return self.m

    def with_tile(self, tile: DotTile | MatrixTile) -> DotTiles:
        return replace(self, tile=tile)

    def for_rows(self, count: int, task: Task, ctx: Context) -> Sequence[DotTile | MatrixTile]:
        batch, m, n = estimate(self.batch), count, estimate(self.n)
        if self.matrix:
            windows = self.rows.struct == "ConvParams"
            return tiles.byte_tiles(batch, m, n, estimate(self.k4) * _FOUR, ctx.target, windows)
        return tiles.dot_tiles(batch, m, n, ctx.target)

    @property
    def variant(self) -> str:
        return str(self.tile)

    def write_tile(self, task: Task, ctx: Context) -> KernelSource:
        if self.matrix:
            written = self._on_units(task, ctx)
        else:
            written = with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))
        written.flops = self.batch * self.m * self.n * self.k4 * (2 * _FOUR)
        written.needs = BYTE_UNITS if self.matrix else DOT_PRODUCTS
        return written

    def _on_units(self, task: Task, ctx: Context) -> KernelSource:
        t = self.tile
        assert isinstance(t, MatrixTile)
        w = Wrapper(task, ctx, "gpu_matmul_coopmat", sizes_as_params=False)
        w.epilogue(self.m, self.n, batched(task, self.flat_rows, self.groups), ahead=True)
        x, weights = (w.kernel.bind(node, "uint4") for node in (self.rows.node, self.w))
        w.structs += [
            f"struct X : ISource8\n{{\n    static uint4 load8(uint i) {{ return {x}[i]; }}\n}};\n",
            f"struct W : ILine8\n{{\n    static uint4 fetch8(uint i, uint line, uint step) {{ return {weights}[i]; }}\n"
            "    static uint4 line8(uint4 fetched, uint line, uint step) { return fetched; }\n};\n",
        ]
        k16 = self.k4 // _FOUR
        written = finish_on_units(
            w, t, self.rows, f"Bytes<{int(self._shift != 0)}>", "bytes", 1, batch=self.batch, M=self.m, N=self.n,
            K=k16 * (BYTES // 2), K8=k16, ldb8=k16, batchB8=self.batch_w // _FOUR, offsetB8=0, shift=self._shift,
        )  # fmt: skip
        written.shared = tiles.byte_memory(t, self._shift != 0)
        return written

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        t = self.tile
        assert isinstance(t, DotTile)
        w = Wrapper(task, ctx, "gpu_dot", sizes_as_params=sizes_as_params)
        w.epilogue(self.m, self.n, batched(task, self.flat_rows, self.groups))
        for name, node in (("X", self.rows.node), ("W", self.w)):
            kind = "int" if node.dtype is DType.int32 else "uint"
            w.structs.append(
                f"struct {name} : IWords\n{{\n"
                f"    static uint word(uint i) {{ return uint({w.kernel.bind(node, kind)}[i]); }}\n}};\n"
            )
        w.params(M=self.m, N=self.n, K4=self.k4, batchB=self.batch_w, shift=self._shift)
        w.params("a", **self.rows.words)
        call = (
            f"dot_tile<{self.rows.places}, X, W, E, {t.bm}, {t.bn}, {t.bk}, {t.tm}, {t.tn}, {int(self._shift != 0)}>"
            "(P.a, P.t, gid, li);"
        )
        kind = "matmul" if self.rows.struct == "MatmulParams4" else "convolution"
        groups = (ceildiv(self.n, t.bn), ceildiv(self.m, t.bm), self.batch)
        written = w.finish(
            call, groups, (t.invocations, 1, 1), f"{kind}_dot", f"DotParams t; {self.rows.struct} a;",
            ("gpu_matmul", *self.rows.modules), plain=True,
        )  # fmt: skip
        written.shared = t.shared
        return written


def product(v: MatmulView, task: Task, ctx: Context) -> DotTiles | None:
    """A product of codes by dot products."""
    return _product(v, 0, task, ctx)


def product_on_units(v: MatmulView, task: Task, ctx: Context) -> DotTiles | None:
    """A product of codes on matrix units."""
    return _product(v, BYTES, task, ctx)


def _product(v: MatmulView, units: int, task: Task, ctx: Context) -> DotTiles | None:
    reduction = task.reduction
    assert reduction is not None
    rows = matmul_rows(v.lhs, v.m, v.k, units) if v.lhs.node.dtype is DType.code else None
    if rows is None or not _in_words(rows):
        return None
    note = reduction.contraction
    assert isinstance(note, Matmul)
    element = ctx.read(note.rhs, note.rhs_index)
    shared = not any(b in i.atoms() for i in note.rhs_index for b in note.batch)
    lying = _lying(element, note, ctx)
    if lying is not None:
        return DotTiles(rows, lying, v.batch, v.m, v.n, v.k // _FOUR, as_int(0))
    if len(note.batch) > 1 and not shared:
        return None

    def at(b: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        return [], rewrite(element, {note.column: n, note.inner: k, **{a: b for a in note.batch}})

    w = _packed(note.rhs, as_int(1) if shared else v.batch, v.n, v.k, at, ctx)
    if w is None:
        return None
    batch = as_int(0) if shared else v.n * (v.k // _FOUR)
    return DotTiles(rows, w, v.batch, v.m, v.n, v.k // _FOUR, batch)


def convolution(v: ConvolutionView, ctx: Context) -> DotTiles | None:
    """A convolution of codes by dot products, as an implicit product whose rows are windows."""
    return _convolution(v, 0, ctx)


def convolution_on_units(v: ConvolutionView, ctx: Context) -> DotTiles | None:
    """The same on matrix units."""
    return _convolution(v, BYTES, ctx)


def _convolution(v: ConvolutionView, units: int, ctx: Context) -> DotTiles | None:
    found = windows(v, ctx, units) if v.x.node.dtype is DType.code else None
    if found is None or not _in_words(found.rows):
        return None
    v = found.v  # with channels of padding
    n, k = v.out_channels // v.groups, v.channels // v.groups * (v.kernel[0] * v.kernel[1])
    w = _packed(v.weight, as_int(v.groups), n, k, window_weights(found, ctx), ctx)
    if w is None:
        return None
    k4 = k // _FOUR
    batch = n * k4 if v.groups > 1 else as_int(0)
    return DotTiles(found.rows, w, found.batch, found.m, n, k4, batch, found.flat_rows, v.groups)


def _in_words(rows: Rows) -> bool:
    """Whether fours of a row are words."""
    wide = rows.width == BYTES or (rows.width == _FOUR and bool(rows.places))
    return wide and rows.node.dtype is DType.code


def _uncast(e: Expr) -> Expr:
    return e.args[0] if isinstance(e, Op) and e.op == "cast" else e


def _lying(element: Expr, note: Matmul, ctx: Context) -> Node | None:
    """The constant [N, K] whose bytes are the right operand's words, if there is one."""
    found = _uncast(element)
    if not isinstance(found, Load) or found.index != (of(note.column), of(note.inner)):
        return None
    node = found.node
    if not isinstance(node, Constant) or node.dtype is not DType.int8 or node.shape[1] != note.inner.extent:
        return None
    return node if ctx.layouts.get(node.id) == Layout.of(node.shape, range(2)) else None


def _packed(like: Node, batch: Int, n: Int, k: Int, element: Element, ctx: Context) -> Node | None:
    """The right operand as words [batch, n, k / 4] of signed bytes, the first in the lowest bits; None if it has others."""

    def code(b: Int, at: Int, column: Int) -> Expr:
        guards, value = element(b, at, column)
        return cast_to(select(guards, value, const(0, value.dtype)), DType.int32)

    def body(b: Int, column: Int, word: Int) -> tuple[list[Int], Expr]:
        packed: Expr = const(0, DType.int32)
        for i in range(_FOUR):
            part = binary("shl", binary("bitand", code(b, word * _FOUR + i, column), 255), 8 * i)
            packed = part if i == 0 else binary("bitor", packed, part)
        return [], packed

    _, (b, column, at) = fresh_axes((batch, n, k))
    if not is_signed_byte(element(b, at, column)[1]):
        return None
    return ctx.packed("words", like, [batch, n, k // _FOUR], body, DType.int32)
