"""Distances between rows, and products of three tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, unary, where
from lapilli.ir.integer import Int
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, broadcast, decomposition, lowering

aten = torch.ops.aten
Rows = Callable[[tuple[Int, ...], Int], tuple[Expr, Expr]]


def _norm(call: Call, p: float, length: Int, rows: Rows) -> Node:
    """The p-norm of the difference of two rows: rows(output, k) gives element k of both."""

    def term(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        a, b = rows(at, r[0])
        d = unary("abs", a - b)
        if p == 0:
            return where(binary("eq", d, 0.0), const(0.0), const(1.0))
        if p in (1, math.inf):
            return d
        return d * d if p == 2 else binary("pow", d, float(p))

    total = call.reduce("max" if p == math.inf else "sum", term, call.shape, [length], DType.float32)

    def root(*at: Int) -> Expr:
        e = load(total, at)
        if p in (0, 1, math.inf):
            return e
        return unary("sqrt", e) if p == 2 else binary("pow", e, 1 / p)

    return call.map(root)


@lowering(aten._cdist_forward.default)
def cdist(call: Call, a: Node, b: Node, p: float, _: int | None) -> Node:
    """a [..., n, k], b [..., m, k]; result [..., n, m]"""

    def rows(at: tuple[Int, ...], k: Int) -> tuple[Expr, Expr]:
        left, right = broadcast(a, [*at[:-1], k]), broadcast(b, [*at[:-2], at[-1], k])
        return cast_to(load(a, left), DType.float32), cast_to(load(b, right), DType.float32)

    return _norm(call, p, a.shape[-1], rows)


@lowering(aten._pdist_forward.default)
def pdist(call: Call, x: Node, p: float = 2.0) -> Node:
    """Distances of the pairs i < j of n rows, in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    n = x.shape[0]

    def start(i: Expr) -> Expr:
        """The number of the first pair of row i."""
        return binary("floordiv", i * (index(n * 2 - 1) - i), 2)

    firsts = call.reduce(
        "sum",
        lambda at, r: cast_to(binary("le", start(index(r[0] + 1)), index(at[0])), DType.int32),
        call.shape, [n], DType.int32, "_row",
    )  # fmt: skip

    def rows(at: tuple[Int, ...], k: Int) -> tuple[Expr, Expr]:
        i = load(firsts, at)
        j = index(at[0]) - start(i) + i + 1
        pair = [cast_to(load(x, [indirect(e, n), k]), DType.float32) for e in (i, j)]
        return pair[0], pair[1]

    return _norm(call, p, x.shape[1], rows)


@decomposition(aten._trilinear.default)
def trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, expand_a: Sequence[int], expand_b: Sequence[int],
    expand_c: Sequence[int], summed: Sequence[int], unrolled: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The sum over some dimensions of a product, after new dimensions of size 1."""
    for d in expand_a:
        a = a.unsqueeze(d)
    for d in expand_b:
        b = b.unsqueeze(d)
    for d in expand_c:
        c = c.unsqueeze(d)
    return (a * b * c).sum(list(summed))
