"""Batch, layer, group and instance normalisation at inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, index, load, unary
from lapilli.ir.integer import Int
from lapilli.ir.node import Node
from lapilli.lower.reduction import Element, center, count, over_each
from lapilli.lower.registry import Call, lowering
from lapilli.lower.views import reshape_index

aten = torch.ops.aten


def _channel(at: Sequence[Int]) -> Int:
    return at[1] if len(at) > 1 else at[0]


@lowering(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, _: float, eps: float
) -> list[Node]:
    def body(*at: Int) -> Expr:
        c = [_channel(at)]
        e = (load(x, at) - load(mean, c)) * unary("rsqrt", load(variance, c) + eps)
        if weight is not None:
            e = e * load(weight, c)
        return e if bias is None else e + load(bias, c)

    return [call.map(body)]


@lowering(aten.batch_norm.default)
def batch_norm_composite(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node | None, variance: Node | None, training: bool,
    momentum: float, eps: float, _: bool,
) -> Node:  # fmt: skip
    if training or mean is None or variance is None:
        raise TypeError(
            "batch norm without running statistics is not supported; put the model into inference mode with eval()"
        )
    result: Node = batch_norm(call, x, weight, bias, mean, variance, momentum, eps)[0]
    return result


@lowering(aten.native_layer_norm.default, aten.layer_norm.default)
def layer_norm(
    call: Call,
    x: Node,
    shape: Sequence[Any],
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    d = list(range(x.rank - len(shape), x.rank))
    centered, variance = _moments(call, x, d)

    def body(*at: Int) -> Expr:
        e = centered(at) * unary("rsqrt", load(variance, at[: d[0]]) / index(count(x, d), DType.float32) + eps)
        if weight is not None:
            e = e * load(weight, at[d[0] :])
        return e if bias is None else e + load(bias, at[d[0] :])

    result = call.map(body)
    return [result] if call.op.startswith("aten.native") else result


def _moments(call: Call, x: Node, d: Sequence[int]) -> tuple[Element, Node]:
    """x - mean, which is computed where it is read, and the sum of its squares over d."""
    centered = center(call, x, d)
    return centered, over_each(
        call, "sum", x.shape, d, lambda at: centered(at) * centered(at), DType.float32, "_squares"
    )


@lowering(aten.group_norm.default)
def group_norm(
    call: Call, x: Node, groups: int, weight: Node | None = None, bias: Node | None = None, eps: float = 1e-5, *_: Any
) -> Node:
    n, c = x.shape[0], x.shape[1]
    split = (n, Int((), groups), c // groups, *x.shape[2:])
    grouped = call.map(lambda *at: load(x, reshape_index(at, split, x.shape)), shape=split, dtype=x.dtype)
    d = list(range(2, len(split)))
    centered, variance = _moments(call, grouped, d)

    def body(*at: Int) -> Expr:
        g = reshape_index(at, x.shape, split)
        e = centered(g) * unary("rsqrt", load(variance, g[:2]) / index(count(grouped, d), DType.float32) + eps)
        if weight is not None:
            e = e * load(weight, [at[1]])
        return e if bias is None else e + load(bias, [at[1]])

    return call.map(body)


@lowering(aten.native_group_norm.default)
def native_group_norm(
    call: Call, x: Node, weight: Node | None, bias: Node | None, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> list[Node]:
    return [group_norm(call, x, groups, weight, bias, eps)]
