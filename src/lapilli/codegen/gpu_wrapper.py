"""What the wrappers of hand-written GPU kernels share: operands as sources, and the axes of an epilogue."""

from __future__ import annotations

from collections.abc import Callable

from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, Wrapper, row_major, scalar_load, vector_load, within_limit
from lapilli.ir.dtype import DType
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, of, product
from lapilli.ir.node import Convolution, Matmul, Node
from lapilli.schedule.task import Task

SIGNATURE = "uint b, uint m, uint n"


def with_sizes(ctx: Context, write: Callable[[bool], KernelSource]) -> KernelSource:
    """A kernel from `write(sizes are parameters)`. They are compiled in where speed is worth more pipelines, on matrix units, and
    where they are more than a kernel takes."""
    return write(False) if ctx.target.cooperative_matrix else within_limit(write)


def batched(task: Task, flat_rows: bool = False, groups: int = 1) -> BatchMapping:
    """The task's axes from (b, m, n): b is an image, a group, or a batch."""
    reduction = task.reduction
    assert reduction is not None
    contraction = reduction.contraction
    if isinstance(contraction, Matmul):
        return BatchMapping(list(contraction.batch), list(contraction.rows), contraction.column, 1)
    assert isinstance(contraction, Convolution)
    n, o = reduction.axes[0], reduction.axes[1]
    if flat_rows:
        return BatchMapping([], [n, *reduction.axes[2:]], o, 1)
    return BatchMapping([n], list(reduction.axes[2:]), o, groups)


class BatchMapping:
    """Axes of a task from a batch, a row and a column; with groups, the batch is the group of the columns."""

    def __init__(self, batch: list[Var], rows: list[Var], column: Var, groups: int) -> None:
        self.batch, self.rows, self.column, self.groups = batch, rows, column, groups
        count = as_int(groups) if groups > 1 else product([a.extent for a in batch])
        self.var = Var("b", count)

    def __call__(self, m: Int, n: Int) -> dict[Atom, Int]:
        axes = row_major(self.rows, self.column)(m, n)
        b = as_int(0) if self.var.extent == 1 else of(self.var)
        if self.groups > 1:
            axes[self.column] = b * (self.column.extent // self.groups) + n
            for a in self.batch:
                axes[a] = as_int(0)
            return axes
        rest = b
        for k, a in enumerate(reversed(self.batch)):
            axes[a] = rest % a.extent if k + 1 < len(self.batch) else rest
            rest = rest // a.extent
        return axes


def source8(w: Wrapper, name: str, node: Node) -> None:
    b = w.kernel.bind(node, "uint4")
    w.structs.append(f"struct {name} : ISource8\n{{\n    static uint4 load8(uint i) {{ return {b}[i]; }}\n}};\n")


def source(w: Wrapper, name: str, node: Node, vector: bool) -> None:
    """Reads four elements at a time, or one by one: only the form that is used gets a buffer."""
    four = vector_load(w, node) if vector else "float4(0.0f)"
    one = "0.0f" if vector else scalar_load(w, node, "int(i)")
    w.structs.append(
        f"struct {name} : ISource\n{{\n    static float4 load4(uint i) {{ return {four}; }}\n"
        f"    static float load(uint i) {{ return {one}; }}\n}};\n"
    )


def all_multiples(n: int, *values: IntLike) -> bool:
    return all(as_int(v) % n == 0 for v in values)


def are_halves(*nodes: Node) -> bool:
    return all(n.dtype is DType.float16 for n in nodes)
