"""Convolution in one to three dimensions: any stride, padding, dilation and groups, and transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lapilli.ir.expr import Expr, const, load, select
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Convolution, Node, Reduce
from lapilli.lower.registry import LONGEST, Call, lowering

aten = torch.ops.aten


@lowering(aten.convolution.default)
def convolution(
    call: Call, x: Node, weight: Node, bias: Node | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Node:  # fmt: skip
    n = len(weight.shape) - 2
    if x.rank == n + 1:  # no batch
        one = as_int(1)
        batched = replace(call, shapes=((one, *call.shape),))
        first = batched.map(lambda *at: load(x, at[1:]), shape=(one, *x.shape), dtype=x.dtype)
        whole = convolution(batched, first, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        return call.map(lambda *at: load(whole, [as_int(0), *at]))
    build = _transposed if transposed else _forward
    r = build(call, x, weight, _each(stride, n), _each(padding, n), _each(dilation, n), groups)
    if bias is None:
        return r
    return call.map(lambda *at: load(r, at) + load(bias, [at[1]]))


def _each(value: int | Sequence[int], n: int) -> list[int]:
    """A number for every spatial dimension."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * n if len(listed) == 1 else listed


def _direct(
    call: Call, x: Node, weight: Node, bias: Node | None = None, stride: Sequence[int] = (1,), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), groups: int = 1,
) -> Node:  # fmt: skip
    return convolution(call, x, weight, bias, stride, padding, dilation, False, (0,), groups)


lowering(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)(_direct)


def _forward(
    call: Call, x: Node, w: Node, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Reduce:
    per_group = w.shape[0] // groups
    channels = w.shape[1]

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        places = [i * s - p + k * d for i, s, p, k, d in zip(at[2:], stride, padding, r[1:], dilation, strict=True)]
        guards = [g for i, size in zip(places, x.shape[2:], strict=True) for g in (i, size - 1 - i)]
        c = r[0] if groups == 1 else at[1] // per_group * channels + r[0]
        return select(guards, load(x, [at[0], c, *places]), const(0, x.dtype.compute)) * load(w, [at[1], *r])

    result = call.reduce("sum", body, call.shape, w.shape[1:], longest=LONGEST)
    if len(result.raxes) == len(w.shape) - 1:  # not made in two steps
        result.contraction = Convolution(x, w, tuple(stride), tuple(padding), tuple(dilation), groups)
    return result


def _transposed(
    call: Call, x: Node, w: Node, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Reduce:
    """Gathered: output o takes input i with i*stride - padding + k*dilation = o. w is [C, O/groups, *kernel]."""
    per_group = w.shape[1]
    channels = x.shape[1] // groups

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        places, guards = [], []
        for i, s, p, k, d, size in zip(at[2:], stride, padding, r[1:], dilation, x.shape[2:], strict=True):
            t = i + p - k * d
            places.append(t // s)
            guards += [t, size - 1 - places[-1]]
            if s > 1:
                guards.append(-(t % s))
        c = r[0] if groups == 1 else at[1] // per_group * channels + r[0]
        o = at[1] if groups == 1 else at[1] % per_group
        return select(guards, load(x, [at[0], c, *places]), const(0, x.dtype.compute)) * load(w, [c, o, *r[1:]])

    return call.reduce("sum", body, call.shape, [channels, *w.shape[2:]])
