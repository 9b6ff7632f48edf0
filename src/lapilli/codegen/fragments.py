"""Right operands of products on matrix units by fragments (kernels/gpu_fragments.slang): each invocation of a subgroup finds its
part of a fragment in 16 bytes, so these operands need no way through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.packing import flat
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.wrapper import SHORT, Wrapper, all_multiples
from lapilli.ir.axes import index_of
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, rewrite
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, ceildiv
from lapilli.ir.node import Node
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.copies import Packed
from lapilli.schedule.task import Task
from lapilli.target import MATRIX_SUBGROUP, UNITS

SIDE, _EIGHT = 16, 8
"""Rows and columns of a fragment, and elements in 16 bytes."""
_ACROSS, _DEEP = 4, 4
"""Fragments of a work group: along the columns, each of a subgroup, and along K."""


@dataclass(frozen=True)
class Fragments(KernelTemplate):
    """Packs a matrix [batch, K / 16, N / 16, 16, 16] of fragments. The order of a fragment's elements is the device's. rows: the
    matrix, k x n, if eight elements of a row can be read at once; otherwise they are read by the copy's expression.
    """

    rows: Operand | None
    k: Int
    n: Int

    @property
    def operands(self) -> list[Node]:
        return [self.rows.node] if self.rows is not None else []

    def write(self, task: Task, ctx: Context) -> KernelSource:
        out, kind = task.out, SHORT[task.out.dtype]
        w = Wrapper(task, ctx, "gpu_fragments", sizes_as_params=False)
        batch, k16, n16 = out.shape[:3]
        names = {"b": Var("b", batch), "k": Var("k", k16 * SIDE), "n": Var("n", n16 * SIDE)}
        b, k, n = map(index_of, names.values())
        texts: dict[Atom, str] = {v: f"int({name})" for name, v in names.items()}
        e = Emitter(w.kernel, texts, None, {}, "        ")
        if (rows := self.rows) is not None:
            policy, method = "X", "IEights\n{\n    static uint4 eight"
            along, down, _ = rows.strides
            place = e.integer(rows.offset // _EIGHT + b * (along // _EIGHT) + k * (down // _EIGHT) + n // _EIGHT)
            inside = f"int(k) < {e.integer(self.k)} && int(n) < {e.integer(self.n)}"
            e.line("uint4 words = uint4(0);")
            e.line(f"if ({inside}) words = {w.kernel.bind(rows.node, 'uint4')}[{place}];")
            value = "words"
        else:
            policy, method = f"Elements<{kind}, X>", "IElements\n{\n    static float element"
            at = (b, k // SIDE, n // SIDE, k % SIDE, n % SIDE)
            value = e.value(rewrite(task.value, dict(zip(task.axes, at, strict=True))))
        w.structs.append(
            f"struct X : {method}(uint b, uint k, uint n)\n    {{\n{e.text()}        return {value};\n    }}\n}};\n"
        )
        memory = w.kernel.bind(out, "uint4", written=True)
        w.structs.append(
            f"struct O : IWords\n{{\n    static void store(uint i, uint4 words) {{ {memory}[i] = words; }}\n}};\n"
        )
        w.params(K16=k16, N16=n16)
        call = f"pack_fragments<{kind}, {policy}, O, {_ACROSS}, {_DEEP}>(P.t, gid, li);"
        groups = (ceildiv(n16, _ACROSS), ceildiv(k16, _DEEP), batch)
        written = w.finish(call, groups, (MATRIX_SUBGROUP * _ACROSS, 1, 1), "pack_fragments", "FragmentParams")
        written.shared = 16 * MATRIX_SUBGROUP * _ACROSS * _DEEP
        written.needs = UNITS[out.dtype]
        return written


def by_fragments(v: MatmulView, dtype: DType, ctx: Context) -> Packed:
    """The right operand of a product, packed."""
    rhs, element = v.rhs, flat(v.rhs.node, ctx)
    shared = rhs.strides[0] == 0 or v.batch == 1

    def body(b: Int, k16: Int, n16: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        row, column = k16 * SIDE + k, n16 * SIDE + n
        place = rhs.offset + b * rhs.strides[0] + row * rhs.strides[1] + column * rhs.strides[2]
        return [v.k - 1 - row, v.n - 1 - column], element(place)

    sizes: list[IntLike] = [as_int(1) if shared else v.batch, ceildiv(v.k, SIDE), ceildiv(v.n, SIDE), SIDE, SIDE]
    node = ctx.packed("fragments", rhs.node, sizes, body, dtype)
    read_at_once = (
        rhs.node.dtype is dtype
        and not isinstance(rhs.node, Packed)
        and rhs.strides[2] == 1
        and all_multiples(_EIGHT, v.n, rhs.offset, *rhs.strides[:2])
    )
    node.template = Fragments(rhs if read_at_once else None, v.k, v.n)
    return node
