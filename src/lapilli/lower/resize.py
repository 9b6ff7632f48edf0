"""Upsampling, with torch's rules for coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, binary, cast_to, const, index, indirect, load, unary, where
from lapilli.ir.integer import Int, as_int, ceildiv, maximum, minimum
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten


def _scales(call: Call, x: Node, n: int, scales: Sequence[float | None]) -> list[Expr]:
    """Input pixels per output pixel: 1 / scale if the caller gave a scale, otherwise the ratio of the sizes."""
    result = []
    for d in range(n):
        given = scales[d] if d < len(scales) else None
        if given is not None:
            result.append(const(1.0 / given))
        else:
            result.append(index(x.shape[-n + d], DType.float32) / index(call.shape[-n + d], DType.float32))
    return result


def _nearest(call: Call, x: Node, n: int, scales: Sequence[float | None], exact: bool = False) -> Node:
    """[*, *in] -> [*, *out] in n dimensions: out[i] = x[floor(i * step)], or x[floor((i + 1/2) * step)] if exact."""
    ratios = _scales(call, x, n, scales)

    def body(*at: Int) -> Expr:
        places: list[Int] = []
        for d in range(n):
            i, size, out = at[-n + d], x.shape[-n + d], call.shape[-n + d]
            given = scales[d] if d < len(scales) else None
            factor = out // size
            if not exact and size * factor == out and (given is None or factor == int(given) == given):
                places.append(i // factor)
                continue
            position = index(i, DType.float32)
            source = unary("floor", (position + 0.5) * ratios[d] if exact else position * ratios[d])
            places.append(indirect(binary("min", cast_to(source, DType.int32), index(size - 1)), size))
        return load(x, [*at[:-n], *places])

    return call.map(body)


Taps = list[tuple[Int, Expr]]
"""Indices in one dimension, and their weights."""


def weighted(x: Node, batch: Sequence[Int], taps: Sequence[Taps]) -> Expr:
    """The sum over all combinations of taps, one per dimension."""

    def mix(places: list[Int]) -> Expr:
        if len(places) == len(taps):
            return load(x, [*batch, *places])
        return add([mix([*places, place]) * weight for place, weight in taps[len(places)]])

    return mix([])


def add(terms: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: a + b, terms)


def clamped(place: Expr, size: Int) -> Int:
    """An int32 value as an index, clamped to the dimension."""
    return indirect(binary("max", binary("min", place, index(size - 1)), 0), size)


Source = tuple[Int | Expr, Expr]
"""A coordinate: the index of the pixel left of it, which may be outside, and the distance from that, 0 <= distance < 1."""


def _split(place: Expr) -> tuple[Expr, Expr]:
    low = unary("floor", place)
    return cast_to(low, DType.int32), place - low


def _pixel(low: Int | Expr, k: int, size: Int) -> Int:
    """The index k pixels to the right of `low`, clamped to the dimension."""
    if isinstance(low, Int):
        return maximum(minimum(low + k, size - 1), 0)
    return clamped(low + k, size)


def linear_taps(source: Source, size: Int) -> Taps:
    """The two pixels around a coordinate, weighted by 1 - t and t."""
    low, weight = source
    return [(_pixel(low, 0, size), 1.0 - weight), (_pixel(low, 1, size), weight)]


def cubic(t: Expr, a: float) -> Expr:
    """The cubic convolution kernel (Keys 1981) at a distance t >= 0, in product form: sums would cancel near its zeros."""
    near = (1.0 - t) * _bend(t, a)
    far = (t - 1.0) * (t - 2.0) * (t - 2.0) * a
    return where(binary("le", t, 1.0), near, where(binary("lt", t, 2.0), far, const(0.0)))


def _bend(t: Expr, a: float) -> Expr:
    return (1.0 - t * (a + 2)) * t + 1.0


def cubic_weights(t: Expr) -> list[Expr]:
    """The weights of the pixels at distances 1 + t, t, 1 - t and 2 - t."""
    a, u = -0.75, 1.0 - t
    return [t * u * u * a, u * _bend(t, a), t * _bend(u, a), u * t * t * a]


def cubic_taps(source: Source, size: Int) -> Taps:
    """The four pixels around a coordinate, with their weights."""
    low, t = source
    return [(_pixel(low, k - 1, size), w) for k, w in enumerate(cubic_weights(t))]


def _step(call: Call, x: Node, n: int, d: int, align_corners: bool, scales: Sequence[float | None]) -> Expr:
    """Input pixels per output pixel, for coordinates that are aligned at the corners or not."""
    if not align_corners:
        return _scales(call, x, n, scales)[d]
    size, out = x.shape[-n + d], call.shape[-n + d]
    return const(0.0) if out == 1 else index(size - 1, DType.float32) / index(out - 1, DType.float32)


def _fraction(
    call: Call, x: Node, n: int, d: int, align_corners: bool, scales: Sequence[float | None]
) -> Fraction | None:
    """Input pixels per output pixel, if that is a small fraction; coordinates are then exact in integers.

    Otherwise they are float32, as in torch, with an error of some units in their last place, which grows to the right.
    """
    size, out = x.shape[-n + d].value, call.shape[-n + d].value
    given = scales[d] if d < len(scales) else None
    if align_corners:
        step = Fraction(size - 1, max(out - 1, 1)) if size is not None and out is not None else None
    elif given is not None:
        scale = Fraction(given).limit_denominator(1024)
        step = 1 / scale if scale and float(scale) == given else None
    else:
        step = Fraction(size, out) if size and out else None
    # Beyond 2^24, float32 coordinates have no fractions. An axis of unknown length may be twice as long until integers overflow.
    longest = call.shape[-n + d].bounds[1] or 2**25
    return step if step is not None and (2 * longest + 1) * step.numerator < 2**31 else None


def _divided(i: Int, size: Int, out: Int, align_corners: bool) -> tuple[Expr, Expr]:
    """As `_split` of i * size / out (aligned corners, with sizes minus one) or (i + 1/2) * size / out - 1/2, for sizes
    known only at run time.

    The float32 coordinate is nearly right. Its error is small enough to be computed in integers, even if products wrap
    around. Some devices divide with an error in the last digit; where that makes a floor off by one, it is corrected, too.
    """
    over, unit = (i * size, out) if align_corners else ((2 * i + 1) * size - out, 2 * out)
    whole, inverse = index(unit), 1.0 / index(unit, DType.float32)
    position, step = index(i, DType.float32), index(size, DType.float32) / index(out, DType.float32)
    low = cast_to(unary("floor", position * step if align_corners else (position + 0.5) * step - 0.5), DType.int32)
    rest = index(over) - low * whole
    low += (more := cast_to(unary("floor", cast_to(rest, DType.float32) * inverse), DType.int32))
    rest -= more * whole
    off = where(binary("lt", rest, 0), const(-1), where(binary("ge", rest, whole), const(1), const(0)))
    return low + off, cast_to(rest - off * whole, DType.float32) * inverse


def _exact(step: Fraction, i: Int, align_corners: bool, below_zero: bool) -> Source:
    """As `_split` of i * step or (i + 1/2) * step - 1/2, computed in integers."""
    p, q = step.numerator, step.denominator
    scaled, unit = (i * p, q) if align_corners else ((2 * i + 1) * p - q, 2 * q)
    if not below_zero:
        scaled = maximum(scaled, 0)
    scaled += unit  # it was at least -q: the dividend is not negative
    return scaled // unit - 1, index(scaled % unit, DType.float32) * (1.0 / unit)


def _only_floats(call: Call, x: Node) -> None:
    if not x.dtype.is_float:
        raise TypeError(f"{call.op} of {call.dtype.name} is not supported: convert the tensor to float first")


def _interpolated(taps: Callable[[Source, Int], Taps], below_zero: bool, call: Call, x: Node, n: int, align_corners: bool,
                  scales: Sequence[float | None]) -> Node:  # fmt: skip
    """[*, *in] -> [*, *out] in n dimensions, interpolated with the given taps. below_zero: a coordinate left of the first
    pixel's centre is not clamped to it.
    """
    _only_floats(call, x)

    def source(d: int, i: Int) -> Source:
        fraction = _fraction(call, x, n, d, align_corners, scales)
        if fraction is not None:
            return _exact(fraction, i, align_corners, below_zero)
        size, out = x.shape[-n + d], call.shape[-n + d]
        if align_corners:
            return _divided(i, size - 1, maximum(out - 1, 1), True)
        if d < len(scales) and scales[d] is not None:
            low, weight = _split((index(i, DType.float32) + 0.5) * _scales(call, x, n, scales)[d] - 0.5)
        else:
            low, weight = _divided(i, size, out, False)
        if below_zero:
            return low, weight
        return binary("max", low, 0), where(binary("lt", low, 0), const(0.0), weight)

    def along(d: int, i: Int) -> Taps:
        size = x.shape[-n + d]
        if not below_zero and size == call.shape[-n + d]:
            # Both of torch's taps are the pixel itself: an infinity becomes NaN.
            return [(i, const(1.0)), (i, const(0.0))]
        found = taps(source(d, i), size)
        if below_zero or (size - call.shape[-n + d]).value is not None:
            return found
        same = binary("eq", index(size), index(call.shape[-n + d]))  # in a run; a scale does not count then
        (near, a), (far, b) = found
        kept = [indirect(where(same, index(i), index(tap)), size) for tap in (near, far)]
        return [(kept[0], where(same, const(1.0), a)), (kept[1], where(same, const(0.0), b))]

    return call.map(lambda *at: weighted(x, at[:-n], [along(d, at[-n + d]) for d in range(n)]))


_linear = partial(_interpolated, linear_taps, False)
_cubic = partial(_interpolated, cubic_taps, True)


def _antialiased(
    call: Call,
    x: Node,
    n: int,
    align_corners: bool,
    scales: Sequence[float | None],
    radius: int,
    kernel: Callable[[Expr], Expr],
) -> Node:
    """[*, *in] -> [*, *out] in n dimensions: each output is the mean of the inputs weighted by a kernel, which is widened
    by the factor by which the image shrinks. Dimensions are processed one by one, the last one first. As in torch, one whose
    size stays is copied, whatever its scale.
    """
    _only_floats(call, x)
    for d in reversed(range(n)):
        if x.shape[-n + d] != call.shape[-n + d]:
            x = _antialiased_dimension(call, x, n, d, _step(call, x, n, d, align_corners, scales), radius, kernel)
    return call.map(lambda *at: load(x, at))


def _antialiased_dimension(
    call: Call, x: Node, n: int, d: int, step: Expr, radius: int, kernel: Callable[[Expr], Expr]
) -> Node:
    size, out = x.shape[-n + d], call.shape[-n + d]
    widening = binary("max", step, 1.0)
    support = widening * float(radius)
    shape = [*x.shape]
    shape[-n + d] = out
    if not isinstance(step, Const):
        bound = (
            None
            if None in (size.bounds[1], out.bounds[0])
            else ceildiv(size.bounds[1] or 0, max(out.bounds[0] or 1, 1))
        )
    else:
        bound = as_int(math.ceil(float(step.value)))
    length = minimum(size, (maximum(size if bound is None else bound, 1) + 1) * radius * 2 + 1)

    same = binary("eq", index(size), index(out)) if (size - out).value is None else None  # in a run

    def tap(i: Int, k: Int) -> tuple[Expr, Expr, Expr]:
        """Index and weight of tap k of output i, and whether it has that many taps."""
        centre = step * (index(i, DType.float32) + 0.5)
        first = binary("max", cast_to(centre - support + 0.5, DType.int32), 0)
        end = binary("min", cast_to(centre + support + 0.5, DType.int32), index(size))
        place = first + index(k)
        distance = (cast_to(place, DType.float32) - centre + 0.5) / widening
        weight = kernel(unary("abs", distance))
        if same is None:
            return place, weight, binary("lt", place, end)
        place = where(same, index(i), place)
        return place, where(same, const(1.0), weight), binary("lt", place, where(same, index(i + 1 - k), end))

    def weight_of(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        _, weight, inside = tap(at[0], r[0])
        return where(inside, weight, const(0.0))

    weights = call.reduce("sum", weight_of, [out], [length], DType.float32, f"_weights{d}")

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        place, weight, inside = tap(at[-n + d], r[0])
        there = [*at]
        there[-n + d] = clamped(place, size)
        return where(inside, load(x, there) * weight, const(0.0))

    total = call.reduce("sum", body, shape, [length], DType.float32, f"_pass{d}")
    return call.map(lambda *at: load(total, at) / load(weights, [at[-n + d]]), shape=shape, dtype=DType.float32)


def _hat(t: Expr) -> Expr:
    """The linear interpolation kernel, max(1 - t, 0), at a distance t >= 0."""
    return binary("max", 1.0 - t, 0.0)


def _register() -> None:
    def nearest(n: int, exact: bool) -> Any:
        def build(call: Call, x: Node, _: Any, *scales: float | None) -> Node:
            return _nearest(call, x, n, scales, exact)

        def vec(call: Call, x: Node, _: Any, factors: Sequence[float] | None = None) -> Node:
            return _nearest(call, x, n, factors or (), exact)

        return build, vec

    for n in (1, 2, 3):
        for name, exact in ((f"upsample_nearest{n}d", False), (f"_upsample_nearest_exact{n}d", True)):
            build, vec = nearest(n, exact)
            lowering(getattr(aten, name).default)(build)
            lowering(getattr(aten, name).vec)(vec)

    def interpolated(f: Any, n: int) -> Any:
        def build(call: Call, x: Node, _: Any, align_corners: bool, *scales: float | None) -> Node:
            result: Node = f(call, x, n, align_corners, scales)
            return result

        def vec(call: Call, x: Node, _: Any, align_corners: bool, factors: Sequence[float] | None = None) -> Node:
            result: Node = f(call, x, n, align_corners, factors or ())
            return result

        return build, vec

    for name, n, f in (
        ("upsample_linear1d", 1, _linear), ("upsample_bilinear2d", 2, _linear), ("upsample_trilinear3d", 3, _linear),
        ("upsample_bicubic2d", 2, _cubic), ("_upsample_bilinear2d_aa", 2, partial(_antialiased, radius=1, kernel=_hat)),
        ("_upsample_bicubic2d_aa", 2, partial(_antialiased, radius=2, kernel=partial(cubic, a=-0.5))),
    ):  # fmt: skip
        build, vec = interpolated(f, n)
        lowering(getattr(aten, name).default)(build)
        lowering(getattr(aten, name).vec)(vec)


_register()
