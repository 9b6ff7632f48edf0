"""The tile kernels of contractions: work-group tiles in shared memory, on matrix units or without (kernels/gpu_matmul*.slang,
kernels/gpu_conv*.slang)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lapilli.codegen import tiles
from lapilli.codegen.coded import (
    Coded,
    become_numbers_straight,
    codes_source,
    in_memory,
    matrix_source,
    matrix_source8,
    parts_of,
)
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.layer_norms import NORMS_SHARED, NOT_NORMED, Norms
from lapilli.codegen.open_rows import RowTemplate
from lapilli.codegen.template import Context
from lapilli.codegen.tiles import MatrixTile, SimtTile
from lapilli.codegen.wrapper import SHORT, BatchMapping, Wrapper, batched, parts_source, source, source8, with_sizes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import loads
from lapilli.ir.integer import Int, IntLike, as_int, ceildiv, product
from lapilli.ir.node import Matmul, Node, Reduce
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import UNITS


@dataclass(frozen=True)
class Rows:
    """policy: Slang type (X names its source); struct and words: its parameter struct; width: elements per load. places: Slang type
    that says where its fours lie, if they do.
    """

    policy: str
    struct: str
    words: dict[str, IntLike]
    node: Node
    width: int
    modules: tuple[str, ...]
    transposed: bool = False  # it is [K, M], and the rows are those of this matrix
    places: str = ""


_FRAGMENTS, _STRAIGHT = 2, 3
"""How a right operand lies, beside rows and columns: by fragments, and as codes that become numbers in registers."""


def finish_on_units(
    w: Wrapper, t: MatrixTile, rows: Rows, factor: str, name: str, order_w: int, *, batch: Int, M: Int, N: Int, K: Int,
    K8: Int, ldb8: Int, batchB8: Int, offsetB8: IntLike, shift: int = 0, parts: str = "NoParts", norms: str = NOT_NORMED,
    paired: bool = False,
) -> KernelSource:  # fmt: skip
    """The kernel of a tile on matrix units, whose sources are written. factor: Slang type of what is multiplied; name: how the
    kernel's ends; order_w: how the right operand lies, TB of `coopmat_tile` (gpu_matmul_coopmat); M to offsetB8: of its
    `TileParams`; parts: Slang type of where the tile's parts are; norms: of what rows are normed by.
    The right operand is W, or with _STRAIGHT the codes C. paired: half of a tile's columns are those of another matrix.
    """
    tm, tn = ceildiv(M, t.bm), ceildiv(N, t.bn // (2 if paired else 1))
    w.params(M=M, N=N, K=K, K8=K8, ldb8=ldb8, batchB8=batchB8, tilesM=tm, tilesN=tn, offsetB8=offsetB8)
    w.params("a", **rows.words)
    groups = (tm * tn, as_int(1), batch * t.parts) if t.swizzle else (tn, tm, batch * t.parts)
    end = "E" if norms == NOT_NORMED else f"NormedEnd<E, {t.bm}, {t.bn}>"
    assert order_w != _STRAIGHT or not rows.transposed
    right, codes = ("NoLine", "C") if order_w == _STRAIGHT else ("W", "NoCodes")
    call = (
        f"coopmat_tile<{factor}, {rows.policy}, {right}, {end}, {parts}, {norms}, {codes}, {t.bm}, {t.bn}, {t.bk}, {t.wm}, {t.wn}, "
        f"{t.sk}, {t.ep}, {int(t.swizzle)}, {int(rows.transposed)}, {order_w}, {t.parts}>(P.a, P.t, {shift}, gid, li);"
    )
    kind = "matmul" if rows.struct == "MatmulParams" else "convolution"
    struct = f"TileParams t; {rows.struct} a;"
    modules = (*rows.modules, "parts")
    return w.finish(call, groups, (t.invocations, 1, 1), f"{kind}_{name}", struct, modules, plain=True)


def _read_beside(task: Task) -> int:
    """Bytes that the epilogue reads for each result, of values as large as that."""
    size = estimate(product(task.out.shape))
    read = {ld.node.id: ld.node for ld in loads(task.value) if ld.node is not task.reduction}.values()
    return sum(node.dtype.size for node in read if estimate(product(node.shape)) >= size)


@dataclass(frozen=True)
class Tiles(RowTemplate):
    """out[b, m, n], with rows from `rows` and columns from the right operand, packed or plain."""

    rows: Rows
    w: Node
    batch: Int
    m: Int
    n: Int
    k: Int
    matrix: bool
    batch_w: Int  # elements between batches of w, 0 for weights
    row_w: Int  # elements between rows of w: its k, or where it is transposed its columns
    offset_w: IntLike = 0  # where w begins
    flat_rows: bool = False  # the rows of a convolution run over all images
    groups: int = 1  # of a convolution: the batch runs over them
    transposed_w: bool = False  # w is [N, K]
    fragments: bool = False  # w lies by fragments
    mapping: BatchMapping | None = None  # of rows in another order than the contraction's
    tile: MatrixTile | SimtTile | None = None  # None: not chosen yet
    joined: Node | None = None  # parts of a tile on matrix units, ...
    counters: Node | None = None  # ... and where they are counted, ...
    counter: int = 0  # ... from which byte on
    norms: Norms | None = None  # rows are normed
    alike: tuple[
        Task, ...
    ] = ()  # products of the same rows that this one computes as well: n has the columns of all, ...
    paired: bool = False  # ... or the epilogue reads the same column of one more

    @property
    def own_operands(self) -> list[Node]:
        norms = self.norms.nodes if self.norms is not None else []
        counters = [self.counters] if self.counters is not None else []
        return [self.rows.node, *in_memory(*self.matrices), *norms, *counters]

    @property
    def matrices(self) -> list[Node]:
        """The right operands."""
        return [self.w, *(t.template.w for t in self.alike if isinstance(t.template, Tiles))]

    @property
    def second(self) -> Reduce | None:
        return self.alike[0].reduction if self.paired else None

    @property
    def steps(self) -> Sequence[Task]:
        return self.norms.made if self.norms is not None else ()

    @property
    def scratch(self) -> list[Node]:
        return [self.joined] if self.joined is not None else []

    @property
    def tile_count(self) -> Int:
        assert self.tile is not None
        return self.batch * ceildiv(self.m, self.tile.bm) * ceildiv(self.n, self.tile.bn // (2 if self.paired else 1))

    @property
    def variant(self) -> str:
        return str(self.tile)

    def row_count(self, task: Task) -> Int:
        return self.m

    def with_tile(self, tile: MatrixTile | SimtTile) -> Tiles:
        return replace(self, tile=tile)

    def for_rows(self, count: int, task: Task, ctx: Context) -> Sequence[MatrixTile | SimtTile]:
        batch, m, n, k = estimate(self.batch), count, estimate(self.n), estimate(self.k)
        if not self.matrix:
            return tiles.simt_tiles(batch, m, n, k, ctx.target, self._is_divisible(task))
        if self.rows.struct == "ConvFirstParams":
            return tiles.first_layer_tiles(k)
        turned = self.rows.transposed, self.transposed_w
        windows = self.rows.struct in ("ConvParams", "TurnedParams")
        divisible, beside = self._is_divisible(task), _read_beside(task)
        joinable = self.rows.struct == "ConvParams" and self.is_joinable(task)
        found = tiles.matrix_tiles(
            batch, m, n, k, ctx.target, windows, turned, divisible=divisible, fragments=self.fragments, beside=beside,
            joinable=joinable,
        )  # fmt: skip
        if isinstance(self.w, Coded):
            straight = self.w.bits if become_numbers_straight(self.w) and not self.rows.transposed else 0
            return tiles.for_codes(found, batch, m, n, k, ctx.target, self.is_joinable(task), straight)
        return found

    def _is_divisible(self, task: Task) -> bool:
        """Whether the sum can be divided: `split_k.py` does it."""
        if isinstance(self.w, Coded):  # whose lines are read as a whole
            return False
        return self.is_joinable(task) and task.reduction is not None and type(task.reduction.contraction) is Matmul

    def is_joinable(self, task: Task) -> bool:
        """Whether work groups can share the sum of a tile."""
        fixed = self.batch == 1 and None not in (self.m.value, self.n.value, self.k.value)
        return fixed and task.reduction is not None and task.reduction.dtype.compute is DType.float32

    def write_tile(self, task: Task, ctx: Context) -> KernelSource:
        make = self._matrix if self.matrix else self._simt
        written = with_sizes(ctx, lambda sizes_as_params: make(task, ctx, sizes_as_params))
        written.flops = self.batch * self.m * self.n * self.k * (4 if self.paired else 2)
        return written

    def _matrix(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        turned = self.rows.transposed, self.transposed_w
        t = self.tile
        assert isinstance(t, MatrixTile)
        w = Wrapper(task, ctx, "gpu_matmul_coopmat", sizes_as_params=sizes_as_params)
        w.epilogue(self.m, self.n, self.mapping or batched(task, self.flat_rows, self.groups), ahead=True)
        if self.rows.width == 8:
            source8(w, "X", self.rows.node, self.w.dtype)
        else:
            source(w, "X", self.rows.node, vector=False)
        if t.straight:
            assert isinstance(self.w, Coded)
            matrices = [m for m in self.matrices if isinstance(m, Coded)]
            codes_source(w, "C", matrices, self.paired)
        else:
            matrix_source8(w, "W", self.w)
        parts = parts_source(w, self.joined, self.counters, self.counter)
        norms = self.norms.source(w, self.w.dtype) if self.norms is not None else NOT_NORMED
        order = _STRAIGHT if t.straight else _FRAGMENTS if self.fragments else int(self.transposed_w)
        written = finish_on_units(
            w, t, self.rows, SHORT[self.w.dtype], "matrix", order, batch=self.batch, M=self.m, N=self.n, K=self.k,
            K8=ceildiv(self.k, 8), ldb8=self.row_w // 8, batchB8=self.batch_w // 8, offsetB8=self.offset_w // 8, parts=parts,
            norms=norms, paired=self.paired,
        )  # fmt: skip
        written.shared = t.shared(*turned, self.fragments) + (NORMS_SHARED if self.norms is not None else 0)
        written.needs = UNITS[self.w.dtype]
        return written

    def _simt(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        assert isinstance(self.tile, SimtTile)
        bm, bn, bk, tm, tn = self.tile.bm, self.tile.bn, self.tile.bk, self.tile.tm, self.tile.tn
        w = Wrapper(task, ctx, "gpu_matmul", sizes_as_params=sizes_as_params)
        w.epilogue(self.m, self.n, self.mapping or batched(task, self.flat_rows, self.groups))
        source(w, "X", self.rows.node, vector=self.rows.width == 4)
        matrix_source(w, "W", self.w)
        right = "VectorB<W>"
        if self.transposed_w:
            right = f"LinesB<W, {parts_of(self.w)}>" if isinstance(self.w, Coded) else "NumbersB<W>"
        w.params(
            M=self.m, N=self.n, K=self.k, ldb=self.row_w // 4, batchB=self.batch_w // 4, offsetB=self.offset_w // 4
        )
        w.params("a", **self.rows.words)
        groups = (ceildiv(self.n, bn), ceildiv(self.m, bm), self.batch)
        size = (bm // tm) * (bn // tn)
        whole = int(not self.w.dtype.is_float)
        call = (
            f"simt_tile<{self.rows.policy}, {right}, E, {bm}, {bn}, {bk}, {tm}, {tn}, {whole}, "
            f"{int(self.rows.transposed)}, {int(self.transposed_w)}>(P.a, P.t, gid, li);"
        )
        written = w.finish(
            call, groups, (size, 1, 1), "matmul" if self.rows.struct == "MatmulParams4" else "convolution",
            f"SimtParams t; {self.rows.struct} a;", self.rows.modules, plain=True,
        )  # fmt: skip
        written.shared = 4 * bk * (bm + 4) + 4 * bk * bn
        return written
