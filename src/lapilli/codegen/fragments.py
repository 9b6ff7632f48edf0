"""Right operands of products on matrix units by fragments (kernels/gpu_fragments.slang): each invocation of a subgroup finds its
part of a fragment in 16 bytes, so these operands need no way through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.packing import flat
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.wrapper import SHORT, Wrapper
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, rewrite
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, ceildiv, of
from lapilli.ir.node import Node
from lapilli.schedule.contraction import MatmulView
from lapilli.schedule.copies import Packed
from lapilli.schedule.task import Task
from lapilli.target import MATRIX_SUBGROUP, UNITS

SIDE = 16
"""Rows and columns of a fragment."""
_AT_ONCE = 4
"""Fragments of a work group."""


@dataclass(frozen=True)
class Fragments(KernelTemplate):
    """Packs a matrix [batch, K / 16, N / 16, 16, 16] of fragments. The order of a fragment's elements is the device's."""

    @property
    def operands(self) -> list[Node]:
        return []  # those of the copy's expression

    def write(self, task: Task, ctx: Context) -> KernelSource:
        out = task.out
        w = Wrapper(task, ctx, "gpu_fragments", sizes_as_params=False)
        batch, k16, n16 = out.shape[:3]
        names = {"b": Var("b", batch), "k": Var("k", k16 * SIDE), "n": Var("n", n16 * SIDE)}
        b, k, n = (as_int(0) if v.extent == 1 else of(v) for v in names.values())
        texts: dict[Atom, str] = {v: f"int({name})" for name, v in names.items()}
        at = (b, k // SIDE, n // SIDE, k % SIDE, n % SIDE)
        e = Emitter(w.kernel, texts, None, {}, "        ")
        value = e.value(rewrite(task.value, dict(zip(task.axes, at, strict=True))))
        w.structs.append(
            "struct X : IElements\n{\n    static float element(uint b, uint k, uint n)\n    {\n"
            f"{e.text()}        return {value};\n    }}\n}};\n"
        )
        memory = w.kernel.bind(out, "uint4", written=True)
        w.structs.append(
            f"struct O : IWords\n{{\n    static void store(uint i, uint4 words) {{ {memory}[i] = words; }}\n}};\n"
        )
        w.params(K16=k16, N16=n16)
        call = f"pack_fragments<{SHORT[out.dtype]}, X, O, {_AT_ONCE}>(P.t, gid, li);"
        groups = (ceildiv(n16, _AT_ONCE), k16, batch)
        written = w.finish(call, groups, (MATRIX_SUBGROUP * _AT_ONCE, 1, 1), "pack_fragments", "FragmentParams")
        written.shared = 16 * MATRIX_SUBGROUP * _AT_ONCE
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
    node.template = Fragments()
    return node
