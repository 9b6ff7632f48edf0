"""Products with few rows on GPUs, which are bound by reading the matrix: one row of 16-bit floats by whole subgroups
(kernels/gpu_matvec.slang), a few rows of any float type on any GPU (kernels/gpu_few_rows.slang).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from lapilli.codegen.coded import (
    Coded,
    become_numbers_straight,
    elements_of_word,
    in_memory,
    line_fields,
    lines_of_codes,
    lines_source,
    parts_of,
    unit_of,
    words_of_vector,
)
from lapilli.codegen.emit import LANES
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.open_rows import may_be_few
from lapilli.codegen.packing import flat
from lapilli.codegen.pairs import Pairs
from lapilli.codegen.row_ends import end_of_column
from lapilli.codegen.scaled_rows import ScaledRows, scaled_rows
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.tiles import straight_tile
from lapilli.codegen.wrapper import (
    SHORT,
    Wrapper,
    all_multiples,
    batched,
    short_type,
    source8,
    vector_load,
    with_sizes,
)
from lapilli.ir.expr import Expr
from lapilli.ir.integer import Int, as_int, ceildiv
from lapilli.ir.node import Constant, Matmul, Node, Reduce
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import MATRIX_SUBGROUP, SUBGROUP_SUMS

MOST_ROWS = 8
"""Rows up to which a matrix is read once for all of them; more are for tiles."""
INVOCATIONS = 128
_LOADS, _LOADS_OF_TWO = 6, 4
"""Loads of an invocation that are under way at once, of a line; of two lines, of each."""
_OTHER_LOADS, _OTHER_SIZES = (2, 4, 8, 1), (64, 256)
"""Which only measuring can choose."""
TEAM, _OTHER_TEAMS = 32, (64, 128)
"""Invocations that share a line of the matrix. More are slower on an H100, also where lines are few."""
_SIZES = (256, 128, 64)
"""Invocations of a work group. The largest is taken with which most compute units have one: each work group reads all rows."""
_COLUMNS, _OTHER_COLUMNS = 2, (1, 4)
_DEPTH, _OTHER_DEPTHS = 1, (2, 4)
"""Vectors of a line that an invocation has under way beside those that it multiplies."""
_ROWS_MEMORY = 20480
"""Bytes of shared memory that rows take at most, if one step of them does not need more: several work groups share a unit's."""
_MOST_ROWS_OF_CODES = 6
"""Up to which tiles on matrix units are no better. 4096 x 14336 and back took an H100 31 us for four rows and 63 for eight, and 56
by tiles for up to sixteen. Steps of small models, too, took longer for eight rows by rows than for sixteen by tiles.
"""
_MOST_ROWS_BY_NUMBERS = 2
"""The same beside tiles whose codes become numbers in registers. A step of two layers of an 8B model took an H200 288 us for two
rows and 386 for four, and 293 and 299 by tiles.
"""


@dataclass(frozen=True)
class RowProduct(KernelTemplate):
    """A product of a few rows that reads whole rows and lines of the matrix, w. scaled: how the rows of x are computed as they are
    read; None: they are in memory. pairs: which columns the epilogue takes together.
    """

    x: Operand
    w: Operand
    batch: Int
    m: int
    n: Int
    k: Int
    scaled: ScaledRows | None
    pairs: Pairs | None = field(default=None, kw_only=True)
    invocations: int = field(default=INVOCATIONS, kw_only=True)  # of a work group

    @property
    def operands(self) -> list[Node]:
        left = [self.x.node] if self.scaled is None else self.scaled.reads
        return [*left, *in_memory(self.w.node, *([self.pairs.w.node] if self.pairs is not None else []))]

    @property
    def second(self) -> Reduce | None:
        """The second product that it computes, whose sums its epilogue takes."""
        return self.pairs.second if self.pairs is not None else None

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    @abstractmethod
    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource: ...

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        for size in (INVOCATIONS, *_OTHER_SIZES):
            if size <= ctx.target.invocations and 4 * size * self.m * 3 <= max(
                ctx.target.shared_memory, 12 * INVOCATIONS * self.m
            ):
                yield replace(self, invocations=size)

    @property
    def variant(self) -> str:
        return f"groups of {self.invocations}"

    def _epilogue(self, w: Wrapper) -> Int:
        """struct E, and how often it is called for a row."""
        if self.pairs is None:
            end_of_column(w, as_int(self.m), self.n, batched(w.task))
            return self.n
        self.pairs.write(w, self.n, batched(w.task))
        return self.pairs.count(self.n)

    def _flops(self) -> Int:
        return self.batch * self.n * self.k * ((4 if self.second is not None else 2) * self.m)


