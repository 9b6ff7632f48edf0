"""Products of a few rows with a matrix in blocks of small integers, on GPUs (kernels/gpu_blocks.slang)."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.codegen.emit import LANES, Emitter, KernelBuilder, NotVectorizable
from lapilli.codegen.gpu_matvec import INVOCATIONS, MOST_ROWS, TEAM
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate, PackedBody
from lapilli.codegen.wrapper import Wrapper, all_multiples, batched, source, with_sizes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, ceildiv, of
from lapilli.ir.node import Matmul, Node
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.encoding import Blocks
from lapilli.schedule.task import Task


@dataclass(frozen=True)
class FewRowsOfBlocks(KernelTemplate):
    """out[m, n]; codes: packed words [N, K / codes of a word]; blocks: in the axes `inner` and `column`."""

    x: Operand
    codes: Node
    blocks: Blocks
    inner: Var
    column: Var
    m: int

    @property
    def operands(self) -> list[Node]:
        inside = set(loads(self.blocks.code))
        others = {ld.node.id: ld.node for ld in loads(self.blocks.value) if ld not in inside}
        return [self.x.node, self.codes, *others.values()]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        n, k, bits = self.column.extent, self.inner.extent, self.blocks.bits
        columns = 2 if self.m > 1 else 1
        w = Wrapper(task, ctx, "gpu_blocks", sizes_as_params=sizes_as_params)
        w.epilogue(as_int(self.m), n, batched(task), vector=False)
        source(w, "X", self.x.node, vector=True)
        word = f"uint({w.kernel.bind(self.codes, 'int')}[i])"
        w.structs.append(
            f"struct W : IBlocks\n{{\n    static uint word(uint i) {{ return {word}; }}\n"
            f"    static float4 quad(int4 codes, uint n, uint k4)\n    {{\n{self.quad(w.kernel)}    }}\n}};\n"
        )
        w.params(N=n, words=k * bits // 32, ldx4=self.x.strides[1] // LANES)
        groups = (ceildiv(n, INVOCATIONS // TEAM * columns), as_int(1), as_int(1))
        call = f"few_rows_of_blocks<X, W, E, {bits}, {self.m}, {columns}, {TEAM}, {INVOCATIONS}>(P.t, gid, li);"
        written = w.finish(call, groups, (INVOCATIONS, 1, 1), "few_rows_of_blocks", "BlocksParams")
        written.shared = 4 * INVOCATIONS * self.m * columns
        written.flops = n * k * (2 * self.m)
        return written

    def quad(self, kernel: KernelBuilder) -> str:
        """The body of `IBlocks.quad`: four elements from their codes. Raises NotVectorizable."""
        k4, lane, n = Var("k4", self.inner.extent // LANES), Var("lane", as_int(LANES)), Var("n", self.column.extent)
        at: dict[Atom, Int] = {self.inner: of(k4) * LANES + of(lane), self.column: of(n)}
        e = Emitter(kernel, {k4: "int(k4)", n: "int(n)"}, of(lane), indent="        ")
        low = f" + {self.blocks.low}" if self.blocks.low > 0 else f" - {-self.blocks.low}" if self.blocks.low else ""
        e.line(f"int4 code = codes{low};")
        code = rewrite(self.blocks.code, at)
        e.name(code, "code")
        e.line(f"return {e.value(rewrite(self.blocks.value, at))};")
        return e.text()


def few_rows_of_blocks(v: MatmulView, task: Task, ctx: Context) -> FewRowsOfBlocks | None:
    """Packs the matrix once, and reads it instead of the floats decoded from it."""
    assert task.reduction is not None
    contraction = task.reduction.contraction
    assert isinstance(contraction, Matmul)
    m, x = v.m.value, v.lhs
    if m is None or not 0 < m <= MOST_ROWS or v.batch != 1 or not x.node.dtype.is_float:
        return None
    if x.offset != 0 or x.strides[2] != 1 or not all_multiples(LANES, v.k, x.strides[1]):
        return None
    blocks = v.rhs.encoding
    if not isinstance(blocks, Blocks) or v.k % (32 // blocks.bits) != 0:
        return None
    codes = ctx.packed(
        "codes", contraction.rhs, [v.n, v.k * blocks.bits // 32], _words(blocks, contraction), DType.int32
    )
    template = FewRowsOfBlocks(x, codes, blocks, contraction.inner, contraction.column, m)
    try:
        template.quad(KernelBuilder(ctx.layouts, ctx.target.half, ctx.target.texel))
    except NotVectorizable:  # neighbours are computed in different ways
        return None
    return template


def _words(blocks: Blocks, contraction: Matmul) -> PackedBody:
    """Codes packed into words, lowest bits first."""
    count = 32 // blocks.bits

    def body(n: Int, word: Int) -> tuple[list[Int], Expr]:
        packed: Expr = const(0, DType.int32)
        for i in range(count):
            code = rewrite(blocks.code, {contraction.column: n, contraction.inner: word * count + i})
            part = binary("shl", binary("sub", code, blocks.low), blocks.bits * i)
            packed = part if i == 0 else binary("bitor", packed, part)
        return [], packed

    return body
