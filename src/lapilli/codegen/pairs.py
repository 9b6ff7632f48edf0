"""Epilogues of two columns: where what follows a product of a few rows takes two of its columns together, or the same column of two
products of the same rows, one team of invocations computes both. So the halves of a rotation, and a gate with what it lets
through, need no kernel of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lapilli.codegen.row_ends import FIRST, SECOND, Part, write_end
from lapilli.codegen.wrapper import BatchMapping, Wrapper
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, load, loads, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, of
from lapilli.ir.node import Matmul, Node, Reduce
from lapilli.schedule.contraction import Operand
from lapilli.schedule.task import Task

_FIRST, _SECOND = (Node((), DType.float32, name) for name in ("first", "second"))
"""The two sums of a pair, in its epilogue."""


@dataclass(frozen=True)
class Pairs:
    """Which columns are computed together: n and n + step of one matrix, for each n whose bit of `step` is 0 (counting in steps);
    or, with a second product, column n of both. w: the matrix of the second column.
    """

    w: Operand
    step: int = 0
    second: Reduce | None = None

    def count(self, columns: Int) -> Int:
        return columns if self.second is not None else columns // 2

    def write(self, w: Wrapper, columns: Int, mapping: BatchMapping) -> None:
        """struct E : IEnds, and struct L : IPairsOfLines."""
        task = w.task
        assert task.reduction is not None
        m = Var("m", as_int(1 << 16))
        names: dict[Atom, str] = {mapping.var: "int(b)", m: "int(m)"}
        parts: list[Part]
        if self.second is not None:
            n = Var("n", columns)
            names[n] = "int(n)"
            made = {task.reduction.id: _FIRST, self.second.id: _SECOND}

            def sums(ld: Expr) -> Expr | None:
                assert isinstance(ld, Load)
                return load(made[ld.node.id], ()) if ld.node.id in made else None

            parts = [(mapping(of(m), of(n)), sums)]
            lines = ["n", "n"]
        else:
            outer, inner = _pair_axes(columns, self.step)
            names |= {outer: f"int(n / {self.step})", inner: f"int(n % {self.step})"}
            parts = [half(task, mapping, of(m), columns, self.step, (outer, inner), first) for first in (True, False)]
            line = f"n / {self.step} * {2 * self.step} + n % {self.step}"
            lines = [line, f"{line} + {self.step}"]
        write_end(w, names, {_FIRST.id: FIRST, _SECOND.id: SECOND}, parts)
        w.structs.append(
            "struct L : IPairsOfLines\n{\n"
            f"    static uint first(uint n) {{ return {lines[0]}; }}\n"
            f"    static uint second(uint n) {{ return {lines[1]}; }}\n}};\n"
        )


class _Apart(Exception):
    """An epilogue reads other columns than those of a pair."""


def _pair_axes(columns: Int, step: int) -> tuple[Var, Var]:
    return Var("pair", columns // (2 * step)), Var("within", as_int(step))


def half(
    task: Task, mapping: BatchMapping, m: Int, columns: Int, step: int, axes: tuple[Var, Var], first: bool
) -> tuple[dict[Atom, Int], Callable[[Expr], Expr | None]]:
    """The axes of the first or second column of a pair, and what loads of the product become there. Raises _Apart for a load of
    another column.
    """
    reduction = task.reduction
    assert reduction is not None
    note = reduction.contraction
    assert isinstance(note, Matmul)
    outer, inner = axes
    places = [of(outer) * (2 * step) + of(inner), of(outer) * (2 * step) + of(inner) + step]
    at = mapping(m, places[0 if first else 1])
    own = tuple(as_int(0) if a.extent == 1 else at[a] for a in reduction.axes)
    column = reduction.axes.index(note.column)

    def sums(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        if ld.node is not reduction:
            return None
        for k, place in enumerate(places):
            if ld.index == (*own[:column], place, *own[column + 1 :]):
                return load((_FIRST, _SECOND)[k], ())
        raise _Apart

    return at, sums


def step_of(task: Task, mapping: BatchMapping) -> int | None:
    """How far the two columns are apart that a value in the axes of a product reads; None if they are no pairs."""
    reduction = task.reduction
    assert reduction is not None
    note = reduction.contraction
    assert isinstance(note, Matmul)
    column = reduction.axes.index(note.column)
    columns = note.column.extent
    apart = {(ld.index[column] - of(note.column)).value for ld in loads(task.value) if ld.node is reduction} - {0}
    steps = {abs(a) for a in apart if a is not None}
    if None in apart or len(steps) != 1 or columns.value is None:
        return None
    (step,) = steps
    if columns % (2 * step) != 0:
        return None
    m = Var("m", as_int(1 << 16))
    try:
        for first in (True, False):
            axes, found = half(task, mapping, of(m), columns, step, _pair_axes(columns, step), first)
            rewrite(rewrite(task.value, axes), {}, found)
    except _Apart:
        return None
    return step