@dataclass(frozen=True)
class Matvec(RowProduct):
    """One row, and a matrix of 16-bit floats; w keeps torch's layout [N, K]. loads: of an invocation that are under way at once."""

    loads: int = field(default=_LOADS, kw_only=True)

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        for loads in (_LOADS, *_OTHER_LOADS):
            yield replace(self, loads=loads)
        yield from islice(super().variants(task, ctx), 1, None)

    @property
    def variant(self) -> str:
        return f"{super().variant}, {self.loads} loads"

    def _loads(self) -> int:
        """How many loads of each line are under way at once, the same number in every turn of the loop."""
        most = self.loads if self.pairs is None else max(1, self.loads * _LOADS_OF_TWO // _LOADS)
        needed = max(1, -(-estimate(self.k) // (8 * MATRIX_SUBGROUP)))
        return -(-needed // -(-needed // most))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = Wrapper(task, ctx, "gpu_matvec", sizes_as_params=sizes_as_params)
        count, short = self._epilogue(w), SHORT[self.w.node.dtype]
        if self.scaled is not None:
            self.scaled.source(w, product_of(task), batched(task), 2)
        else:
            b = w.kernel.bind(self.x.node, "uint4")
            w.structs.append(
                "struct X : IRows8\n{\n"
                "    static void load(uint b, uint m, uint k, out float4 lo, out float4 hi, inout float sum)\n    {\n"
                f"        uint4 q = {b}[P.offsetX8 + k];\n        lo = float4({short}.unpack(q.x), {short}.unpack(q.y));\n"
                f"        hi = float4({short}.unpack(q.z), {short}.unpack(q.w));\n    }}\n"
                "    static float factor(uint b, uint m, float sum) { return 1.0f; }\n};\n"
            )
            w.fields.append(("offsetX8", self.x.offset // 8))
        second = self.pairs.w if self.pairs is not None else self.w
        source8(w, "W", self.w.node)
        if self.pairs is not None:
            source8(w, "V", second.node)
        w.params(
            N=count, K8=self.k // 8, ldw8=self.w.strides[2] // 8, offsetW8=self.w.offset // 8, ldv8=second.strides[2] // 8,
            offsetV8=second.offset // 8,
        )  # fmt: skip
        size = self.invocations
        groups = (ceildiv(count, size // MATRIX_SUBGROUP), as_int(1), as_int(1))
        loads = self._loads()
        if self.pairs is None:
            call = f"matvec<{short}, X, W, E, {size}, {loads}>(P.t, gid, li);"
        else:
            call = f"matvec_pairs<{short}, X, W, V, L, E, {size}, {loads}>(P.t, gid, li);"
        offset = "" if self.scaled is not None else "uint offsetX8; "
        written = w.finish(
            call, groups, (size, 1, 1), "matvec", f"{offset}MatvecParams t;", ["row_operands"], plain=True
        )
        written.needs = SUBGROUP_SUMS
        written.flops = self._flops()
        return written


def product_of(task: Task) -> Matmul:
    """The product that a task computes."""
    assert task.reduction is not None and isinstance(task.reduction.contraction, Matmul)
    return task.reduction.contraction


def _scaled(task: Task, ctx: Context, vectors: int) -> ScaledRows | None:
    found = scaled_rows(task, ctx)
    fits = found is not None and found.is_vectorizable(ctx, product_of(task), batched(task), vectors)
    return found if fits else None


def matvec(v: MatmulView, task: Task, ctx: Context) -> Matvec | None:
    x, w = v.lhs, v.rhs
    if short_type(x.node, w.node) is None or v.m != 1 or v.batch != 1 or x.strides[2] != 1:
        return None
    if w.strides[1] != 1 or not all_multiples(8, v.k, w.strides[2], x.offset, w.offset) or _is_coded(v, task, ctx):
        return None
    return Matvec(x, w, v.batch, 1, v.n, v.k, _scaled(task, ctx, 2))


@dataclass(frozen=True)
class FewRows(RowProduct):
    """out[b, m, n]; rows of x and lines of w are contiguous along K, a multiple of four. team: invocations that share lines;
    columns: how many; words: of a vector, at most; depth: vectors of a line that each has under way. 0: not chosen yet.
    """

    team: int = field(default=0, kw_only=True)
    columns: int = field(default=_COLUMNS, kw_only=True)
    words: int = field(default=0, kw_only=True)
    depth: int = field(default=_DEPTH, kw_only=True)
    rows: Int | None = field(default=None, kw_only=True)  # if the number of rows is open, and m only the most

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        first = self._chosen(ctx)
        yield first
        for size in _SIZES:
            sized = replace(first, invocations=size)
            teams = [replace(sized, team=t) for t in _OTHER_TEAMS]
            columns = [replace(sized, columns=c) for c in _OTHER_COLUMNS]
            depths = [replace(sized, depth=d) for d in _OTHER_DEPTHS]
            yield from (t for t in (sized, *teams, *columns, *depths) if t != first and t._fits(ctx))

    def _chosen(self, ctx: Context) -> FewRows:
        """What is taken without measuring."""
        found = replace(self, words=words_of_vector(self.w, self.k, TEAM), team=TEAM, invocations=_SIZES[-1])
        while found.words > unit_of(self.w.node) and not found._fits(ctx):
            found = replace(found, words=found.words // 2)
        sized = [t for t in (replace(found, invocations=s) for s in _SIZES) if t._fits(ctx)] or [found]
        columns = estimate(self.n * self.batch)
        for t in sized:
            if 4 * columns >= 3 * t.invocations // TEAM * t.columns * ctx.target.compute_units:
                return t
        return replace(sized[-1], columns=1) if self.m == 1 else sized[-1]

    @property
    def variant(self) -> str:
        return f"{super().variant}, {self.columns} columns by {self.team}, {self.depth} loads"

    @property
    def _matrices(self) -> list[Operand]:
        return [self.w] if self.pairs is None else [self.w, self.pairs.w]

    @property
    def _lines(self) -> int:
        """Of a team."""
        return self.columns if self.pairs is None else max(self.columns, 2)

    def _vector(self) -> int:
        """Words of a vector, of which a second matrix may have fewer."""
        return self.words if self.pairs is None else min(self.words, words_of_vector(self.pairs.w, self.k, TEAM))

    def _shared(self, steps: int) -> int:
        """Bytes of shared memory: the rows, or the parts of sums; those of terms; and four constants."""
        norm = int(self.scaled is not None)
        rows = self.m * steps * self._vector() * elements_of_word(self.w.node) // LANES * (self.team + 1)
        added = self.invocations // self.team * self.m * (self._lines + norm) * (self.team // LANES + 1)
        return 16 * max(rows, added) + 4 * max(norm * self.m * self.invocations, 1) + 16

    def _fits(self, ctx: Context) -> bool:
        fits = self._shared(1) <= ctx.target.shared_memory and self.team <= self.invocations <= ctx.target.invocations
        return fits and self.m * self._lines <= self.team

    def _steps(self, ctx: Context) -> int:
        """Of a chunk: the sum in as few as have room, of equal length."""
        steps = max(-(-estimate(self.k) // (self._vector() * elements_of_word(self.w.node) * self.team)), 1)
        most = steps
        while most > 1 and self._shared(most) > min(_ROWS_MEMORY, ctx.target.shared_memory):
            most -= 1
        chunks = -(-steps // most)
        return -(-steps // chunks)

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        size, words, steps = self.invocations, self._vector(), self._steps(ctx)
        w = Wrapper(task, ctx, "gpu_few_rows", sizes_as_params=sizes_as_params)
        count = self._epilogue(w)
        if self.scaled is not None:
            self.scaled.source(w, product_of(task), batched(task), 1)
        else:
            row = "m" if self.rows is None else "min(m, P.rows - 1)"
            w.structs.append(
                "struct X : IRows4\n{\n    static void load(uint b, uint m, uint k, out float4 lo, inout float sum)\n    {\n"
                f"        uint i = P.offsetX4 + b * P.batchX4 + {row} * P.ldx4 + k;\n        lo = {vector_load(w, self.x.node)};\n"
                "    }\n    static float factor(uint b, uint m, float sum) { return 1.0f; }\n};\n"
            )
            batch_x, step, _ = self.x.strides
            w.fields += [("offsetX4", self.x.offset // 4), ("batchX4", batch_x // 4), ("ldx4", step // 4)]
        epilogue = "E"
        if self.rows is not None:
            epilogue = "OfRows"
            w.fields.append(("rows", self.rows))
            w.structs.append(
                "struct OfRows : IEnds\n{\n    typedef E.Known Known;\n"
                "    static Known read(uint b, uint m, uint n) { return E.read(b, min(m, P.rows - 1), n); }\n"
                "    static uint words(Known known) { return E.words(known); }\n"
                "    static void store(uint b, uint m, uint n, float first, float second, Known known)\n    {\n"
                "        if (m < P.rows) E.store(b, m, n, first, second, known);\n    }\n};\n"
            )
        for name, matrix in zip("WV", self._matrices, strict=False):
            lines_source(w, name, matrix.node, words)
            w.fields += line_fields(name, matrix, words)
        members = "".join(f"uint {name}; " for name, _ in w.fields)
        w.params(N=count, K4=self.k // 4)
        norm, columns = int(self.scaled is not None), self._lines // len(self._matrices)
        unit, parts = unit_of(self.w.node), parts_of(self.w.node)
        sizes = f"{self.m}, {columns}, {self.team}, {size}, {norm}, {words}, {unit}, {parts}, {steps}, {min(self.depth, steps)}"
        name, matrices = ("few_rows", "W") if self.pairs is None else ("few_rows_pairs", "W, V, L")
        groups = (ceildiv(count, size // self.team * columns), as_int(1), self.batch)
        written = w.finish(
            f"{name}<X, {matrices}, {epilogue}, {sizes}>(P.t, gid, li);", groups, (size, 1, 1), "few_rows",
            f"{members}FewRowsParams t;", ["row_operands"], plain=True,
        )  # fmt: skip
        written.shared = self._shared(steps)
        written.flops = self._flops()
        return written


def few_rows_of_codes(v: MatmulView, task: Task, ctx: Context) -> FewRows | None:
    """The matrix is decoded in registers."""
    found = _rows_of_codes(v, task, ctx)
    return found if found is not None and not _are_many(found, ctx) else None


def many_rows_of_codes(v: MatmulView, task: Task, ctx: Context) -> FewRows | None:
    """The same where tiles on matrix units are better, if there are some."""
    found = _rows_of_codes(v, task, ctx)
    return found if found is not None and _are_many(found, ctx) else None


def _are_many(found: FewRows, ctx: Context) -> bool:
    """Whether decoding for each row takes longer than tiles do, which decode once."""
    if not ctx.target.cooperative_matrix:
        return False
    w, n, k = found.w.node, found.n.value, found.k.value
    tile = None
    if isinstance(w, Coded) and become_numbers_straight(w) and found.batch == 1 and n is not None and k is not None:
        tile = straight_tile(found.m, n, k, w.bits, ctx.target, True)
    return found.m > (_MOST_ROWS_OF_CODES if tile is None else _MOST_ROWS_BY_NUMBERS)


def _rows_of_codes(v: MatmulView, task: Task, ctx: Context) -> FewRows | None:
    w = lines_of_codes(v, task, ctx) if _has_few_rows(v) else None
    if w is None or v.k % elements_of_word(w.node) != 0:
        return None
    return FewRows(v.lhs, w, v.batch, v.m.value or 0, v.n, v.k, _scaled(task, ctx, 1))


def _is_coded(v: MatmulView, task: Task, ctx: Context) -> bool:
    return lines_of_codes(v, task, ctx) is not None


def _has_few_rows(v: MatmulView) -> bool:
    """Whether the left operand has few rows, read by fours."""
    m, x = v.m.value, v.lhs
    if m is None or not 0 < m <= MOST_ROWS or not x.node.dtype.is_float or not v.rhs.node.dtype.is_float:
        return False
    return x.strides[2] == 1 and all_multiples(4, v.k, x.offset, *x.strides[:2])


def few_rows(v: MatmulView, task: Task, ctx: Context) -> FewRows | None:
    """The matrix must be contiguous along K, or constant, and is then packed so once."""
    x, w = v.lhs, v.rhs
    if not _has_few_rows(v) or _is_coded(v, task, ctx):
        return None
    if not ctx.is_whole(w.node) or w.strides[1] != 1 or not all_multiples(4, w.offset, w.strides[0], w.strides[2]):
        if not isinstance(w.node, Constant):
            return None
        w = _packed_lines(v, ctx)
    return FewRows(x, w, v.batch, v.m.value or 0, v.n, v.k, _scaled(task, ctx, 1))


def beside_tiles(tiles: KernelTemplate, v: MatmulView, task: Task, ctx: Context) -> KernelTemplate:
    """The tiles of a product with an open number of rows, and kernels for a few of them that read the same matrix."""
    if not isinstance(tiles, Tiles) or not may_be_few(v.m, ctx.target):
        return tiles
    few: list[tuple[int, KernelTemplate]] = []
    units = ctx.target.cooperative_matrix
    makers = (few_rows_of_codes, matvec, few_rows) if units else (few_rows_of_codes, few_rows)
    for count in (1,) if units else (1, MOST_ROWS):
        fixed = replace(v, m=as_int(count))
        made = next((found for make in makers if (found := make(fixed, task, ctx)) is not None), None)
        if made is None or {n.id for n in in_memory(made.w.node)} != {n.id for n in in_memory(tiles.w)}:
            continue
        made = replace(made, scaled=None)  # what the rows are made of is computed for the tiles anyway
        if isinstance(made, FewRows) and count > 1:
            made = replace(made, rows=v.m)
        few.append((count, next(made.variants(task, ctx))))
    return tiles.with_few(few)


def _packed_lines(v: MatmulView, ctx: Context) -> Operand:
    rhs, element = v.rhs, flat(v.rhs.node, ctx)
    shared = rhs.strides[0] == 0 or v.batch == 1

    def body(b: Int, n: Int, k: Int) -> tuple[list[Int], Expr]:
        return [], element(rhs.offset + b * rhs.strides[0] + k * rhs.strides[1] + n * rhs.strides[2])

    node = ctx.packed("lines", rhs.node, [as_int(1) if shared else v.batch, v.n, v.k], body)
    return Operand(node, as_int(0), (as_int(0) if shared else v.n * v.k, as_int(1), v.k))
