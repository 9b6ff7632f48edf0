"""Contractions of codes on GPUs that multiply four numbers of 8 bits at once (kernels/gpu_dot.slang): activations are read as the
words in which they lie, and weights are packed in fours along the sum, or lie so in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lapilli.codegen import tiles
from lapilli.codegen.gpu import convolution as tiles_of_convolution
from lapilli.codegen.gpu import matmul_rows, window_weights
from lapilli.codegen.gpu_tiles import Rows, likely_rows
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.tiles import DotTile
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
from lapilli.target import DOT_PRODUCTS

_FOUR = 4
_MIDDLE = 128
"""What a byte stands for beyond the signed number that it is with its highest bit inverted."""

Element = Callable[[Int, Int, Int], tuple[list[Int], Expr]]
"""Of the right operand, for batch, place in the sum and column: guards, and the element where they hold."""


@dataclass(frozen=True)
class DotTiles(KernelTemplate):
    """out[b, m, n], with rows of codes in fours, and columns in words [batch, n, k / 4]."""

    rows: Rows
    w: Node
    batch: Int
    m: Int
    n: Int
    k4: Int
    batch_w: Int  # words between batches of w, 0 for weights
    flat_rows: bool = False
    groups: int = 1
    tile: DotTile | None = None  # None: not chosen yet

    @property
    def operands(self) -> list[Node]:
        return [self.rows.node, self.w]

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        for tile in tiles.dot_tiles(estimate(self.batch), likely_rows(self.m), estimate(self.n), ctx.target):
            yield replace(self, tile=tile)

    @property
    def variant(self) -> str:
        return str(self.tile)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        written = with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))
        written.flops = self.batch * self.m * self.n * self.k4 * (2 * _FOUR)
        written.needs = DOT_PRODUCTS
        return written

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        t = self.tile
        assert t is not None
        w = Wrapper(task, ctx, "gpu_dot", sizes_as_params=sizes_as_params)
        w.epilogue(self.m, self.n, batched(task, self.flat_rows, self.groups))
        for name, node in (("X", self.rows.node), ("W", self.w)):
            kind = "int" if node.dtype is DType.int32 else "uint"
            w.structs.append(
                f"struct {name} : IWords\n{{\n"
                f"    static uint word(uint i) {{ return uint({w.kernel.bind(node, kind)}[i]); }}\n}};\n"
            )
        shift = self.rows.node.least + _MIDDLE
        w.params(M=self.m, N=self.n, K4=self.k4, batchB=self.batch_w, shift=shift)
        w.params("a", **self.rows.words)
        call = (
            f"dot_tile<{self.rows.places}, X, W, E, {t.bm}, {t.bn}, {t.bk}, {t.tm}, {t.tn}, {int(shift != 0)}>"
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
    """A product of codes."""
    reduction = task.reduction
    assert reduction is not None
    rows = matmul_rows(v.lhs, v.m, v.k, False) if v.lhs.node.dtype is DType.code else None
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
    """A convolution of codes as an implicit product whose rows are windows."""
    found = tiles_of_convolution(v, ctx, units=False) if v.x.node.dtype is DType.code else None
    if found is None or not _in_words(found.rows):
        return None
    channels = found.k // (v.kernel[0] * v.kernel[1])
    element = window_weights(replace(v, channels=channels * v.groups), "channels last", v.channels // v.groups, ctx)
    w = _packed(v.weight, as_int(v.groups), found.n, found.k, element, ctx)
    if w is None:
        return None
    k4 = found.k // _FOUR
    batch = found.n * k4 if v.groups > 1 else as_int(0)
    return DotTiles(found.rows, w, found.batch, found.m, found.n, k4, batch, found.flat_rows, found.groups)


def _in_words(rows: Rows) -> bool:
    """Whether fours of a row are words."""
    return rows.width == _FOUR and bool(rows.places) and rows.node.dtype is DType.code


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
