"""Attention as one kernel on GPUs: the tasks that it replaces, and the wrappers around kernels/gpu_attention*.slang."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lapilli.codegen.emit import Emitter
from lapilli.codegen.gpu_tiles import likely_rows
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.packing import gathered
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.tiles import AttentionTile, attention_tile
from lapilli.codegen.wrapper import SIGNATURE, Wrapper, all_multiples, are_halves, batched, source, source8, with_sizes
from lapilli.ir.expr import loads, rewrite
from lapilli.ir.integer import Int, IntLike, Var, as_int, ceildiv, of, product
from lapilli.ir.node import Attention, Matmul, Node
from lapilli.schedule.contraction import Operand, merged, operand
from lapilli.schedule.layout import estimate
from lapilli.schedule.realize import chase
from lapilli.schedule.task import Task
from lapilli.target import MATRIX_UNITS, QUADS, VOTES

_KEYS = 32  # of a tile
_INVOCATIONS = 128
MATRIX = 16  # rows of a fragment
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
    for kind in (_MatrixFlash, _Flash) if _suits_matrix_units(contraction, ctx) else (_Flash,):
        template = _template(kind, scores, contraction, ctx)
        if template is not None and template.fits(task, ctx):
            task.template = template
            task.members = (scores, weights)
            return True
    return False


def _suits_matrix_units(note: Attention, ctx: Context) -> bool:
    """Whether the units compute more than padding: not for a few queries."""
    halves = are_halves(note.q, note.k, note.v)
    return ctx.target.cooperative_matrix and halves and (note.rows[0].extent.value or MATRIX) >= MATRIX


def _template(kind: type[_Attention], scores: Task, note: Attention, ctx: Context) -> _Attention | None:
    batch = [a.extent for a in note.batch]
    q, k, v = (_tensor(x, batch, ctx, kind.unit) for x in (note.q, note.k, note.v))
    size, width = note.q.shape[-1].value, note.v.shape[-1].value
    if q is None or k is None or v is None or not size or not width:
        return None
    return kind(scores, note.causal, q, k, v, size, width)


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
        return self.operand.node.dtype.size in (2, 4) and _in_vectors(self.operand, self.width, 4)


def _in_vectors(x: Operand, width: Int, unit: int) -> bool:
    *others, column = x.strides
    return unit == 1 or (column == 1 and all_multiples(unit, width, x.offset, *others))


def _tensor(x: Node, batch: Sequence[Int], ctx: Context, unit: int) -> _Tensor | None:
    """[*batch, rows, columns] in memory, copied if a kernel that reads `unit` elements at a time cannot read it as it lies. A
    dimension of size 1 is broadcast; a last batch dimension that divides the heads is shared.
    """
    axes = [Var(f"a{d}", size) for d, size in enumerate(x.shape)]
    share = 1
    if batch and x.rank > 2 and x.shape[-3] not in (1, batch[-1]):
        ratio = batch[-1] // x.shape[-3]
        if ratio.value is None:
            return None
        share = ratio.value
    index = tuple(as_int(0) if a.extent == 1 else of(a) for a in axes)
    missing = [as_int(0)] * (len(batch) + 2 - x.rank)
    found = operand(x, index, [None if a.extent == 1 else a for a in axes], ctx.views, ctx.layouts)
    outer = merged([*missing, *found.strides][: len(batch)][:-1], batch[:-1]) if found is not None else None
    width = x.shape[-1]
    if found is None or outer is None or not ctx.is_whole(found.node) or not _in_vectors(found, width, unit):
        found = gathered(x, index, [[] if a.extent == 1 else [a] for a in axes], ctx, unit)
        outer = merged([*missing, *found.strides][: len(batch)][:-1], batch[:-1])
        if outer is None or not ctx.is_whole(found.node):  # some of the outer batches are broadcast
            return None
    strides = (*missing, *found.strides)
    head = strides[len(batch) - 1] if batch else as_int(0)
    return _Tensor(Operand(found.node, found.offset, (outer, head, *strides[-2:])), share, x.shape[-1])


@dataclass(frozen=True)
class _Attention(KernelTemplate):
    """softmax(scores) v. scores: the task of the scores. size: of a row of q and k; width: of a row of v. unit: elements that the
    kernel reads at a time.
    """

    unit: ClassVar[int] = 1

    scores: Task
    causal: bool
    q: _Tensor
    k: _Tensor
    v: _Tensor
    size: int
    width: int

    @property
    def operands(self) -> list[Node]:
        read = [ld.node for ld in loads(self.scores.value) if ld.node is not self.scores.reduction]
        return [self.q.operand.node, self.k.operand.node, self.v.operand.node, *read]

    @abstractmethod
    def fits(self, task: Task, ctx: Context) -> bool:
        """Whether some tile of the kernel fits the work groups of the target."""

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    @abstractmethod
    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource: ...

    def _wrapper(self, module: str, task: Task, ctx: Context, sizes_as_params: bool) -> Wrapper:
        """With the epilogue, the scores' function and the sizes."""
        note = attention_of(task)
        rows, keys = note.rows[0].extent, note.inner.extent
        w = Wrapper(task, ctx, module, sizes_as_params=sizes_as_params)
        w.epilogue(rows, as_int(self.width), batched(task))
        self._score(w)
        heads: IntLike = note.batch[-1].extent if note.batch else 1
        w.params(L=rows, S=keys, heads=heads, share=max(self.k.share, self.v.share))
        return w

    def _score(self, w: Wrapper) -> None:
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

    def _flops(self, task: Task) -> Int:
        note = attention_of(task)
        batch = product([a.extent for a in note.batch])
        return batch * note.rows[0].extent * note.inner.extent * (2 * (self.size + self.width))


