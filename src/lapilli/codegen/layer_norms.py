"""Layer norms, as kernels of products see them: y[k] = (x[k] - mean) scale gamma[k] + beta[k] for each row x. With W' = gamma W,

    y W = (x W' - mean S) scale + T,    S = sums of the columns of W',    T = beta W,

so a product can take x as it is: mean and scale of a row are known when it is read to its end
(kernels/gpu_matmul_coopmat.slang). W', S and T are made at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lapilli.codegen.emit import Emitter
from lapilli.codegen.scaled_rows import factors_of, place_of
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import SHORT, Wrapper
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Op, binary, cast_to, const, ints_of, load, loads, reads, rewrite, walk
from lapilli.ir.integer import Atom, Int, Var, as_int
from lapilli.ir.interpret import evaluate
from lapilli.ir.narrow import OPERATIONS
from lapilli.ir.node import Constant, Map, Node, Reduce
from lapilli.schedule.copies import Packed
from lapilli.schedule.fuse_reductions import RowFusion, Step
from lapilli.schedule.task import Task

MOST_NORMED = 128
"""Rows and columns of a tile, at most (MOST_NORMED in gpu_matmul_coopmat)."""
NORMS_SHARED = 16 * MOST_NORMED
"""Bytes of shared memory for mean and scale of rows, S and T of columns."""
NOT_NORMED = "NotNormed"
"""Slang type of rows that are taken as they are."""


@dataclass(frozen=True)
class LayerNorm:
    """x: a load of what is normed; inner: the axis along the row. scale: of a load of `squares`, the sum of squares of differences
    from the mean, and of nothing else. gamma, beta: of constants, along the axis; None: there is none.
    """

    row: RowFusion
    x: Load
    inner: Var
    squares: Reduce
    scale: Expr
    gamma: Expr | None
    beta: Expr | None

    def largest_gamma(self) -> float:
        """The largest of their magnitudes; NaN where one is."""
        if self.gamma is None:
            return 1.0
        known = {ld.node.id: ld.node.numbers for ld in loads(self.gamma) if isinstance(ld.node, Constant)}
        gammas = Map((self.inner.extent,), DType.float32, "gamma", axes=(self.inner,), body=self.gamma)
        return float(np.abs(evaluate(gammas, known, {})).max())

    def along(self, e: Expr, at: Int) -> Expr:
        """gamma or beta at a place along the row."""
        return rewrite(e, {self.inner: at})

    def at(self, index: Sequence[Int]) -> dict[Atom, Int] | None:
        """The axes of the row, for the element of the result at an index."""
        return place_of(self.row, index)


def layer_norm(task: Task) -> LayerNorm | None:
    """What a task computes, if it is a layer norm of stored rows."""
    row = task.row
    if row is None or row.whole or len(row.steps) != 2 or task.partial or task.within:
        return None
    first, second = row.steps
    inner = [a for a in row.inner if a.extent != 1]
    if len(inner) != 1 or not all(s.reduction.op == "sum" and s.body.dtype is DType.float32 for s in row.steps):
        return None
    along, x = inner[0], first.body
    value, body = _resolved(row.value, row.steps), _resolved(second.body, row.steps)
    apart = body.args[0] if isinstance(body, Op) and body.op == "mul" and body.args[0] == body.args[1] else None
    if not isinstance(x, Load) or not isinstance(apart, Op) or apart.op != "sub" or apart.args[0] != x:
        return None
    if not _is_mean(apart.args[1], first.reduction, along.extent) or not any(reads(i, along) for i in x.index):
        return None
    if isinstance(value, Op) and value.op == OPERATIONS.get(task.out.dtype):
        value = value.args[0]
    beta = None
    if isinstance(value, Op) and value.op == "add":
        value, beta = (value.args[k] for k in ((0, 1) if _loaded(value.args[0]) & {first.reduction.id} else (1, 0)))
    scale, gamma, found = const(1.0), None, False
    for e, divides in factors_of(value, [first.reduction, second.reduction], task.out.dtype):
        if e == apart and not divides and not found:
            found = True
        elif _loaded(e) & {first.reduction.id, second.reduction.id}:
            if not _is_of(e, second.reduction):
                return None
            scale = binary("div" if divides else "mul", scale, e)
        else:
            gamma = binary("div" if divides else "mul", const(1.0) if gamma is None else gamma, e)
    if not found or scale.dtype is not DType.float32 or not _loaded(scale) & {second.reduction.id}:
        return None
    if any(e is not None and not _is_of_constants(e, along) for e in (gamma, beta)):
        return None
    return LayerNorm(row, x, along, second.reduction, scale, gamma, beta)


def _resolved(e: Expr, steps: Sequence[Step]) -> Expr:
    """An expression of sums, instead of what readers see of them."""
    by_out = {s.out.id: s for s in steps}

    def instead(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        step = by_out.get(ld.node.id)
        if step is None or step.value == ld:
            return None
        return cast_to(rewrite(step.value, {}, instead), ld.dtype)

    return rewrite(e, {}, instead)


def _is_mean(e: Expr, total: Node, count: Int) -> bool:
    if count.value is None or not isinstance(e, Op) or not isinstance(e.args[0], Load) or e.args[0].node is not total:
        return False
    return e in (binary("div", e.args[0], const(float(count.value))), binary("mul", e.args[0], const(1 / count.value)))


def _loaded(e: Expr) -> set[int]:
    return {ld.node.id for ld in loads(e)}


def _is_of(e: Expr, total: Node) -> bool:
    """Whether an expression depends on a sum, and on nothing else: its kernel has nothing else."""
    return all(y.node is total if isinstance(y, Load) else not ints_of(y) for y in walk(e))


def _is_of_constants(e: Expr, along: Var) -> bool:
    atoms = {a for y in walk(e) for i in ints_of(y) for a in i.atoms()}
    return all(isinstance(ld.node, Constant) for ld in loads(e)) and atoms <= {along}


@dataclass(frozen=True)
class Norms:
    """What a product needs of the layer norm of its rows. sums, added: S and T, float32 of its columns; made: the tasks that make
    them.
    """

    norm: LayerNorm
    sums: Node
    added: Node | None
    made: tuple[Task, ...]

    @classmethod
    def of(cls, norm: LayerNorm, weights: Packed, element: Callable[[Int, Int], Expr], ctx: Context) -> Norms:
        """weights: W', [1, K, N]; element: of W, by k and n."""
        _, k, n = weights.shape
        sums = _of_columns(weights, "sums", k, n, lambda at, column: load(weights, (as_int(0), at, column)), ctx)
        if norm.beta is None:
            return cls(norm, sums.out, None, (sums,))
        beta = norm.beta
        added = _of_columns(
            weights, "added", k, n, lambda at, column: binary("mul", norm.along(beta, at), element(at, column)), ctx
        )
        return cls(norm, sums.out, added.out, (sums, added))

    @property
    def nodes(self) -> list[Node]:
        return [self.sums, *([self.added] if self.added is not None else [])]

    def source(self, w: Wrapper, dtype: DType) -> str:
        """struct N : INormed. dtype: of the rows. Returns its name."""
        e = Emitter(w.kernel, {}, None, {self.norm.squares.id: "squares"}, "        ")
        scale = e.value(self.norm.scale)
        fours = [f"{w.kernel.bind(node, 'float4')}[n4]" for node in self.nodes]
        added = fours[1] if len(fours) > 1 else "float4(0.0f)"
        w.structs.append(
            "struct N : INormed\n{\n    static const int USED = 1;\n"
            f"    static float2 numbers(uint word) {{ return {SHORT[dtype]}.unpack(word); }}\n"
            f"    static float scale(float squares)\n    {{\n{e.text()}        return {scale};\n    }}\n"
            f"    static float4 sums4(uint n4) {{ return {fours[0]}; }}\n"
            f"    static float4 added4(uint n4) {{ return {added}; }}\n}};\n"
        )
        return "N"


def _of_columns(like: Node, name: str, k: Int, n: Int, body: Callable[[Int, Int], Expr], ctx: Context) -> Task:
    """A sum over k for each of n columns."""
    (column,), (at,) = fresh_axes((n,))
    (along,), (i,) = fresh_axes((k,), "r")
    total = Reduce((n,), DType.float32, f"{like.name}_{name}", "norm", axes=(column,), raxes=(along,), body=body(i, at))
    ctx.dense(total)
    return Task(total, total.axes, (at,), load(total, (at,)), total, total.body, ["norm"], "of a norm inside a product")
