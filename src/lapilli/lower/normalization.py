"""Batch, layer and group normalisation, with the statistics that a backward pass needs.

All compute (x - mean) / sqrt(variance + eps) * weight + bias, and differ in the elements over which mean and variance are
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.axes import reshape_index
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, const, index, load, unary
from lapilli.ir.integer import Int
from lapilli.ir.node import Node
from lapilli.lower.reduction import center, count, over, over_each
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten


def _channel(at: Sequence[Int]) -> Int:
    return at[1] if len(at) > 1 else at[0]


def _affine(e: Expr, weight: Node | None, bias: Node | None, at: Sequence[Int]) -> Expr:
    """e * weight + bias, both read at `at`; either may be absent."""
    at = tuple(at)
    if weight is not None:
        e = e * load(weight, at)
    return e if bias is None else e + load(bias, at)


def _other(call: Call, k: int, name: str, value: Callable[..., Expr]) -> Node:
    """Result number k of the call."""
    return replace(call, name=f"{call.name}_{name}", shapes=call.shapes[k:], dtypes=call.dtypes[k:]).map(value)


@lowering(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, _: float, eps: float
) -> list[Node]:
    """x [N, C, *], weight, bias, mean, variance [C] -> the shape of x, normalised by the running statistics; and saved
    statistics, which are empty at inference.
    """

    def body(*at: Int) -> Expr:
        c = [_channel(at)]
        return _affine((load(x, at) - load(mean, c)) * unary("rsqrt", load(variance, c) + eps), weight, bias, c)

    saved = [_other(call, k, f"saved{k}", lambda *at: const(0.0)) for k in range(1, len(call.shapes))]  # empty
    return [call.map(body), *saved]


@lowering(aten._native_batch_norm_legit.no_stats)
def batch_norm_of_batch(
    call: Call, x: Node, weight: Node | None, bias: Node | None, training: bool, momentum: float, eps: float
) -> list[Node]:
    """x [N, C, *], weight and bias [C] -> the shape of x, normalised by the mean and variance of each channel in this
    batch. Also returns the means and the reciprocal standard deviations, both [C].
    """
    d = [k for k in range(x.rank) if k != 1]
    moments = _Moments(call, x, d, eps)
    return _normalized(call, moments, weight, bias)


def _normalized(call: Call, moments: _Moments, weight: Node | None, bias: Node | None) -> list[Node]:
    """The result of a batch norm and, if the call has more results, its statistics."""
    result = call.map(lambda *at: _affine(moments.normal(at), weight, bias, [_channel(at)]))
    if len(call.shapes) == 1:
        return [result]
    return [
        result,
        _other(call, 1, "mean", lambda c: moments.mean([c])),
        _other(call, 2, "rstd", lambda c: moments.rstd([c])),
    ]


@lowering(aten._native_batch_norm_legit_functional.default)
def batch_norm_in_training(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, training: bool, momentum: float,
    eps: float,
) -> list[Node]:  # fmt: skip
    """As `batch_norm_of_batch`, and the new running mean and variance, [C]. Otherwise, without `training`, as `batch_norm`."""
    if not training:
        kept = [
            _other(call, k, name, lambda *at, old=old: load(old, at))
            for k, name, old in ((3, "running_mean", mean), (4, "running_var", variance))
        ]
        first = replace(call, shapes=call.shapes[:3], dtypes=call.dtypes[:3])
        return [*batch_norm(first, x, weight, bias, mean, variance, momentum, eps), *kept]
    d = [k for k in range(x.rank) if k != 1]
    moments = _Moments(call, x, d, eps)

    def new(old: Node, value: Callable[[Int], Expr]) -> Callable[..., Expr]:
        return lambda c: load(old, [c]) * (1 - momentum) + value(c) * momentum

    return [
        *_normalized(call, moments, weight, bias),
        _other(call, 3, "running_mean", new(mean, lambda c: moments.mean([c]))),
        _other(call, 4, "running_var", new(variance, lambda c: moments.unbiased([c]))),
    ]


@lowering(aten.batch_norm.default)
def batch_norm_composite(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node | None, variance: Node | None, training: bool,
    momentum: float, eps: float, _: bool,
) -> Node:  # fmt: skip
    """x [N, C, *] -> the shape of x, normalised by the running statistics, or by the batch's if there are none."""
    if mean is None or variance is None:
        return batch_norm_of_batch(call, x, weight, bias, training, momentum, eps)[0]
    if training:
        raise TypeError("batch norm that updates its running statistics is not supported; call eval() on the model")
    result: Node = batch_norm(call, x, weight, bias, mean, variance, momentum, eps)[0]
    return result