def attention_of(task: Task) -> Attention:
    assert task.reduction is not None and isinstance(task.reduction.contraction, Attention)
    return task.reduction.contraction


@dataclass(frozen=True)
class _Flash(_Attention):
    """On any GPU (kernels/gpu_attention.slang)."""

    def fits(self, task: Task, ctx: Context) -> bool:
        return self.tile(task, ctx) is not None

    def tile(self, task: Task, ctx: Context) -> int | None:
        """Queries of a work group; None if they do not fit its shared memory."""
        groups = product([a.extent for a in task.axes[:-2]])
        count = estimate(attention_of(task).rows[0].extent)
        target = ctx.target
        many = estimate(groups) * -(-count // 32) >= target.compute_units
        menu = (4,) if count <= 4 else (32, 16) if many else (16,)
        return next((q for q in menu if self.shared(q) <= min(_SHARED, target.shared_memory)), None)

    def shared(self, queries: int) -> int:
        d4, v4 = -(-self.size // 4), -(-self.width // 4)
        return 16 * (_KEYS * (max(d4, v4) + 1) + queries * (d4 + 1)) + 4 * queries * (_KEYS + 1)

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = self._wrapper("gpu_attention", task, ctx, sizes_as_params)
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
        note = attention_of(task)
        groups = (ceildiv(note.rows[0].extent, queries), as_int(1), product([a.extent for a in note.batch]))
        written = w.finish(call, groups, (_INVOCATIONS, 1, 1), "attention", "AttentionParams")
        written.shared = self.shared(queries)
        written.flops = self._flops(task)
        return written


def _padded(size: int) -> int:
    """Of a row, which is read eight elements at a time."""
    return -(-size // 8) * 8


@dataclass(frozen=True)
class _MatrixFlash(_Attention):
    """On matrix units (kernels/gpu_attention_matrix.slang)."""

    unit: ClassVar[int] = 8

    def fits(self, task: Task, ctx: Context) -> bool:
        return self.tile(task, ctx) is not None

    def tile(self, task: Task, ctx: Context) -> AttentionTile | None:
        note = attention_of(task)
        batch = estimate(product([a.extent for a in note.batch]))
        rows = likely_rows(note.rows[0].extent)
        return attention_tile(batch, rows, _padded(self.size), _padded(self.width), ctx.target)

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = self._wrapper("gpu_attention_matrix", task, ctx, sizes_as_params)
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source8(w, name.upper(), t.operand.node)
            outer, head, row, _ = t.operand.strides
            w.params(f"t.{name}", offset=t.operand.offset // 8, batch=outer // 8, head=head // 8, row=row // 8)
        tile = self.tile(task, ctx)
        assert tile is not None
        call = (
            f"attention_matrix<Q, K, V, F, E, {_padded(self.size)}, {_padded(self.width)}, {self.width}, {tile.subgroups}, "
            f"{tile.bands}, {tile.keys}, {int(self.causal)}>(P.t, gid, li);"
        )
        note = attention_of(task)
        groups = (ceildiv(note.rows[0].extent, tile.queries), as_int(1), product([a.extent for a in note.batch]))
        written = w.finish(
            call, groups, (tile.invocations, 1, 1), "attention_matrix", "MatrixAttentionParams", ["gpu_attention"]
        )
        written.shared = tile.shared(_padded(self.size), _padded(self.width))
        written.needs = MATRIX_UNITS | QUADS | VOTES
        written.flops = self._flops(task)
        return written
