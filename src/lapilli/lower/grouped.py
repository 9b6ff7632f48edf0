"""Matrix products of groups of rows, as in mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, where
from lapilli.ir.integer import Int, maximum
from lapilli.ir.node import Node
from lapilli.lower.matmul import product
from lapilli.lower.registry import Call, lowering


@lowering(torch.ops.aten._grouped_mm.default)
def grouped_mm(
    call: Call, a: Node, b: Node, ends: Node | None = None, bias: Node | None = None, out_dtype: Any = None
) -> Node:
    """The product of each group of rows, columns or inner elements with its own matrix. ends [G]: the end of each group.

    Groups of rows: [S, k] @ [G, k, n] -> [S, n]. Of columns: [G, m, k] @ [k, S] -> [m, S]. Of inner elements: [m, S] @ [S,
    n] -> [G, m, n]. Without `ends`: [G, m, k] @ [G, k, n] -> [G, m, n]. Elements in no group are zero.
    """
    if bias is not None:
        raise TypeError("a grouped matrix product with a bias is not supported, as in torch")
    if ends is None:
        return product(call, a, b, batch=1)
    kind, inner, offsets = call.dtype.compute, a.shape[-1], ends
    zero, groups = const(0, kind), ends.shape[0]

    def factor(x: Node, at: list[Int]) -> Expr:
        return cast_to(load(x, at), kind)

    if a.rank == b.rank:

        def part(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
            g, row, column = at
            start = where(binary("gt", index(g), 0), load(offsets, [maximum(g - 1, 0)]), const(0))
            inside = binary("and", binary("ge", index(r[0]), start), binary("lt", index(r[0]), load(offsets, [g])))
            return where(inside, factor(a, [row, r[0]]) * factor(b, [r[0], column]), zero)

        return call.reduce("sum", part, call.shape, [inner])
    axis = 0 if a.rank == 2 else 1  # of the result that is divided into groups
    group = call.reduce(
        "sum",
        lambda at, r: cast_to(binary("le", load(offsets, [r[0]]), index(at[0])), DType.int32),
        [call.shape[axis]],
        [groups],
        dtype=DType.int32,
        name="_group",
    )

    def term(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        row, column = at
        number = load(group, [at[axis]])
        g = indirect(number, groups)
        left, right = ([row, r[0]], [g, r[0], column]) if axis == 0 else ([g, row, r[0]], [r[0], column])
        return where(binary("lt", number, index(groups)), factor(a, left) * factor(b, right), zero)

    return call.reduce("sum", term, call.shape, [inner])
