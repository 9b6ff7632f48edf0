"""What becomes of the sums of a product of few rows, one column's or a pair's: the struct `E : IEnds` of row_operands.slang.

Such a kernel waits for memory more than it computes. So what its end reads, as a residual, or a position and then the angles at
that position, is read at the beginning, and comes while the sums are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lapilli.codegen.emit import Emitter
from lapilli.codegen.read_ahead import INDENT, Known
from lapilli.codegen.wrapper import SIGNATURE, BatchMapping, Wrapper
from lapilli.ir.expr import Expr, Load
from lapilli.ir.integer import Atom, Int, Var, of

FIRST, SECOND = "first", "second"
"""What the sums are called there."""
Part = tuple[Mapping[Atom, Int], Callable[[Load], Expr | None] | None]
"""Axes at which the task's value is stored, and what loads in it become."""


def end_of_column(w: Wrapper, rows: Int, columns: Int, mapping: BatchMapping) -> None:
    """struct E, for one column."""
    reduction = w.task.reduction
    assert reduction is not None
    m, n = Var("m", rows), Var("n", columns)
    names: dict[Atom, str] = {m: "int(m)", n: "int(n)", mapping.var: "int(b)"}
    sums = {reduction.id: FIRST if reduction.dtype.is_float else f"asint({FIRST})"}
    write_end(w, names, sums, [(mapping(of(m), of(n)), None)])


def write_end(w: Wrapper, names: dict[Atom, str], sums: Mapping[int, str], parts: Sequence[Part]) -> None:
    """struct E. sums: names of what the parts load, by the ids of nodes."""
    e = Emitter(w.kernel, names, None, dict(sums), INDENT)
    for axes, on_load in parts:
        w.ahead(e, axes, on_load)
    first = len(e.lines)
    for axes, on_load in parts:
        w.store(e, axes, on_load)
    w.structs.append(_text(e.lines[:first], e.lines[first:]))


def _text(before: Sequence[str], after: Sequence[str]) -> str:
    """The struct. before: statements that need no sums; after: those that may."""
    known = Known.of(before, after)
    lines = [
        "struct E : IEnds",
        "{",
        *known.struct_and_read("read", SIGNATURE),
        f"    static void store({SIGNATURE}, float {FIRST}, float {SECOND}, Known known)",
        "    {",
        *known.unpacked,
        *after,
        "    }",
        "};",
    ]
    return "".join(f"{line}\n" for line in lines)
