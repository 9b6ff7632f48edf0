"""Gradients of attention on matrix units: the tasks that they replace, and wrappers around kernels/gpu_attention_gradient.slang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lapilli.codegen import choices
from lapilli.codegen.attention_operands import (
    HeadRows,
    head_rows,
    padded,
    score_before_query,
    score_struct,
    scores_of,
    source_of_units,
    task_of,
    type_on_units,
    work_groups,
)
from lapilli.codegen.attention_tiles import AttentionTile, RowSizes, gradient_tiles
from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate, simple_task
from lapilli.codegen.wrapper import SHORT, Wrapper, batched, with_sizes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, const, load, loads
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, ceildiv, of, product
from lapilli.ir.node import AttentionGradient, Node
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task
from lapilli.target import QUADS, UNITS

_UNIT = 8  # elements of an operand that the kernels read at a time
_UNREAD = {"offset": 0, "batch": 0, "head": 0, "row": 0}  # Strides8 of an operand that a kernel does not read


def choose(task: Task, ctx: Context) -> bool:
    """Selects the template for a gradient of attention. The tasks that compute weights and the gradients of scores then have one
    use fewer, and may be dropped by `without_unread`.
    """
    assert task.reduction is not None
    note = task.reduction.contraction
    if not isinstance(note, AttentionGradient) or not ctx.is_whole(task.out):
        return False
    scores = scores_of(note, ctx)
    if scores is None or note.delta.id not in ctx.layouts:
        return False
    if type_on_units(note, (note.q, note.k, note.v, note.grad), ctx) is None:
        return False
    made = _template(scores, note, ctx)
    if made is None:
        return False
    question = choices.of_attention(task, scores, note, ctx)
    template = choices.choose(task, question, choices.named(made.family, made.variants(task, ctx)), ctx)
    if template is None or len({n.id for n in (task.out, *template.operands)}) > ctx.target.bindings:
        return False
    replaced = (scores, task_of(note.weights, ctx), task_of(note.lhs, ctx))
    task.template, task.members = template, tuple({t.out.id: t for t in replaced if t is not None}.values())
    return True


@dataclass(frozen=True)
class _Operands:
    """Of the kernels of one attention. sums: the step that computes the logarithms of its sums of exponentials."""

    q: HeadRows
    k: HeadRows
    v: HeadRows
    grad: HeadRows
    sums: Task


def _operands(scores: Task, note: AttentionGradient, ctx: Context) -> _Operands | None:
    batch, dtype = [a.extent for a in note.batch], note.weights.dtype
    q, k, v, grad = (head_rows(x, batch, ctx, _UNIT, dtype) for x in (note.q, note.k, note.v, note.grad))
    if q is None or k is None or v is None or grad is None or k.share != v.share:
        return None
    if not note.q.shape[-1].value or not note.v.shape[-1].value:
        return None
    return _Operands(q, k, v, grad, _Sums(scores, note, q, k).step(ctx))


def _template(scores: Task, note: AttentionGradient, ctx: Context) -> _Gradient | None:
    of = scores.out.id, note.v.id, note.grad.id
    if of not in ctx.in_common:
        ctx.in_common[of] = _operands(scores, note, ctx)
    found: _Operands | None = ctx.in_common[of]
    return _Gradient(scores, note, found.q, found.k, found.sums, found.v, found.grad) if found is not None else None


@dataclass(frozen=True)
class _OnUnits(KernelTemplate):
    scores: Task
    note: AttentionGradient
    q: HeadRows
    k: HeadRows

    @property
    def size(self) -> int:
        """Of a row of q and k."""
        return self.note.q.shape[-1].value or 0

    @property
    def _read(self) -> list[Node]:
        """Operands of both kernels."""
        read = [ld.node for ld in loads(self.scores.value) if ld.node is not self.scores.reduction]
        return [self.q.operand.node, self.k.operand.node, *read]

    @property
    def _queries(self) -> Int:
        return self.scores.axes[-2].extent

    @property
    def _keys(self) -> Int:
        return self.scores.axes[-1].extent

    @property
    def _batch(self) -> Int:
        return product([a.extent for a in self.note.batch])

    def _wrapper(self, task: Task, ctx: Context, sizes_as_params: bool) -> tuple[Wrapper, str]:
        """With the scores' functions and the sizes; and what the function of keys that are not after the query is called."""
        w = Wrapper(task, ctx, "gpu_attention_gradient", sizes_as_params=sizes_as_params)
        score_struct(w, self.scores)
        before = score_before_query(w, self.scores, self.note.causal)
        heads: IntLike = self.note.batch[-1].extent if self.note.batch else 1
        w.params(L=self._queries, S=self._keys, heads=heads, share=self.k.share)
        return w, before

    def _finished(
        self, w: Wrapper, ctx: Context, name: str, types: str, numbers: list[int], tile: AttentionTile, rows: Int
    ) -> KernelSource:
        """The kernel `name`, of these types and numbers, for so many rows of a batch."""
        blocks, causal = ceildiv(rows, tile.queries), self.note.causal
        heads_first, groups = work_groups(blocks, self._batch, causal, ctx.target)
        counts = [*numbers, tile.subgroups, tile.keys, int(causal), int(heads_first)]
        dtype = self.note.weights.dtype
        call = f"{name}<{SHORT[dtype]}, {types}, {', '.join(map(str, counts))}>(P.t, gid, li);"
        written = w.finish(call, groups, (tile.invocations, 1, 1), name, "GradientParams", ["gpu_attention"])
        written.needs = UNITS[dtype] | QUADS
        return written