@lowering(aten.instance_norm.default)
def instance_norm(
    call: Call, x: Node, weight: Node | None, bias: Node | None, mean: Node | None, variance: Node | None, own: bool,
    momentum: float, eps: float, _: bool,
) -> Node:  # fmt: skip
    """x [N, C, *], weight and bias [C] -> the shape of x, each channel of each image normalised by itself; without `own`, by the
    running statistics, both [C].
    """
    if own and mean is not None:
        raise TypeError("instance norm that updates its running statistics is not supported; call eval() on the model")
    if own or mean is None or variance is None:
        moments = _Moments(call, x, list(range(2, x.rank)), eps)
        return call.map(lambda *at: _affine(moments.normal(at), weight, bias, [at[1]]))
    result: Node = batch_norm(call, x, weight, bias, mean, variance, momentum, eps)[0]
    return result


class _Moments:
    """Mean and variance of x over the dimensions d, in float32 and in two passes. They are indexed by the other
    dimensions.
    """

    def __init__(self, call: Call, x: Node, d: Sequence[int], eps: float) -> None:
        self.d, self.eps = d, eps
        self.count = index(count(x, d), DType.float32)
        self.total = over(call, "sum", x, d, kind=DType.float32, dtype=DType.float32, name="_mean")
        self.centered = center(x, d, self.total)
        self.squares = over_each(
            call, "sum", x.shape, d, lambda at: self.centered(at) * self.centered(at), DType.float32, "_squares"
        )

    def mean(self, kept: Sequence[Int]) -> Expr:
        return load(self.total, tuple(kept)) / self.count

    def unbiased(self, kept: Sequence[Int]) -> Expr:
        """The estimate of the variance of all values; NaN of a single one."""
        return load(self.squares, tuple(kept)) / (self.count - 1.0)

    def rstd(self, kept: Sequence[Int]) -> Expr:
        return unary("rsqrt", load(self.squares, tuple(kept)) / self.count + self.eps)

    def normal(self, at: Sequence[Int]) -> Expr:
        """(x - mean) / sqrt(variance + eps)"""
        return self.centered(at) * self.rstd([i for k, i in enumerate(at) if k not in self.d])


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
    """x [*, *shape], weight and bias [*shape] -> the shape of x, normalised over the last dimensions. The native operator
    also returns means and reciprocal standard deviations, both [*, 1, ...].
    """
    first = x.rank - len(shape)
    moments = _Moments(call, x, list(range(first, x.rank)), eps)
    result = call.map(lambda *at: _affine(moments.normal(at), weight, bias, at[first:]))
    if not call.op.startswith("aten.native"):
        return result
    mean = _other(call, 1, "mean", lambda *at: moments.mean(at[:first]))
    return [result, mean, _other(call, 2, "rstd", lambda *at: moments.rstd(at[:first]))]


def _group_norm(
    call: Call, x: Node, groups: int, weight: Node | None, bias: Node | None, eps: float
) -> tuple[Node, _Moments]:
    """x [N, C, *], normalised over each group of channels; and the moments, indexed by [N, groups]."""
    n, c = x.shape[0], x.shape[1]
    split = (n, Int((), groups), c // groups, *x.shape[2:])
    grouped = call.map(lambda *at: load(x, reshape_index(at, split, x.shape)), shape=split, dtype=x.dtype)
    moments = _Moments(call, grouped, list(range(2, len(split))), eps)
    result = call.map(lambda *at: _affine(moments.normal(reshape_index(at, x.shape, split)), weight, bias, [at[1]]))
    return result, moments


@lowering(aten.group_norm.default)
def group_norm(
    call: Call, x: Node, groups: int, weight: Node | None = None, bias: Node | None = None, eps: float = 1e-5, *_: Any
) -> Node:
    """x [N, C, *], weight and bias [C] -> the shape of x, normalised over each group of channels."""
    return _group_norm(call, x, groups, weight, bias, eps)[0]


@lowering(aten.native_group_norm.default)
def native_group_norm(
    call: Call, x: Node, weight: Node | None, bias: Node | None, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> list[Node]:
    """As `group_norm`, and the means and reciprocal standard deviations, both [N, groups]."""
    result, moments = _group_norm(call, x, groups, weight, bias, eps)
    mean = _other(call, 1, "mean", lambda *at: moments.mean(at))
    return [result, mean, _other(call, 2, "rstd", lambda *at: moments.rstd(at))]
