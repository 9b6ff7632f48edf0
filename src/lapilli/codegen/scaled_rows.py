"""Norms inside the products that read them: rows times a number that depends on a sum over the row, as an RMS norm makes them,
y[k] = element[k] * factor(sum of term[k]). The product of such a row is the product of its elements times the factor, so a kernel
that reads whole rows needs no kernel before it: it adds up the terms of the row beside the products, and multiplies in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lapilli.codegen.emit import LANES, Emitter, KernelBuilder, NotVectorizable
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import BatchMapping, Wrapper
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Op, binary, cast_to, const, cost, ints_of, loads, reads, rewrite, walk
from lapilli.ir.integer import Atom, Int, Var, as_int, of
from lapilli.ir.narrow import OPERATIONS
from lapilli.ir.node import Matmul, Node, Reduce
from lapilli.schedule.fuse_reductions import RowFusion
from lapilli.schedule.realize import as_var
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task

_CHEAP = 8
"""Operations for each element that are repeated for each column, beside its product."""
_READS = 4


@dataclass(frozen=True)
class ScaledRows:
    """The rows of a product's left operand. element, term: in the product's axes; factor: of `total`, a load of which is the sum of
    the terms.
    """

    element: Expr
    term: Expr
    factor: Expr
    total: Reduce

    @property
    def reads(self) -> list[Node]:
        found = [ld.node for e in (self.element, self.term, self.factor) for ld in loads(e)]
        return list({n.id: n for n in found if n is not self.total}.values())

    def source(self, w: Wrapper, contraction: Matmul, mapping: BatchMapping, vectors: int) -> None:
        """struct X : IRows. vectors: of four elements that are read at once."""
        e, texts = self._quads(w.kernel, contraction, mapping, vectors)
        names = "lo", "hi"
        values = "".join(f"        {name} = {text};\n" for name, text in zip(names, texts, strict=False))
        outs = "out float4 lo, out float4 hi" if vectors == 2 else "out float4 lo"
        factor, text = self._factor(w.kernel, mapping)
        w.structs.append(
            f"struct X : IRows{4 * vectors}\n{{\n"
            f"    static void load(uint b, uint m, uint k, {outs}, inout float sum)\n    {{\n{e.text()}{values}    }}\n"
            f"    static float factor(uint b, uint m, float sum)\n    {{\n{factor.text()}        return {text};\n    }}\n}};\n"
        )

    def is_vectorizable(self, ctx: Context, contraction: Matmul, mapping: BatchMapping, vectors: int) -> bool:
        kernel = KernelBuilder(ctx.layouts, ctx.target.half, ctx.target.texel)
        try:
            self._quads(kernel, contraction, mapping, vectors)
        except NotVectorizable:
            return False
        return True

    def _quads(
        self, kernel: KernelBuilder, contraction: Matmul, mapping: BatchMapping, vectors: int
    ) -> tuple[Emitter, list[str]]:
        m, k, lane = (
            _rows_axis(contraction),
            Var("k", contraction.inner.extent // (LANES * vectors)),
            Var("lane", as_int(LANES)),
        )
        e = Emitter(kernel, {m: "int(m)", k: "int(k)", mapping.var: "int(b)"}, of(lane), indent="        ")
        texts = []
        for part in range(vectors):
            place = (of(k) * vectors + part) * LANES + of(lane)
            at = {**_axes(contraction, mapping, of(m)), contraction.inner: place}
            texts.append(e.value(rewrite(self.element, at)))
            term = e.value(rewrite(self.term, at))
            e.line(f"sum += dot({term}, float4(1.0f));")
        return e, texts

    def _factor(self, kernel: KernelBuilder, mapping: BatchMapping) -> tuple[Emitter, str]:
        m = Var("m", as_int(1 << 16))
        e = Emitter(kernel, {m: "int(m)", mapping.var: "int(b)"}, None, {self.total.id: "sum"}, "        ")
        return e, e.value(rewrite(self.factor, mapping(of(m), as_int(0))))


def _rows_axis(contraction: Matmul) -> Var:
    count = as_int(1)
    for a in contraction.rows:
        count = count * a.extent
    return Var("m", count)


def _axes(contraction: Matmul, mapping: BatchMapping, m: Int) -> dict[Atom, Int]:
    found = mapping(m, as_int(0))
    return {a: i for a, i in found.items() if a is not contraction.column}


def scaled_rows(task: Task, ctx: Context) -> ScaledRows | None:
    """The left operand of a product, if it is computed as such rows."""
    assert task.reduction is not None
    contraction = task.reduction.contraction
    assert isinstance(contraction, Matmul)
    root, at = chase(contraction.lhs, contraction.lhs_index, dict(ctx.views))
    made = ctx.tasks.get(root.id)
    if made is None or made.row is None or made.row.whole or len(made.row.steps) != 1 or made.partial:
        return None
    row, (step,) = made.row, made.row.steps
    place = place_of(row, at)
    if place is None or step.reduction.op != "sum" or step.body.dtype is not DType.float32:
        return None
    along = contraction.inner
    inner = [a for a in row.inner if a.extent != 1]
    if len(inner) != 1 or not is_whole_row(inner[0], place, along):
        return None
    if any(reads(i, along) for a in row.outer for i in [place[a]]):
        return None
    split = _split(row.value, step.out, set(row.inner), made.out.dtype)
    if split is None:
        return None
    element, factor = split

    def total(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        return cast_to(step.value, ld.dtype) if ld.node is step.out else None

    factor = rewrite(factor, {}, total)
    if any(reads(i, a) for a in row.inner if a.extent != 1 for e in walk(factor) for i in ints_of(e)):
        return None
    found = ScaledRows(rewrite(element, place), rewrite(step.body, place), rewrite(factor, place), step.reduction)
    if cost(found.element) + cost(found.term) > _CHEAP or len(found.reads) > _READS:
        return None
    return found


def place_of(row: RowFusion, at: Sequence[Int]) -> dict[Atom, Int] | None:
    """The axes of a row fusion, for the element of its result at an index."""
    place: dict[Atom, Int] = {a: as_int(0) for a in (*row.outer, *row.inner) if a.extent == 1}
    for stored, i in zip(row.store, at, strict=True):
        axis = as_var(stored)
        if axis is None:
            if stored.value is None:
                return None
            continue
        if axis in place:
            return None
        place[axis] = i
    return place if all(a in place for a in (*row.outer, *row.inner)) else None


def is_whole_row(inner: Var, place: Mapping[Atom, Int], along: Var) -> bool:
    """Whether a product whose sum runs over `along` reads all of a row. A part of one has other sums than the row."""
    return place[inner] == of(along) and inner.extent == along.extent


def _split(value: Expr, total: Node, inner: set[Var], dtype: DType) -> tuple[Expr, Expr] | None:
    """A product as one of factors that do not read `total`, and of those that do."""
    element = factor = const(1.0)
    for e, divides in factors_of(value, [total], dtype):
        if not any(ld.node is total for ld in loads(e)):
            element = binary("div", element, e) if divides else binary("mul", element, e)
        else:
            factor = binary("div", factor, e) if divides else binary("mul", factor, e)
    if factor.dtype is not DType.float32 or not any(ld.node is total for ld in loads(factor)):
        return None
    return element, factor


def factors_of(e: Expr, totals: Collection[Node], dtype: DType, divides: bool = False) -> Iterator[tuple[Expr, bool]]:
    """Factors, apart where they read a total, and whether they divide. A rounding to the type in which the product would be stored
    is left out: nothing is.
    """
    through = isinstance(e, Op) and any(ld.node in totals for ld in loads(e))
    if through and isinstance(e, Op) and e.op == "mul":
        for a in e.args:
            yield from factors_of(a, totals, dtype, divides)
    elif through and isinstance(e, Op) and e.op == "div":
        yield from factors_of(e.args[0], totals, dtype, divides)
        yield from factors_of(e.args[1], totals, dtype, not divides)
    elif through and isinstance(e, Op) and e.op == OPERATIONS.get(dtype):
        yield from factors_of(e.args[0], totals, dtype, divides)
    else:
        yield e, divides