@dataclass(frozen=True)
class _Sums(_OnUnits):
    """Logarithms of the sums of exponentials, [batch, queries, 1]."""

    def step(self, ctx: Context) -> Task:
        made = Node(
            (self._batch, self._queries, as_int(1)),
            DType.float32,
            f"{self.note.scores.name}_sums",
            self.note.scores.origin,
        )
        ctx.dense(made)
        task = simple_task(made, [*self.scores.origins[:1]], "attention, logarithms of sums")
        task.template = self
        return task

    @property
    def operands(self) -> list[Node]:
        return self._read

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w, before = self._wrapper(task, ctx, sizes_as_params)
        w.epilogue(self._batch * self._queries, as_int(1), batched(task))
        for name, t in (("Q", self.q), ("K", self.k)):
            source_of_units(w, name, t, self.note.weights.dtype)
        w.params("t.v", **_UNREAD)
        w.params("t.o", **_UNREAD)
        size = padded(self.size)
        sizes = RowSizes((size,))
        tile = gradient_tiles(estimate(self._batch), estimate(self._queries), sizes, ctx.target)[0]
        written = self._finished(w, ctx, "attention_sums", f"Q, K, F, {before}, E", [size], tile, self._queries)
        written.shared = sizes.shared(tile)
        written.flops = self._batch * self._queries * self._keys * (2 * self.size)
        return written


@dataclass(frozen=True)
class _Gradient(_OnUnits):
    """One gradient. sums: the step that computes logarithms of sums."""

    sums: Task
    v: HeadRows
    grad: HeadRows
    tile: AttentionTile | None = None  # None: not chosen yet

    family = "attention's gradient on matrix units"

    @property
    def width(self) -> int:
        """Of a row of v and the result's gradient."""
        return self.note.v.shape[-1].value or 0

    @property
    def steps(self) -> tuple[Task, ...]:
        return (self.sums,)

    @property
    def operands(self) -> list[Node]:
        others = [] if self.note.of == "v" else [self.v.operand.node, self.note.delta]
        return [*self._read, self.grad.operand.node, self.sums.out, *others]

    @property
    def variant(self) -> str:
        return str(self.tile)

    @property
    def _rows(self) -> Int:
        return self._queries if self.note.of == "q" else self._keys

    @property
    def _sizes(self) -> RowSizes:
        return RowSizes((padded(self.size), padded(self.width)))

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        for tile in gradient_tiles(estimate(self._batch), estimate(self._rows), self._sizes, ctx.target):
            yield replace(self, tile=tile)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        note, tile = self.note, self.tile
        assert tile is not None
        w, before = self._wrapper(task, ctx, sizes_as_params)
        of_values = note.of == "v"
        width = self.width if of_values else self.size
        w.epilogue(self._rows, as_int(width), batched(task))
        for name, t in (("Q", self.q), ("K", self.k), *(() if of_values else (("V", self.v),)), ("O", self.grad)):
            source_of_units(w, name, t, self.note.weights.dtype)
        if of_values:
            w.params("t.v", **_UNREAD)
        self._of_queries(w)
        numbers = ["qkv".index(note.of), padded(self.size), padded(self.width), width]
        types = f"Q, K, {'K' if of_values else 'V'}, O, F, {before}, C, E"
        written = self._finished(w, ctx, "attention_gradient", types, numbers, tile, self._rows)
        written.shared = self._sizes.shared(tile)
        products = 2 * (self.size + width + (0 if of_values else self.width))
        written.flops = self._batch * self._queries * self._keys * products
        return written

    def _of_queries(self, w: Wrapper) -> None:
        """struct C: what is known of a query."""
        mapping = batched(self.scores)
        m = Var("m", self._queries)
        axes = mapping(of(m), as_int(0))
        places: dict[Atom, str] = {m: "int(m)", mapping.var: "int(b)"}

        def function(head: str, value: Expr) -> str:
            e = Emitter(w.kernel, places, None, {}, "        ")
            text = e.value(value)
            return f"    static float {head}\n    {{\n{e.text()}        return {text};\n    }}\n"

        b = of(mapping.var) if mapping.var.extent != 1 else as_int(0)
        at = [axes[a] for a in self.scores.axes[:-1]]
        w.structs.append(
            "struct C : IOfQueries\n{\n"
            + function("scale()", const(self.note.scale))
            + function("sums(uint b, uint m)", load(self.sums.out, (b, of(m), as_int(0))))
            + function("delta(uint b, uint m)", const(0.0) if self.note.of == "v" else load(self.note.delta, tuple(at)))
            + "};\n"
        )
