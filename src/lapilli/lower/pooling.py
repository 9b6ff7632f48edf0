"""Pooling: windows reduced by maximum or mean, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, index, load, select
from lapilli.ir.integer import Int, as_int, ceildiv, maximum, minimum
from lapilli.ir.node import Node, Reduce
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten


def _each(value: int | Sequence[int], n: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value)
    return listed * n if len(listed) == 1 else listed


def _window(
    call: Call,
    op: str,
    x: Node,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    empty: float,
) -> Reduce:
    """op over the window of every output position; places outside count as `empty`."""
    n = len(kernel)
    sizes = x.shape[-n:]

    def body(at: tuple[Int, ...], k: tuple[Int, ...]) -> Expr:
        places = [at[-n + d] * stride[d] - padding[d] + k[d] * dilation[d] for d in range(n)]
        guards = [g for i, size in zip(places, sizes, strict=True) for g in (i, size - 1 - i)]
        return select(guards, load(x, [*at[:-n], *places]), const(empty, x.dtype.compute))

    return call.reduce(op, body, call.shape, [as_int(k) for k in kernel])


def _max_pool(
    call: Call, n: int, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1
) -> Reduce:
    k = _each(kernel, n)
    return _window(call, "max", x, k, _each(stride or k, n), _each(padding, n), _each(dilation, n), _lowest(x))


def _lowest(x: Node) -> float:
    return float("-inf") if x.dtype.is_float else -(2**31)


@lowering(aten.max_pool1d.default)
def max_pool1d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    return _max_pool(call, 1, x, kernel, stride, padding, dilation)


@lowering(aten.max_pool2d.default)
def max_pool2d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    return _max_pool(call, 2, x, kernel, stride, padding, dilation)


@lowering(aten.max_pool3d.default)
def max_pool3d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    return _max_pool(call, 3, x, kernel, stride, padding, dilation)


def _with_indices(n: int) -> Any:
    def build(
        call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Any:
        values = _max_pool(call, n, x, kernel, stride, padding, dilation)
        k, pad, dil = _each(kernel, n), _each(padding, n), _each(dilation, n)
        step = _each(stride or k, n)
        second = Call(call.name + "_index", call.op, call.shapes[1:], call.dtypes[1:], call.half)
        place = _window(second, "argmax", x, k, step, pad, dil, _lowest(x))

        def flat(*at: Int) -> Expr:
            rest = load(place, at)
            result = const(0)
            inner = 1
            for d in range(n):
                inner *= k[d]
            for d in range(n):
                inner //= k[d]
                within = _divide(rest, inner)
                rest = rest - within * inner
                position = index(at[-n + d] * step[d] - pad[d]) + within * dil[d]
                result = result * index(x.shape[-n + d]) + position
            return result

        return values, second.map(flat)

    return build


def _divide(e: Expr, by: int) -> Expr:
    return e if by == 1 else binary("floordiv", e, by)


for _n in (2, 3):
    lowering(getattr(aten, f"max_pool{_n}d_with_indices").default)(_with_indices(_n))


def _avg_pool(
    call: Call, n: int, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
    include_pad: bool = True, divisor: int | None = None,
) -> Node:  # fmt: skip
    k, pad = _each(kernel, n), _each(padding, n)
    step = _each(stride or k, n)
    total = _window(call, "sum", x, k, step, pad, [1] * n, 0)

    def body(*at: Int) -> Expr:
        size = as_int(1)
        for d in range(n):
            start = at[-n + d] * step[d] - pad[d]
            length = x.shape[-n + d]
            end = minimum(start + k[d], length + pad[d])
            size = size * (end - start if include_pad else minimum(end, length) - maximum(start, 0))
        return load(total, at) / index(size if divisor is None else divisor, x.dtype.compute)

    return call.map(body)


@lowering(aten.avg_pool1d.default)
def avg_pool1d(call: Call, x: Node, *args: Any) -> Node:
    return _avg_pool(call, 1, x, *args)


@lowering(aten.avg_pool2d.default)
def avg_pool2d(call: Call, x: Node, *args: Any) -> Node:
    return _avg_pool(call, 2, x, *args)


@lowering(aten.avg_pool3d.default)
def avg_pool3d(call: Call, x: Node, *args: Any) -> Node:
    return _avg_pool(call, 3, x, *args)


def _adaptive_avg(n: int) -> Any:
    """Window i covers [floor(i*S/O), ceil((i+1)*S/O))."""

    def build(call: Call, x: Node, output: Any) -> Node:
        sizes, outs = x.shape[-n:], call.shape[-n:]
        even = all(s % o == 0 for s, o in zip(sizes, outs, strict=True))
        windows = [s // o if even else ceildiv(s, o) + 1 for s, o in zip(sizes, outs, strict=True)]

        def ends(i: Int, d: int) -> tuple[Int, Int]:
            if even:
                return i * windows[d], (i + 1) * windows[d]
            return i * sizes[d] // outs[d], ceildiv((i + 1) * sizes[d], outs[d])

        def body(at: tuple[Int, ...], k: tuple[Int, ...]) -> Expr:
            guards, places = [], []
            for d in range(n):
                start, end = ends(at[-n + d], d)
                places.append(start + k[d])
                guards.append(end - 1 - places[-1])
            e = load(x, [*at[:-n], *places])
            return e if even else select(guards, e, const(0, x.dtype.compute))

        total = call.reduce("sum", body, call.shape, windows, DType.float32)

        def divide(*at: Int) -> Expr:
            size = as_int(1)
            for d in range(n):
                start, end = ends(at[-n + d], d)
                size = size * (end - start)
            return load(total, at) / index(size, DType.float32)

        return call.map(divide)

    return build


lowering(aten.adaptive_avg_pool1d.default)(_adaptive_avg(1))
lowering(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)(_adaptive_avg(2))
lowering(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)(_adaptive_avg(3))
