"""What kernels of attention read: rows of queries, keys and values by head, and how scores follow from products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lapilli.codegen import masks
from lapilli.codegen.emit import Emitter
from lapilli.codegen.packing import can_be_stored_as, gathered
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import SIGNATURE, Wrapper, all_multiples, batched, source8
from lapilli.ir.axes import index_of
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, rewrite, substitute
from lapilli.ir.integer import Atom, Int, Var, as_int, of
from lapilli.ir.node import Attention, AttentionGradient, Input, Matmul, Node, in_state
from lapilli.schedule.contraction import Operand, merged, operand
from lapilli.schedule.layout import estimate, is_row_major
from lapilli.schedule.pages import Paged
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task
from lapilli.target import Target


@dataclass(frozen=True)
class HeadRows:
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


def type_on_units(note: Attention | AttentionGradient, operands: Sequence[Node], ctx: Context) -> DType | None:
    """The type in which matrix units multiply these operands: that of the weights. None if the units lack it, or if an operand is
    computed in another type.
    """
    dtype = note.weights.dtype
    short = dtype.is_short_float and ctx.target.multiplies(dtype)
    return dtype if short and all(_can_be(dtype, x, ctx) for x in operands) else None


def _can_be(dtype: DType, x: Node, ctx: Context) -> bool:
    """Whether a value is of this type, or may be rounded to it. A view is of the type in which the model computes, whatever the
    memory holds that it reads. A cache in another type is not copied: some of its entries may not be filled yet.
    """
    root = _root(x, ctx)
    if _lies_in(dtype, root):
        return True
    return not in_state(root) and (x.dtype is dtype or can_be_stored_as(dtype, root))


def _root(x: Node, ctx: Context) -> Node:
    """The value whose memory is read, seen through views."""
    return chase(x, tuple(as_int(0) for _ in x.shape), dict(ctx.views))[0]


def _lies_in(dtype: DType | None, node: Node) -> bool:
    """Whether kernels that read this type (None: any) take a value as it lies: they convert codes."""
    return dtype is None or node.dtype in (dtype, DType.code)


def paged_rows(
    x: Node, found: Paged, batch: Sequence[Int], ctx: Context, unit: int, dtype: DType | None = None
) -> HeadRows | None:
    """A value in pages: the strides of outer batches are those of pages. None if the kernel cannot read it as it lies. dtype: as
    for `head_rows`.
    """
    if found.root.id not in ctx.layouts or not ctx.is_whole(found.root) or not _lies_in(dtype, found.root):
        return None
    share = (batch[-1] // x.shape[-3]).value
    offset = ctx.layouts[found.root.id].offset(found.place)
    strides = [offset.step(a) for a in (found.number, found.head, found.within, found.column)]
    rest = substitute(offset, {found.number: 0, found.head: 0, found.within: 0, found.column: 0})
    if not share or None in strides or rest.atoms():
        return None
    made = Operand(found.root, rest, tuple(as_int(s or 0) for s in strides))
    return HeadRows(made, share, x.shape[-1]) if _in_vectors(made, x.shape[-1], unit) else None


def head_rows(x: Node, batch: Sequence[Int], ctx: Context, unit: int, dtype: DType | None = None) -> HeadRows | None:
    """[*batch, rows, columns] in memory, copied if a kernel that reads `unit` elements at a time cannot read it as it lies. A
    dimension of size 1 is broadcast; a last batch dimension that divides the heads is shared. dtype: the type that it must have,
    if it is no code.
    """
    axes = [Var(f"a{d}", size) for d, size in enumerate(x.shape)]
    share = 1
    if batch and x.rank > 2 and x.shape[-3] not in (1, batch[-1]):
        ratio = batch[-1] // x.shape[-3]
        if ratio.value is None:
            return None
        share = ratio.value
    index = tuple(map(index_of, axes))
    missing = [as_int(0)] * (len(batch) + 2 - x.rank)

    def outer_of(found: Operand | None) -> Int | None:
        return merged([*missing, *found.strides][: len(batch)][:-1], batch[:-1]) if found is not None else None

    lies = operand(x, index, [None if a.extent == 1 else a for a in axes], ctx.views, ctx.layouts)
    fits = lies is not None and ctx.is_whole(lies.node) and _in_vectors(lies, x.shape[-1], unit)
    found = _in_type(dtype, lies, ctx) if lies is not None and fits else None
    outer = outer_of(found)
    if found is None or outer is None:
        found = gathered(x, index, [[] if a.extent == 1 else [a] for a in axes], ctx, unit, dtype)
        outer = outer_of(found)
        if outer is None or not ctx.is_whole(found.node):  # some of the outer batches are broadcast
            return None
    strides = (*missing, *found.strides)
    head = strides[len(batch) - 1] if batch else as_int(0)
    return HeadRows(Operand(found.node, found.offset, (outer, head, *strides[-2:])), share, x.shape[-1])


def _in_type(dtype: DType | None, x: Operand, ctx: Context) -> Operand | None:
    """An operand as it lies; or in a copy of this type of the whole input, which all that read the input have in common, and which
    the host can make (see `schedule/rounded_inputs.py`). None for what the model computes in another type.
    """
    if _lies_in(dtype, x.node):
        return x
    if not isinstance(x.node, Input) or not is_row_major(ctx.layouts[x.node.id]):
        return None
    key = ("in type", x.node.id, dtype)
    if key not in ctx.copies:
        ctx.copies[key] = ctx.packed("rounded", x.node, x.node.shape, lambda *at: ([], ctx.read(x.node, at)), dtype)
    return Operand(ctx.copies[key], x.offset, x.strides)


def place(w: Wrapper, name: str, t: HeadRows, unit: int) -> None:
    """The parameters of type Strides, in vectors of `unit` elements."""
    outer, head, row, column = t.operand.strides
    w.params(
        f"t.{name}", offset=t.operand.offset // unit, batch=outer // unit, head=head // unit, row=row // unit,
        column=1 if unit > 1 else column,
    )  # fmt: skip


def padded(size: int) -> int:
    """Of a row, which is read eight elements at a time."""
    return -(-size // 8) * 8


def source_of_units(w: Wrapper, name: str, t: HeadRows, dtype: DType) -> None:
    """struct `name`, by which matrix units' kernels read `t` in this type, and its parameters of type Strides8."""
    source8(w, name, t.operand.node, dtype)
    outer, head, row, _ = t.operand.strides
    w.params(f"t.{name.lower()}", offset=t.operand.offset // 8, batch=outer // 8, head=head // 8, row=row // 8)


def scores_of(note: Attention | AttentionGradient, ctx: Context) -> Task | None:
    """The task that computes the scores, if it is a product with pointwise operations."""
    scores = task_of(note.scores, ctx)
    is_product = (
        scores is not None and scores.reduction is not None and isinstance(scores.reduction.contraction, Matmul)
    )
    return scores if is_product else None


def task_of(node: Node, ctx: Context) -> Task | None:
    """The task that computes a value, seen through views."""
    return ctx.tasks.get(_root(node, ctx).id)


def places_of(scores: Task) -> tuple[Var, Var, dict[Atom, Int], dict[Atom, str]]:
    """Query and key, the axes of the scores' task in these terms, and how kernels call them."""
    mapping = batched(scores)
    m, n = Var("m", mapping.rows[0].extent), Var("n", mapping.column.extent)
    return m, n, mapping(of(m), of(n)), {m: "int(m)", n: "int(n)", mapping.var: "int(b)"}


def score_struct(w: Wrapper, scores: Task, name: str = "F", value: Expr | None = None) -> None:
    """A struct of the pointwise operations that the scores' task applies to a product, or of some of them."""
    assert scores.reduction is not None
    _, _, mapping, places = places_of(scores)
    e = Emitter(w.kernel, places, None, {scores.reduction.id: "s"}, "        ")
    text = e.value(rewrite(scores.value if value is None else value, mapping))
    w.structs.append(
        f"struct {name} : IScore\n{{\n    static float apply({SIGNATURE}, float s)\n    {{\n{e.text()}"
        f"        return {text};\n    }}\n}};\n"
    )


def score_before_query(w: Wrapper, scores: Task, causal: bool) -> str:
    """The name of a struct of scores of keys that are not after the query: one without a comparison, if that is known, or F."""
    before = masks.before_the_query(scores.value, scores.axes) if causal else None
    if before is None:
        return "F"
    score_struct(w, scores, "G", before)
    return "G"


_FEW_ROUNDS = 8  # of causal attention's work groups on all compute units


def work_groups(blocks: Int, batch: Int, causal: bool, target: Target) -> tuple[bool, tuple[Int, Int, Int]]:
    """Whether work groups are counted by heads first, and how many there are, of so many blocks of rows in each head of the batch.

    Of causal attention the longest rows of all heads come first, or the last head's are left when others have ended. Many heads
    keep together: they would read what their blocks share from memory again for each.
    """
    heads_first = causal and estimate(blocks) * estimate(batch) <= _FEW_ROUNDS * target.compute_units
    return heads_first, (batch, as_int(1), blocks) if heads_first else (blocks, as_int(1), batch)
