"""Attention as one kernel: the tasks that it replaces, and the wrappers around kernels/{gpu_attention*,cpu_attention}.slang."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from lapilli.codegen import choices, masks
from lapilli.codegen.attention_operands import (
    HeadRows,
    head_rows,
    padded,
    paged_rows,
    place,
    places_of,
    score_before_query,
    score_struct,
    scores_of,
    source_of_units,
    type_on_units,
    work_groups,
)
from lapilli.codegen.attention_tiles import SEEN, AttentionTile, attention_tiles
from lapilli.codegen.cpu import are_countable
from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource, linear_groups
from lapilli.codegen.open_rows import RowTemplate, likely_rows
from lapilli.codegen.template import Context, KernelTemplate, simple_task
from lapilli.codegen.wrapper import (
    SHORT,
    SIGNATURE,
    Wrapper,
    batched,
    parts_source,
    source,
    with_sizes,
)
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, loads, rewrite
from lapilli.ir.integer import Atom, Int, IntLike, as_int, ceildiv, maximum, minimum, product
from lapilli.ir.node import Attention, Node, in_state
from lapilli.schedule.layout import estimate
from lapilli.schedule.pages import Pages, in_pages
from lapilli.schedule.task import Task
from lapilli.target import QUADS, UNITS, VOTES

_KEYS = 32  # of a tile
_INVOCATIONS = 128
_FEW_INVOCATIONS = (256, 128)  # for a few queries; the first that fits
_TEAM = 4  # of them, for a key
_LOADS = 8  # of an invocation, for a few queries, at once
_FEW_ROWS = 8  # queries, of heads that are done together
_OTHER_UNITS = (2, 0.5, 4)  # parts of what the device has, which only measuring can choose
_PARTS = 64  # into which keys are shared out at most
_PASS = 4  # rows whose sums are in shared memory at once
_GROUPS = 1  # work groups for each compute unit that are enough
MATRIX = 16  # rows of a fragment
_SHARED = 32768  # bytes of a work group at most: with more, too few of them are on a compute unit at once


def choose(task: Task, ctx: Context) -> bool:
    """Selects the template for the last task of attention, if its operands are strided. The tasks that compute scores and
    weights then have one use fewer, and may be dropped by `without_unread`.
    """
    assert task.reduction is not None
    contraction = task.reduction.contraction
    if not isinstance(contraction, Attention):
        return False
    scores, weights = scores_of(contraction, ctx), ctx.tasks.get(contraction.weights.id)
    if scores is None or weights is None:
        return False
    question = choices.of_attention(task, scores, contraction, ctx)
    template = choices.choose(task, question, _candidates(task, scores, contraction, ctx), ctx)
    if template is None:
        return False
    counted = isinstance(template, _FewQueries) and template.joined is not None
    if len({n.id for n in (task.out, *template.operands, *template.scratch)}) + counted > ctx.target.bindings:
        return False
    if isinstance(template, _FewQueries) and template.joined is not None:
        counter = ctx.counters.take(template.group_count or 0)
        template = replace(template, counters=ctx.counters.node, counter=counter)
    task.template, task.members = template, (scores, weights)
    return True


def _candidates(task: Task, scores: Task, note: Attention, ctx: Context) -> Iterator[choices.Candidate[KernelTemplate]]:
    def few() -> Iterator[choices.Candidate[KernelTemplate]]:
        seen: set[int] = set()
        for factor in (1, *_OTHER_UNITS):
            found = _few_queries(scores, note, ctx, max(1, int(ctx.target.compute_units * factor)))
            if found is not None and found.most_parts not in seen:
                seen.add(found.most_parts)
                yield choices.Candidate(f"{_FewQueries.family}: {found.most_parts} parts", found)

    def many(
        kind: type[_MatrixFlash] | type[_Flash] | type[_CpuFlash], dtype: DType | None = None
    ) -> Iterator[choices.Candidate[KernelTemplate]]:
        template = _template(kind, scores, note, ctx, dtype=dtype)
        if template is not None:
            yield from choices.named(kind.family, template.variants(task, ctx))

    if ctx.target.kind != "gpu":
        return many(_CpuFlash) if ctx.target.texel else iter(())
    dtype = _type_on_units(note, ctx)
    on_units = [many(_MatrixFlash, dtype)] if dtype is not None else []
    return choices.in_turn([few(), *on_units, many(_Flash)])


def _type_on_units(note: Attention, ctx: Context) -> DType | None:
    """In which matrix units multiply; None for a few queries, of which they would compute padding above all."""
    many = (note.rows[0].extent.value or MATRIX) >= MATRIX
    return type_on_units(note, (note.q, note.k, note.v), ctx) if many else None


_A = TypeVar("_A", bound="_Attention")


def _template(
    kind: type[_A], scores: Task, note: Attention, ctx: Context, *more: Any, dtype: DType | None = None
) -> _A | None:
    """dtype: the type that operands must have; None: any."""
    batch = [a.extent for a in note.batch]
    q = head_rows(note.q, batch, ctx, kind.unit, dtype)
    k = v = pages = None
    paged = in_pages(note, ctx.views)
    if paged is not None:
        values = (note.k, paged[0]), (note.v, paged[1])
        k, v = (paged_rows(x, found, batch, ctx, kind.unit, dtype) for x, found in values)
        pages = replace(paged[2], number=ctx.place(paged[2].number))
    if k is None or v is None:
        pages = None
        k, v = (head_rows(x, batch, ctx, kind.unit, dtype) for x in (note.k, note.v))
    size, width = note.q.shape[-1].value, note.v.shape[-1].value
    if q is None or k is None or v is None or not size or not width:
        return None
    if k.share != v.share and any(
        t.share > 1 or t.operand.strides[1] != 0 for t in (k, v) if t.share < max(k.share, v.share)
    ):
        return None  # kernels have one number of heads that share keys and values
    return kind(scores, note.causal, q, k, v, pages, size, width, *more)


def _few_queries(scores: Task, note: Attention, ctx: Context, units: int) -> _FewQueries | _Join | None:
    """The template for a few queries; None for many, or what it does not fit. units: for which keys are shared out."""
    queries = note.rows[0].extent.value
    if not queries or queries > _FEW_ROWS or (queries > 1 and note.causal):
        return None
    made = _template(_FewQueries, scores, note, ctx, note, units, _FEW_INVOCATIONS[0])
    if made is None or max(-(-d // 4) for d in (made.size, made.width)) > _INVOCATIONS:
        return None
    limit = min(_SHARED, ctx.target.shared_memory)
    sized = (replace(made, invocations=size) for size in _FEW_INVOCATIONS if size <= ctx.target.invocations)
    made = next((x for x in sized if x.shared <= limit), None)
    if made is None:
        return None
    if made.most_parts == 1:
        return made
    batch = product([a.extent for a in note.batch])
    rows = batch * queries * made.most_parts
    parts = Node((rows, as_int(made.columns + 4)), DType.float32, f"{note.scores.name}_parts", note.scores.origin)
    ctx.dense(parts)
    if made.group_count is not None and ctx.target.between_groups:
        return replace(made, joined=parts)
    step = simple_task(parts, [*scores.origins[:1]], "attention, shared out")
    step.template = made
    return _Join(made, parts, step)


@dataclass(frozen=True)
class _Attention(RowTemplate):
    """softmax(scores) v. scores: the task of the scores. size: of a row of q and k; width: of a row of v. unit: elements that the
    kernel reads at a time.
    """

    unit: ClassVar[int] = 1
    family: ClassVar[str]

    scores: Task
    causal: bool
    q: HeadRows
    k: HeadRows
    v: HeadRows
    pages: Pages | None  # of keys and values
    size: int
    width: int

    @property
    def own_operands(self) -> list[Node]:
        read = [ld.node for ld in loads(self.scores.value) if ld.node is not self.scores.reduction]
        read += self.pages.read if self.pages is not None else []
        return [self.q.operand.node, self.k.operand.node, self.v.operand.node, *read]

    def row_count(self, task: Task) -> Int:
        return attention_of(task).rows[0].extent

    def write_tile(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    @abstractmethod
    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource: ...

    def _wrapper(self, module: str, task: Task, ctx: Context, sizes_as_params: bool) -> Wrapper:
        """With the epilogue, the scores' function and the sizes."""
        note = attention_of(task)
        rows, keys = note.rows[0].extent, note.inner.extent
        w = Wrapper(task, ctx, module, sizes_as_params=sizes_as_params)
        w.epilogue(rows, as_int(self.width), batched(task))
        score_struct(w, self.scores)
        self._pages(w)
        heads: IntLike = note.batch[-1].extent if note.batch else 1
        w.params(L=rows, S=keys, heads=heads, share=max(self.k.share, self.v.share))
        return w

    def _pages(self, w: Wrapper) -> None:
        """struct N: where pages of keys and values lie."""
        rows, lines, number = 0, "", "b"
        if self.pages is not None:
            names: dict[Atom, str] = {self.pages.outer: "int(b)", self.pages.page: "int(k)"}
            e = Emitter(w.kernel, names, None, {}, "        ")
            rows, number = self.pages.rows, e.integer(self.pages.number)
            lines = e.text()
        w.structs.append(
            f"struct N : IPages\n{{\n    static const int SIZE = {rows};\n    static uint page(uint b, uint k)\n    {{\n"
            f"{lines}        return uint({number});\n    }}\n}};\n"
        )

    def _keep(self, w: Wrapper) -> bool:
        """struct M: whether a mask leaves a key. Others are not read if they are entries of a cache: it may not be filled yet. What
        excludes other keys adds -inf to their scores, which NaN and infinities outlast, and so it is with their values. Returns
        whether there is such a mask.
        """
        assert self.scores.reduction is not None
        cached = all(in_state(t.operand.node) for t in (self.k, self.v))
        m, n, mapping, places = places_of(self.scores)
        found = masks.conditions(self.scores.value, self.scores.reduction) if cached else ()
        conditions = [rewrite(condition, mapping) for condition in found]
        bounds = masks.bounds(conditions, m, n) or masks.Bounds()
        spans = bounds.spans(n)
        searched = bool(conditions) and (len(spans) < len(bounds.keys) or bool(bounds.others) or not bounds.keys)

        def function(head: str, values: Sequence[Expr], result: Callable[[list[str]], str]) -> str:
            e = Emitter(w.kernel, places, None, {}, "        ")
            texts = [e.value(value) for value in values]
            return f"    static {head}\n    {{\n{e.text()}        return {result(texts)};\n    }}\n"

        def within(texts: list[str]) -> str:
            count = len(bounds.keys)
            compared = [f"{key} <= bounds[{k}]" for k, key in enumerate(texts[:count])]
            return " && ".join([*compared, *texts[count:]]) or "true"

        w.structs.append(
            "struct M : IKeep\n{\n"
            f"    static const int BOUNDS = {len(bounds.rows)};\n"
            f"    static const int SPANS = {len(spans)};\n"
            f"    static const int SEARCH = {int(searched)};\n"
            + function(f"bool keeps({SIGNATURE})", conditions, lambda texts: " && ".join(texts) or "true")
            + function("int4 bounds(uint b, uint m)", bounds.rows, lambda x: f"int4({', '.join([*x, *'0000'][:4])})")
            + function("bool is_within(uint b, uint n, int4 bounds)", [*bounds.keys, *bounds.others], within)
            + _span(spans)
            + "};\n"
        )
        return bool(conditions)

    def _flops(self, task: Task) -> Int:
        note = attention_of(task)
        batch = product([a.extent for a in note.batch])
        return batch * note.rows[0].extent * note.inner.extent * (2 * (self.size + self.width))


