"""What attention's mask excludes: conditions, without which a score is -inf, and bounds, by which a kernel finds the keys that any
of many queries may leave without trying each pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Index, Op, binary, const, ints_of, loads, unary, walk
from lapilli.ir.integer import Var, of
from lapilli.ir.node import Node

_MOST = 4
"""Bounds that a kernel compares."""
_FAR = 1 << 30
"""Offsets of places below which sums with them do not leave 32 bits."""


def conditions(score: Expr, reduction: Node) -> Iterator[Expr]:
    """Without which a finite score becomes -inf."""
    while (found := _masked(score)) is not None and not _reads_node(found[0], reduction):
        yield found[0]
        score = found[1]


def before_the_query(score: Expr, axes: Sequence[Var]) -> Expr | None:
    """The score of keys whose place is at most that of the query, if causal attention's condition is the last of the score's
    operations; None otherwise. axes: the scores' task's, of which the last are query and key.
    """
    found = _masked(score)
    if found is None:
        return None
    condition, rest = found
    if not isinstance(condition, Op) or condition.op != "le" or not all(isinstance(x, Index) for x in condition.args):
        return None
    key, query = (x.value for x in condition.args if isinstance(x, Index))
    return rest if key == of(axes[-1]) and query == of(axes[-2]) else None


def _masked(score: Expr) -> tuple[Expr, Expr] | None:
    """condition and rest, if this is where(condition, rest, -inf) or rest + where(condition, 0, -inf)."""
    if not isinstance(score, Op):
        return None
    if score.op == "where":
        return (score.args[0], score.args[1]) if _is(score.args[2], -math.inf) else None
    for mask, rest in (score.args, score.args[::-1]) if score.op == "add" else ():
        if isinstance(mask, Op) and mask.op == "where" and _is(mask.args[1], 0) and _is(mask.args[2], -math.inf):
            return mask.args[0], rest
    return None


def _is(e: Expr, value: float) -> bool:
    return isinstance(e, Const) and e.value == value


def _reads_node(e: Expr, node: Node) -> bool:
    return any(ld.node is node for ld in loads(e))


@dataclass(frozen=True)
class Span:
    """Bound number `bound` leaves the keys n + offset <= bound; is_first: n + offset >= ~bound."""

    bound: int
    is_first: bool
    offset: int


@dataclass(frozen=True)
class Bounds:
    """A query may leave a key only if each of `keys` is at most that of `rows`, and `others` are true."""

    rows: tuple[Expr, ...] = ()
    keys: tuple[Expr, ...] = ()
    others: tuple[Expr, ...] = ()

    def spans(self, n: Var) -> tuple[Span, ...]:
        """Those that compare the place of key n itself."""
        found = ((k, _place(key, n)) for k, key in enumerate(self.keys))
        return tuple(Span(k, *place) for k, place in found if place is not None)


def bounds(conditions: Sequence[Expr], m: Var, n: Var) -> Bounds | None:
    """The conditions of queries m and keys n as integers that are compared; None if they are anything else."""
    rows: list[Expr] = []
    keys: list[Expr] = []
    others: list[Expr] = []
    for part in _parts(conditions):
        per_query = _reads(part, m)
        found = _compared(part, m, n) if _reads(part, n) else []
        if found is None and per_query:
            return None
        # What all queries have in common is tried as it is, unless it leaves a span of keys.
        if found and (per_query or all(_place(key, n) is not None for key, _ in found)):
            rows += (row for _, row in found)
            keys += (key for key, _ in found)
        elif not per_query:
            others.append(part)
    if not rows:
        rows, keys = [const(0, DType.int32)], [const(0, DType.int32)]
    return Bounds(tuple(rows), tuple(keys), tuple(others)) if len(rows) <= _MOST else None


def _place(key: Expr, n: Var) -> tuple[bool, int] | None:
    """(False, c) for n + c, (True, c) for ~(n + c)."""
    turned = isinstance(key, Op) and key.op == "bitnot"
    inner = key.args[0] if turned else key
    offset = (inner.value - of(n)).value if isinstance(inner, Index) else None
    return (turned, offset) if offset is not None and abs(offset) < _FAR else None


def _parts(conditions: Sequence[Expr]) -> Iterator[Expr]:
    """What must all be true."""
    for e in conditions:
        if isinstance(e, Op) and e.op == "and" and e.dtype is DType.bool:
            yield from _parts(e.args)
        else:
            yield e


def _reads(e: Expr, var: Var) -> bool:
    return any(var in i.atoms() for x in walk(e) for i in ints_of(x))


def _compared(e: Expr, m: Var, n: Var) -> list[tuple[Expr, Expr]] | None:
    """Pairs of something of a key and something of a query, of which the former is at most the latter."""
    if not isinstance(e, Op) or e.op not in ("le", "lt", "ge", "gt", "eq"):
        return None
    a, b = e.args if e.op in ("le", "lt", "eq") else e.args[::-1]
    if any(x.dtype not in (DType.int32, DType.int64) for x in (a, b)) or _reads(a, n) == _reads(b, n):
        return None
    if any(_reads(x, m) and _reads(x, n) for x in (a, b)):
        return None
    if e.op in ("lt", "gt"):  # the least integer becomes the largest, which excludes nothing
        a, b = (a, binary("sub", b, 1)) if _reads(a, n) else (binary("add", a, 1), b)
    found = [(a, b)] if e.op != "eq" else [(a, b), (b, a)]
    return [(x, y) if _reads(x, n) else (unary("bitnot", y), unary("bitnot", x)) for x, y in found]
