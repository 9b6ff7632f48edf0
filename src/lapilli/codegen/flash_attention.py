"""Attention as one kernel on GPUs: the tasks that it replaces, and the wrapper around kernels/gpu_attention.slang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.wrapper import SIGNATURE, Wrapper, batched, source, with_sizes
from lapilli.ir.expr import loads, rewrite
from lapilli.ir.integer import Int, IntLike, Var, as_int, ceildiv, of, product
from lapilli.ir.node import Attention, Matmul, Node
from lapilli.schedule.contraction import Operand, merged, operand
from lapilli.schedule.layout import estimate
from lapilli.schedule.realize import chase
from lapilli.schedule.task import Task

_KEYS = 32  # of a tile
_INVOCATIONS = 128
_SHARED = 32768  # bytes of a work group at most: with more, too few of them are on a compute unit at once


def choose(task: Task, ctx: Context) -> bool:
    """Selects the template for the last task of attention, if its operands are strided. The tasks that compute scores and
    weights then have one use fewer, and may be dropped by `without_unread`.
    """
    assert task.reduction is not None
    contraction = task.reduction.contraction
    if not isinstance(contraction, Attention) or not ctx.is_whole(task.out):
        return False
    root, _ = chase(contraction.scores, tuple(as_int(0) for _ in contraction.scores.shape), dict(ctx.views))
    scores, weights = ctx.tasks.get(root.id), ctx.tasks.get(contraction.weights.id)
    if (
        scores is None
        or weights is None
        or scores.reduction is None
        or not isinstance(scores.reduction.contraction, Matmul)
    ):
        return False
    batch = [a.extent for a in contraction.batch]
    q, k, v = (_tensor(x, batch, ctx) for x in (contraction.q, contraction.k, contraction.v))
    size, width = contraction.q.shape[-1].value, contraction.v.shape[-1].value
    if q is None or k is None or v is None or not size or not width:
        return False
    template = _Flash(scores, contraction.causal, q, k, v, size, width)
    if template.tile(task, ctx) is None:
        return False
    task.template = template
    task.members = (scores, weights)
    return True


@dataclass(frozen=True)
class _Tensor:
    """strides: (outer batches, last batch, row, column) in elements; share: neighbouring heads that read the same data; width:
    elements of a row.
    """

    operand: Operand
    share: int
    width: Int

    @property
    def wide(self) -> bool:
        """Whether rows can be read four elements at a time."""
        *others, column = self.operand.strides
        size = self.operand.node.dtype.size
        return column == 1 and size in (2, 4) and all(s % 4 == 0 for s in (self.width, self.operand.offset, *others))


def _tensor(x: Node, batch: Sequence[Int], ctx: Context) -> _Tensor | None:
    """[*batch, rows, columns] in memory. A dimension of size 1 is broadcast; a last batch dimension that divides the heads is
    shared.
    """
    axes = [Var(f"a{d}", size) for d, size in enumerate(x.shape)]
    share = 1
    if batch and x.rank > 2 and x.shape[-3] not in (1, batch[-1]):
        ratio = batch[-1] // x.shape[-3]
        if ratio.value is None:
            return None
        share = ratio.value
    index = tuple(as_int(0) if a.extent == 1 else of(a) for a in axes)
    found = operand(x, index, [None if a.extent == 1 else a for a in axes], ctx.views, ctx.layouts)
    if found is None or not ctx.is_whole(found.node):
        return None
    missing = len(batch) + 2 - x.rank
    strides = (*[as_int(0)] * missing, *found.strides)
    outer = merged(strides[: len(batch)][:-1], batch[:-1])
    head = strides[len(batch) - 1] if batch else as_int(0)
    if outer is None:
        return None
    return _Tensor(Operand(found.node, found.offset, (outer, head, *strides[-2:])), share, x.shape[-1])


@dataclass(frozen=True)
class _Flash(KernelTemplate):
    scores: Task
    causal: bool
    q: _Tensor
    k: _Tensor
    v: _Tensor
    size: int  # of a row of q and k
    width: int  # of a row of v

    @property
    def operands(self) -> list[Node]:
        read = [ld.node for ld in loads(self.scores.value) if ld.node is not self.scores.reduction]
        return [self.q.operand.node, self.k.operand.node, self.v.operand.node, *read]

    def tile(self, task: Task, ctx: Context) -> int | None:
        """Queries of a work group; None if they do not fit its shared memory."""
        rows = (
            task.reduction.contraction.rows[0].extent
            if task.reduction and isinstance(task.reduction.contraction, Attention)
            else 1
        )
        groups = product([a.extent for a in task.axes[:-2]])
        count = estimate(as_int(rows))
        target = ctx.target
        many = estimate(groups) * -(-count // 32) >= target.compute_units
        menu = (4,) if count <= 4 else (32, 16) if many else (16,)
        return next((q for q in menu if self.shared(q) <= min(_SHARED, target.shared_memory)), None)

    def shared(self, queries: int) -> int:
        d4, v4 = -(-self.size // 4), -(-self.width // 4)
        return 16 * (_KEYS * (max(d4, v4) + 1) + queries * (d4 + 1)) + 4 * queries * (_KEYS + 1)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        assert task.reduction is not None
        contraction = task.reduction.contraction
        assert isinstance(contraction, Attention)
        rows, keys, batch = (
            contraction.rows[0].extent,
            contraction.inner.extent,
            product([a.extent for a in contraction.batch]),
        )
        w = Wrapper(task, ctx, "gpu_attention", sizes_as_params=sizes_as_params)
        w.epilogue(rows, as_int(self.width), batched(task))
        self._score(w, task, ctx)
        heads: IntLike = contraction.batch[-1].extent if contraction.batch else 1
        w.params(L=rows, S=keys, heads=heads, share=max(self.k.share, self.v.share))
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source(w, name.upper(), t.operand.node, vector=t.wide)
            unit = 4 if t.wide else 1
            outer, head, row, column = t.operand.strides
            w.params(
                f"t.{name}", offset=t.operand.offset // unit, batch=outer // unit, head=head // unit, row=row // unit,
                column=1 if t.wide else column,
            )  # fmt: skip
        queries = self.tile(task, ctx)
        assert queries is not None
        wide = ", ".join(str(int(t.wide)) for t in (self.q, self.k, self.v))
        call = (
            f"attention<Q, K, V, F, E, {self.size}, {self.width}, {wide}, {queries}, {_KEYS}, {_INVOCATIONS}, "
            f"{int(self.causal)}>(P.t, gid, li);"
        )
        groups = (ceildiv(rows, queries), as_int(1), batch)
        written = w.finish(call, groups, (_INVOCATIONS, 1, 1), "attention", "AttentionParams")
        written.shared = self.shared(queries)
        written.flops = batch * rows * keys * (2 * (self.size + self.width))
        return written

    def _score(self, w: Wrapper, task: Task, ctx: Context) -> None:
        """struct F: the pointwise operations that the scores' task applies to a product."""
        reduction = self.scores.reduction
        assert reduction is not None
        mapping = batched(self.scores)
        rows, column = mapping.rows[0], mapping.column
        m, n = Var("m", rows.extent), Var("n", column.extent)
        axes = mapping(of(m), of(n))
        e = Emitter(w.kernel, {m: "int(m)", n: "int(n)", mapping.var: "int(b)"}, None, {reduction.id: "s"}, "        ")
        text = e.value(rewrite(self.scores.value, axes))
        w.structs.append(
            f"struct F : IScore\n{{\n    static float apply({SIGNATURE}, float s)\n    {{\n{e.text()}        return {text};\n"
            "    }\n};\n"
        )
