"""Upsampling, with torch's coordinate rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, unary
from lapilli.ir.integer import Int
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten


def _scales(call: Call, x: Node, n: int, scales: Sequence[float | None]) -> list[Expr]:
    """Input pixels per output pixel: 1/scale when the caller gave one, else the ratio of the sizes."""
    result = []
    for d in range(n):
        given = scales[d] if d < len(scales) else None
        if given is not None:
            result.append(const(1.0 / given))
        else:
            result.append(index(x.shape[-n + d], DType.float32) / index(call.shape[-n + d], DType.float32))
    return result


def _nearest(call: Call, x: Node, n: int, scales: Sequence[float | None], exact: bool = False) -> Node:
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


def _linear(call: Call, x: Node, n: int, align_corners: bool, scales: Sequence[float | None]) -> Node:
    if not x.dtype.is_float:
        raise TypeError(f"{call.op} of {call.dtype.name} is not supported: convert the tensor to float first")
    ratios = _scales(call, x, n, scales)

    def body(*at: Int) -> Expr:
        corners: list[list[tuple[Int, Expr]]] = []
        for d in range(n):
            i, size, out = at[-n + d], x.shape[-n + d], call.shape[-n + d]
            position = index(i, DType.float32)
            if align_corners:
                ratio = const(0.0) if out == 1 else index(size - 1, DType.float32) / index(out - 1, DType.float32)
                source = position * ratio
            else:
                source = binary("max", (position + 0.5) * ratios[d] - 0.5, 0.0)
            low = binary("min", cast_to(unary("floor", source), DType.int32), index(size - 1))
            high = binary("min", low + 1, index(size - 1))
            weight = source - cast_to(low, DType.float32)
            corners.append([(indirect(low, size), 1.0 - weight), (indirect(high, size), weight)])

        def mix(d: int, places: list[Int]) -> Expr:
            if d == n:
                return load(x, [*at[:-n], *places])
            (lo, wlo), (hi, whi) = corners[d]
            return mix(d + 1, [*places, lo]) * wlo + mix(d + 1, [*places, hi]) * whi

        return mix(0, [])

    return call.map(body)


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

    def linear(n: int) -> Any:
        def build(call: Call, x: Node, _: Any, align_corners: bool, *scales: float | None) -> Node:
            return _linear(call, x, n, align_corners, scales)

        def vec(call: Call, x: Node, _: Any, align_corners: bool, factors: Sequence[float] | None = None) -> Node:
            return _linear(call, x, n, align_corners, factors or ())

        return build, vec

    for n, name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
        build, vec = linear(n)
        lowering(getattr(aten, f"upsample_{name}").default)(build)
        lowering(getattr(aten, f"upsample_{name}").vec)(vec)


_register()