def _span(spans: Sequence[masks.Span]) -> str:
    """A function: the first key that bounds leave, and the one behind the last."""
    first, end = ["0"], ["count"]
    for s in spans:  # of n + offset
        if s.is_first:
            first.append(f"clamp(~bounds[{s.bound}], {s.offset}, count + ({s.offset})) - ({s.offset})")
        else:
            before = s.offset - 1
            end.append(f"clamp(bounds[{s.bound}], {before}, count + ({before})) - ({before})")

    def reduced(function: str, texts: list[str]) -> str:
        return texts[0] if len(texts) == 1 else f"{function}({texts[0]}, {reduced(function, texts[1:])})"

    return (
        "    static uint2 span(int4 bounds, uint keys)\n    {\n        int count = int(keys);\n"
        f"        return uint2({reduced('max', first)}, {reduced('min', end)});\n    }}\n"
    )


def attention_of(task: Task) -> Attention:
    assert task.reduction is not None and isinstance(task.reduction.contraction, Attention)
    return task.reduction.contraction


@dataclass(frozen=True)
class _Flash(_Attention):
    """On any GPU (kernels/gpu_attention.slang). queries: of a work group."""

    family: ClassVar[str] = "attention"

    queries: int = 0

    def with_tile(self, tile: int) -> _Flash:
        return replace(self, queries=tile)

    @property
    def variant(self) -> str:
        return f"{self.queries} queries"

    def for_rows(self, count: int, task: Task, ctx: Context) -> list[int]:
        """Queries of a work group: those that fit its shared memory, the one first that is taken without measuring."""
        groups = product([a.extent for a in task.axes[:-2]])
        target = ctx.target
        many = estimate(groups) * -(-count // 32) >= target.compute_units
        usual = (4,) if count <= 4 else (32, 16) if many else (16,)
        fitting = [q for q in usual if self.shared(q) + SEEN <= min(_SHARED, target.shared_memory)]
        others = [q for q in (32, 16, 4) if q not in fitting and self.shared(q) + SEEN <= target.shared_memory]
        return [*fitting, *others] if fitting else []

    def shared(self, queries: int) -> int:
        d4, v4 = -(-self.size // 4), -(-self.width // 4)
        return 16 * (_KEYS * (max(d4, v4) + 1) + queries * (d4 + 1)) + 4 * queries * (_KEYS + 1)

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = self._wrapper("gpu_attention", task, ctx, sizes_as_params)
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source(w, name.upper(), t.operand.node, vector=t.wide)
            place(w, name, t, 4 if t.wide else 1)
        queries, masked = self.queries, self._keep(w)
        wide = ", ".join(str(int(t.wide)) for t in (self.q, self.k, self.v))
        call = (
            f"attention<Q, K, V, N, F, M, E, {self.size}, {self.width}, {wide}, {queries}, {_KEYS}, {_INVOCATIONS}, "
            f"{int(self.causal)}, {int(masked)}>(P.t, gid, li);"
        )
        note = attention_of(task)
        groups = (ceildiv(note.rows[0].extent, queries), as_int(1), product([a.extent for a in note.batch]))
        written = w.finish(call, groups, (_INVOCATIONS, 1, 1), "attention", "AttentionParams")
        written.shared = self.shared(queries) + SEEN * masked
        written.flops = self._flops(task)
        return written


_REGISTERS = 128
"""Sums of an invocation on a CPU: rows times columns. With more, the driver takes long to compile it."""
_WIDEST = 128  # row on a CPU
_OWN_ROWS = 96  # up to which width many queries and keys are faster so, too; with more, invocations have too few rows
_MANY = 512  # queries and keys
_CPU_INVOCATIONS = 8


@dataclass(frozen=True)
class _CpuFlash(_Attention):
    """On drivers of type CPU (kernels/cpu_attention.slang). rows: of an invocation."""

    unit: ClassVar[int] = 4
    family: ClassVar[str] = "attention on CPUs"

    rows: int = 0

    def with_tile(self, tile: int) -> _CpuFlash:
        return replace(self, rows=tile)

    @property
    def variant(self) -> str:
        return f"{self.rows} rows"

    @property
    def share(self) -> int:
        """Heads that read the same keys."""
        return max(self.k.share, self.v.share)

    def for_rows(self, count: int, task: Task, ctx: Context) -> list[int]:
        """Rows of an invocation, of which a quad has four."""
        note, widest = attention_of(task), max(self.size, self.width)
        batches = product([a.extent for a in note.batch])
        if widest > _WIDEST or self.size % 4 != 0 or self.width % 4 != 0 or not are_countable([batches], ctx.target):
            return []
        likely = likely_rows(self.row_count(task))  # not `count`: an open number has one kernel for all, or none
        if widest > _OWN_ROWS and not self.causal and min(likely, estimate(note.inner.extent)) >= _MANY:
            return []  # 1,024 queries and keys of 128 numbers, 8 heads: two products take 75 ms, this takes 104
        fitting = [rows for rows in (4, 2, 1) if rows * widest <= _REGISTERS]
        few = [rows for rows in fitting if 4 * rows <= max(count * self.share, 4)]
        return [*few, *(rows for rows in fitting if rows not in few)]

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = self._wrapper("cpu_attention", task, ctx, sizes_as_params)
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source(w, name.upper(), t.operand.node, vector=True)
            place(w, name, t, 4)
        masked, note = self._keep(w), attention_of(task)
        batches = product([a.extent for a in note.batch]) // self.share
        blocks = ceildiv(note.rows[0].extent * self.share, 4 * self.rows)
        groups, group = linear_groups(blocks * batches * 4, _CPU_INVOCATIONS)
        call = (
            f"attention<Q, K, V, N, F, M, E, {self.size}, {self.width}, {self.rows}, {int(self.causal)}, {int(masked)}>"
            f"(P.t, {w.kernel.param(batches)}, uint({group}) * {_CPU_INVOCATIONS} + li, gid.x);"
        )
        written = w.finish(call, groups, (_CPU_INVOCATIONS, 1, 1), "attention", "AttentionParams", ["gpu_attention"])
        written.needs = QUADS
        written.flops = self._flops(task)
        return written


@dataclass(frozen=True)
class _MatrixFlash(_Attention):
    """On matrix units (kernels/gpu_attention_matrix.slang)."""

    unit: ClassVar[int] = 8
    family: ClassVar[str] = "attention on matrix units"

    tile: AttentionTile | None = None  # None: not chosen yet

    def with_tile(self, tile: AttentionTile) -> _MatrixFlash:
        return replace(self, tile=tile)

    def for_rows(self, count: int, task: Task, ctx: Context) -> list[AttentionTile]:
        batch = estimate(product([a.extent for a in attention_of(task).batch]))
        return attention_tiles(batch, count, padded(self.size), padded(self.width), ctx.target)

    @property
    def variant(self) -> str:
        return str(self.tile)

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        w = self._wrapper("gpu_attention_matrix", task, ctx, sizes_as_params)
        note = attention_of(task)
        dtype = note.weights.dtype
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source_of_units(w, name.upper(), t, dtype)
        before = score_before_query(w, self.scores, self.causal)
        tile, masked = self.tile, self._keep(w)
        assert tile is not None
        blocks, batch = ceildiv(note.rows[0].extent, tile.queries), product([a.extent for a in note.batch])
        heads_first, groups = work_groups(blocks, batch, self.causal, ctx.target)
        call = (
            f"attention_matrix<{SHORT[dtype]}, Q, K, V, N, F, {before}, M, E, {padded(self.size)}, "
            f"{padded(self.width)}, {self.width}, {tile.subgroups}, {tile.keys}, {int(self.causal)}, {int(masked)}, "
            f"{int(heads_first)}>(P.t, gid, li);"
        )
        written = w.finish(
            call, groups, (tile.invocations, 1, 1), "attention_matrix", "MatrixAttentionParams", ["gpu_attention"]
        )
        written.shared = tile.shared(padded(self.size), padded(self.width)) + SEEN * masked
        written.needs = UNITS[dtype] | QUADS | VOTES
        written.flops = self._flops(task)
        return written


@dataclass(frozen=True)
class _FewQueries(_Attention):
    """For a few queries, on any GPU (kernels/gpu_attention_few.slang): the result, or with many keys parts of it."""

    family: ClassVar[str] = "attention of a few queries"

    note: Attention
    units: int  # for which keys are shared out
    invocations: int
    joined: Node | None = None  # parts that its work groups put together themselves, ...
    counters: Node | None = None  # ... and where they count them
    counter: int = 0  # the first of its own, in bytes

    def with_tile(self, tile: None) -> _FewQueries:
        return self

    def for_rows(self, count: int, task: Task, ctx: Context) -> list[None]:
        return [None]  # the number of queries is fixed

    @property
    def operands(self) -> list[Node]:
        return [*self.own_operands, *([self.counters] if self.counters is not None else [])]

    @property
    def scratch(self) -> list[Node]:
        return [self.joined] if self.joined is not None else []

    @property
    def queries(self) -> int:
        return self.note.rows[0].extent.value or 1

    @property
    def columns(self) -> int:
        """Of a row of values, in whole vectors."""
        return -(-self.width // 4) * 4

    @property
    def group(self) -> int:
        """Heads that share keys and are done together."""
        share = self.k.share if self.k.share == self.v.share else 1
        return max(g for g in range(1, share + 1) if share % g == 0 and g * self.queries <= _FEW_ROWS)

    @property
    def group_count(self) -> int | None:
        """Of work groups beside each other; None: it is open."""
        return (product([a.extent for a in self.note.batch]) // self.group).value

    @property
    def keys(self) -> int:
        """Of a tile."""
        return self.invocations // _TEAM

    @property
    def most_parts(self) -> int:
        bound = self.note.inner.extent.bounds[1]
        groups = estimate(product([a.extent for a in self.note.batch])) // self.group
        busy = -(-_GROUPS * self.units // max(groups, 1))
        return min(_PARTS, busy, max(1, -(-bound // self.keys)) if bound is not None else _PARTS)

    @property
    def parts(self) -> Int:
        """Work groups of a head; those that are left without keys, since a mask takes them out, have nothing to do."""
        return minimum(maximum(ceildiv(self.note.inner.extent, self.keys), 1), self.most_parts)

    @property
    def shared(self) -> int:
        rows = self.group * self.queries
        numbers = rows * self.invocations + 2 * rows * self.keys + 2 * rows + 2
        sums = 4 * min(rows, _PASS) * self.invocations
        parts = rows * self.most_parts if self.most_parts > 1 else 0
        joining = 16 * -(-2 * parts // 4) + 16 * -(-parts // 4)
        return 16 * rows * -(-self.size // 4) + 16 * -(-numbers // 4) + 4 * sums + joining

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        note, whole = self.note, self.most_parts == 1
        w = Wrapper(task, ctx, "gpu_attention_few", sizes_as_params=sizes_as_params)
        if whole or self.joined is not None:
            w.epilogue(note.rows[0].extent, as_int(self.width), batched(task))
        else:
            w.epilogue(task.out.shape[0], task.out.shape[1], batched(task))
        score_struct(w, self.scores)
        self._keep(w)
        self._pages(w)
        heads: IntLike = note.batch[-1].extent if note.batch else 1
        w.params(S=note.inner.extent, heads=heads, share=max(self.k.share, self.v.share), parts=self.parts)
        for name, t in (("q", self.q), ("k", self.k), ("v", self.v)):
            source(w, name.upper(), t.operand.node, vector=t.wide)
            place(w, name, t, 4 if t.wide else 1)
        wide = ", ".join(str(int(t.wide)) for t in (self.q, self.k, self.v))
        parts = parts_source(w, self.joined, self.counters, self.counter)
        mode = 1 if whole else 2 if self.joined is not None else 0
        call = (
            f"attention_few<Q, K, V, N, F, M, E, {parts}, {self.size}, {self.width}, {wide}, {self.queries}, {self.group}, "
            f"{self.most_parts}, {self.invocations}, {_TEAM}, {mode}, {_LOADS}>(P.t, gid, li);"
        )
        groups = (self.parts, as_int(1), product([a.extent for a in note.batch]) // self.group)
        written = w.finish(
            call, groups, (self.invocations, 1, 1), "attention_few", "FewQueriesParams", ["gpu_attention", "parts"]
        )
        written.shared = self.shared
        batch = product([a.extent for a in note.batch])
        written.flops = batch * note.inner.extent * (2 * self.queries * (self.size + self.width))
        return written


@dataclass(frozen=True)
class _Join(KernelTemplate):
    """Puts the parts of `_FewQueries` together."""

    made: _FewQueries
    parts: Node
    step: Task

    @property
    def most_parts(self) -> int:
        return self.made.most_parts

    @property
    def steps(self) -> tuple[Task, ...]:
        return (self.step,)

    @property
    def operands(self) -> list[Node]:
        return [self.parts]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        made, note = self.made, attention_of(task)
        w = Wrapper(task, ctx, "gpu_attention_few", sizes_as_params=sizes_as_params)
        w.epilogue(note.rows[0].extent, as_int(made.width), batched(task))
        source(w, "X", self.parts, vector=True)
        w.params(parts=made.parts)
        call = f"attention_join<X, E, {made.width}, {made.queries}, {made.most_parts}, {_INVOCATIONS}>(P.t, gid, li);"
        groups = (as_int(1), as_int(made.queries), product([a.extent for a in note.batch]))
        written = w.finish(call, groups, (_INVOCATIONS, 1, 1), "attention_join", "JoinParams", ["gpu_attention"])
        written.shared = 16 * _INVOCATIONS + -(-8 * made.most_parts // 16) * 16
        return written
