"""Products with few rows on GPUs, which are bound by reading the matrix: one row of halves by whole subgroups
(kernels/gpu_matvec.slang), a few rows of any float type on any GPU (kernels/gpu_few_rows.slang).
"""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.packing import flat
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.wrapper import Wrapper, all_multiples, are_halves, batched, source, source8, with_sizes
from lapilli.ir.expr import Expr
from lapilli.ir.integer import Int, as_int, ceildiv
from lapilli.ir.node import Constant, Node
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import MATRIX_SUBGROUP, SUBGROUP_SUMS

MOST_ROWS = 8
"""Rows up to which a matrix is read once for all of them; more are for tiles."""
TEAM, INVOCATIONS = 32, 128
_LOADS = 4
"""Loads of an invocation that are under way at once."""


@dataclass(frozen=True)
class Matvec(KernelTemplate):
    """One row of halves; w keeps torch's layout [N, K]."""

    x: Operand
    w: Operand
    n: Int
    k: Int

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, self.w.node]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = Wrapper(task, ctx, "gpu_matvec", sizes_as_params=sizes_as_params)
        w.epilogue(as_int(1), self.n, batched(task), vector=False)
        source8(w, "X", self.x.node)
        source8(w, "W", self.w.node)
        w.params(
            N=self.n, K8=self.k // 8, ldw8=self.w.strides[2] // 8, ldx8=self.k // 8, offsetX8=self.x.offset // 8,
            offsetW8=self.w.offset // 8,
        )  # fmt: skip
        size = INVOCATIONS
        groups = (ceildiv(self.n, size // MATRIX_SUBGROUP), as_int(1), as_int(1))
        loads = max(1, min(_LOADS, -(-estimate(self.k) // (8 * MATRIX_SUBGROUP))))
        call = f"matvec<X, W, E, {size}, {loads}>(P.t, gid, li);"
        written = w.finish(call, groups, (size, 1, 1), "matvec", "MatvecParams")
        written.needs = SUBGROUP_SUMS
        written.flops = self.n * self.k * 2
        return written


def matvec(v: MatmulView, ctx: Context) -> Matvec | None:
    x, w = v.lhs, v.rhs
    if not are_halves(x.node, w.node) or v.m != 1 or v.batch != 1 or x.strides[2] != 1:
        return None
    if w.strides[1] != 1 or not all_multiples(8, v.k, w.strides[2], x.offset, w.offset):
        return None
    return Matvec(x, w, v.n, v.k)


@dataclass(frozen=True)
class FewRows(KernelTemplate):
    """out[b, m, n]; rows of x and lines of w are contiguous along K, a multiple of four."""

    x: Operand
    w: Operand
    batch: Int
    m: int
    n: Int
    k: Int

    @property
    def operands(self) -> list[Node]:
        return [self.x.node, self.w.node]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        columns = 2 if self.m > 1 else 1
        w = Wrapper(task, ctx, "gpu_few_rows", sizes_as_params=sizes_as_params)
        w.epilogue(as_int(self.m), self.n, batched(task), vector=False)
        source(w, "X", self.x.node, vector=True)
        source(w, "W", self.w.node, vector=True)
        (batch_x, row, _), (batch_w, _, line) = self.x.strides, self.w.strides
        w.params(
            N=self.n, K4=self.k // 4, ldx4=row // 4, ldw4=line // 4, batchX4=batch_x // 4, batchW4=batch_w // 4,
            offsetX4=self.x.offset // 4, offsetW4=self.w.offset // 4,
        )  # fmt: skip
        groups = (ceildiv(self.n, INVOCATIONS // TEAM * columns), as_int(1), self.batch)
        call = f"few_rows<X, W, E, {self.m}, {columns}, {TEAM}, {INVOCATIONS}>(P.t, gid, li);"
        written = w.finish(call, groups, (INVOCATIONS, 1, 1), "few_rows", "FewRowsParams")
        written.shared = 4 * INVOCATIONS * self.m * columns
        written.flops = self.batch * self.n * self.k * (2 * self.m)
        return written


def few_rows(v: MatmulView, ctx: Context) -> FewRows | None:
    """The matrix must be contiguous along K, or constant, and is then packed so once."""
    m, x, w = v.m.value, v.lhs, v.rhs
    if m is None or not 0 < m <= MOST_ROWS or not x.node.dtype.is_float or not w.node.dtype.is_float:
        return None
    if x.strides[2] != 1 or not all_multiples(4, v.k, x.offset, *x.strides[:2]):
        return None
    if not ctx.is_whole(w.node) or w.strides[1] != 1 or not all_multiples(4, w.offset, w.strides[0], w.strides[2]):
        if not isinstance(w.node, Constant):
            return None
        w = _packed_lines(v, ctx)
    return FewRows(x, w, v.batch, m, v.n, v.k)


def _packed_lines(v: MatmulView, ctx: Context) -> Operand:
    rhs, element = v.rhs, flat(v.rhs.node, ctx)
    shared = rhs.strides[0] == 0 or v.batch == 1

    def body(b: Int, n: Int, k: Int) -> tuple[list[Int], Expr]:
        return [], element(rhs.offset + b * rhs.strides[0] + k * rhs.strides[1] + n * rhs.strides[2])

    node = ctx.packed("lines", rhs.node, [as_int(1) if shared else v.batch, v.n, v.k], body)
    return Operand(node, as_int(0), (as_int(0) if shared else v.n * v.k, as_int(1), v.k))
