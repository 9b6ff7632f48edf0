"""Pooling in one to three dimensions: windows reduced to their maximum or mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, unary, where
from lapilli.ir.integer import Int, IntLike, as_int, ceildiv, maximum, minimum, product
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
    """[*, *in] -> [*, *out]: op over the window of every output. Elements outside the image count as `empty`."""
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
    """[*, *in] -> [*, *out]: the maximum of every window, without padding."""
    k = _each(kernel, n)
    return _window(call, "max", x, k, _each(stride or k, n), _each(padding, n), _each(dilation, n), _lowest(x))


def _lowest(x: Node) -> float:
    return float("-inf") if x.dtype.is_float else -(2**31)


@lowering(aten.max_pool1d.default)
def max_pool1d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    """[N, C, L] or [C, L] -> [N, C, out] or [C, out]: the maximum of every window."""
    return _max_pool(call, 1, x, kernel, stride, padding, dilation)


@lowering(aten.max_pool2d.default)
def max_pool2d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    """[N, C, H, W] or [C, H, W] -> the same with the output's height and width: the maximum of every window."""
    return _max_pool(call, 2, x, kernel, stride, padding, dilation)


@lowering(aten.max_pool3d.default)
def max_pool3d(
    call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Node:
    """[N, C, D, H, W] or [C, D, H, W] -> the same with the output's sizes: the maximum of every window."""
    return _max_pool(call, 3, x, kernel, stride, padding, dilation)


def _second(call: Call) -> Call:
    return replace(call, name=f"{call.name}_index", shapes=call.shapes[1:], dtypes=call.dtypes[1:])


def _flat(
    call: Call, x: Node, place: Node, windows: Sequence[IntLike], start: Callable[[Sequence[Int], int], Expr],
    dilation: Sequence[int] = (1, 1, 1),
) -> Node:  # fmt: skip
    """The row-major index, within its image, of element number `place` of every window; for -1 (all elements are -inf) of
    the first element of the window that is in the image.

    start(at, d): the first position of an output's window in dimension d, which may be before the image.
    """
    n = len(windows)

    def body(*at: Int) -> Expr:
        rest, result = load(place, at), const(0)
        nothing = binary("lt", rest, 0)
        for d in range(n):
            inner = product([as_int(k) for k in windows[d + 1 :]])
            within = rest if inner == 1 else binary("floordiv", rest, index(inner))
            rest = rest - within * index(inner)
            begin = start(at, d)
            first = binary("max", binary("floordiv", dilation[d] - 1 - begin, const(dilation[d])), 0)
            within = where(nothing, first, within)
            result = result * index(x.shape[-n + d]) + begin + within * dilation[d]
        return result

    return _second(call).map(body)


def _with_indices(n: int) -> Any:
    """Max pooling in n dimensions that returns maxima and their row-major indices within the image, both [*, *out]."""

    def build(
        call: Call, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Any:
        values = _max_pool(call, n, x, kernel, stride, padding, dilation)
        k, pad, dil = _each(kernel, n), _each(padding, n), _each(dilation, n)
        step = _each(stride or k, n)
        place = _window(_second(call), "argpool", x, k, step, pad, dil, _lowest(x))
        return values, _flat(call, x, place, k, lambda at, d: index(at[-n + d] * step[d] - pad[d]), dil)

    return build


for _n in (2, 3):
    lowering(getattr(aten, f"max_pool{_n}d_with_indices").default)(_with_indices(_n))


def _avg_pool(
    call: Call, n: int, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
    include_pad: bool = True, divisor: int | None = None,
) -> Node:  # fmt: skip
    """[*, *in] -> [*, *out]: the mean of every window. include_pad: padding counts as elements. divisor: replaces their
    number.
    """
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
    """[N, C, L] or [C, L] -> [N, C, out] or [C, out]: the mean of every window."""
    return _avg_pool(call, 1, x, *args)


@lowering(aten.avg_pool2d.default)
def avg_pool2d(call: Call, x: Node, *args: Any) -> Node:
    """[N, C, H, W] or [C, H, W] -> the same with the output's height and width: the mean of every window."""
    return _avg_pool(call, 2, x, *args)


@lowering(aten.avg_pool3d.default)
def avg_pool3d(call: Call, x: Node, *args: Any) -> Node:
    """[N, C, D, H, W] or [C, D, H, W] -> the same with the output's sizes: the mean of every window."""
    return _avg_pool(call, 3, x, *args)


class Adaptive:
    """The windows of adaptive pooling from I to O elements: window i covers floor(i * I / O) to ceil((i + 1) * I /
    O) - 1.
    """

    def __init__(self, sizes: Sequence[Int], outs: Sequence[Int]) -> None:
        self.sizes, self.outs = sizes, outs
        self.even = all(s % o == 0 for s, o in zip(sizes, outs, strict=True))
        self.windows = [s // o if self.even else ceildiv(s, o) + 1 for s, o in zip(sizes, outs, strict=True)]

    def ends(self, i: Int, d: int) -> tuple[Int, Int]:
        """The first element of window i of dimension d, and the one after its last."""
        if self.even:
            return i * self.windows[d], (i + 1) * self.windows[d]
        return i * self.sizes[d] // self.outs[d], ceildiv((i + 1) * self.sizes[d], self.outs[d])

    def size(self, at: Sequence[Int]) -> Int:
        """The number of elements of a window."""
        ends = [self.ends(i, d) for d, i in enumerate(at)]
        return product([end - start for start, end in ends])

    def element(self, x: Node, at: tuple[Int, ...], k: tuple[Int, ...], empty: float) -> Expr:
        """Element k of an output's window; `empty` beyond the end of a smaller window."""
        n = len(self.sizes)
        places = [self.ends(at[-n + d], d)[0] + k[d] for d in range(n)]
        e = load(x, [*at[:-n], *places])
        if self.even:
            return e
        guards = [self.ends(at[-n + d], d)[1] - 1 - places[d] for d in range(n)]
        return select(guards, e, const(empty, x.dtype.compute))


def _adaptive_avg(n: int) -> Any:
    """Adaptive average pooling in n dimensions: [*, *in] -> [*, *out]."""

    def build(call: Call, x: Node, output: Any) -> Node:
        call.some(*x.shape[-n:])
        pool = Adaptive(x.shape[-n:], call.shape[-n:])
        total = call.reduce("sum", lambda at, k: pool.element(x, at, k, 0), call.shape, pool.windows, DType.float32)
        return call.map(lambda *at: load(total, at) / index(pool.size(at[-n:]), DType.float32))

    return build


def _adaptive_max(n: int) -> Any:
    """Adaptive max pooling in n dimensions: [*, *in] -> maxima and their row-major indices within the image, both [*,
    *out].
    """

    def build(call: Call, x: Node, output: Any) -> Any:
        call.some(*x.shape[-n:])
        pool = Adaptive(x.shape[-n:], call.shape[-n:])

        def body(at: tuple[Int, ...], k: tuple[Int, ...]) -> Expr:
            return pool.element(x, at, k, _lowest(x))

        values = call.reduce("max", body, call.shape, pool.windows)
        place = _second(call).reduce("argpool", body, call.shape, pool.windows)
        return values, _flat(call, x, place, pool.windows, lambda at, d: index(pool.ends(at[-n + d], d)[0]))

    return build


lowering(aten.adaptive_avg_pool1d.default)(_adaptive_avg(1))
lowering(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)(_adaptive_avg(2))
lowering(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)(_adaptive_avg(3))
for _n in (2, 3):
    lowering(getattr(aten, f"adaptive_max_pool{_n}d").default)(_adaptive_max(_n))


def _fractional_max(n: int) -> Any:
    """Fractional max pooling in n dimensions (Graham 2014): [N, C, *in], samples [N, C, n] -> maxima and indices [N, C,
    *out].

    With alpha = (in - kernel) / (out - 1), window i begins at trunc((i + sample) * alpha) - trunc(sample * alpha).
    """

    def build(call: Call, x: Node, kernel: Any, output: Any, samples: Node) -> Any:
        k = _each(kernel, n)
        batched = len(call.shape) == n + 2

        def start(at: Sequence[Int], d: int) -> Expr:
            i, size, out = at[-n + d], x.shape[-n + d], call.shape[-n + d]
            image = list(at[:2]) if batched else [as_int(0), at[0]]
            sample = cast_to(load(samples, [*image, as_int(n - 1 - d if n == 2 else d)]), DType.float32)
            alpha = index(size - k[d], DType.float32) / index(maximum(out - 1, 1), DType.float32)
            steps = unary("trunc", (index(i, DType.float32) + sample) * alpha) - unary("trunc", sample * alpha)
            return where(binary("eq", index(i), index(out - 1)), index(size - k[d]), cast_to(steps, DType.int32))

        def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
            places = [indirect(start(at, d), x.shape[-n + d] - k[d] + 1) + r[d] for d in range(n)]
            return load(x, [*at[:-n], *places])

        sizes = [as_int(w) for w in k]
        values = call.reduce("max", body, call.shape, sizes)
        place = _second(call).reduce("argpool", body, call.shape, sizes)
        return values, _flat(call, x, place, sizes, start)

    return build


for _n in (2, 3):
    lowering(getattr(aten, f"fractional_max_pool{_n}d").default)(_fractional_max(_n))
