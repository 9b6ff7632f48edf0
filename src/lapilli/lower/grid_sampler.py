"""Samples images at given coordinates: grid_sampler_2d and grid_sampler_3d."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, load, unary, where
from lapilli.ir.integer import Int
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, lowering
from lapilli.lower.resize import add, clamped, cubic_weights

aten = torch.ops.aten
_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call, x: Node, grid: Node, mode: int, padding: int, align_corners: bool) -> Node:
    """x [N, C, *in], grid [N, *out, n] -> [N, C, *out]: x interpolated at the coordinates in the grid, which run from -1 to
    1, with the last dimension of x first. The formulas are those of torch.nn.functional.grid_sample.
    """
    n = x.rank - 2

    def body(*at: Int) -> Expr:
        taps = []
        for d in range(n):
            size = x.shape[2 + d]
            extent = index(size, DType.float32)
            g = cast_to(load(grid, [at[0], *at[2:], Int((), n - 1 - d)]), DType.float32)
            place = (g + 1.0) * 0.5 * (extent - 1.0) if align_corners else ((g + 1.0) * extent - 1.0) * 0.5
            taps.append(_taps(place, size, mode, padding, align_corners, n))
        return add([_term(x, at[:2], corner) for corner in product(*taps)])

    return call.map(body)


def _term(x: Node, batch: Sequence[Int], corner: Sequence[tuple[Int, Expr, Expr]]) -> Expr:
    """The weighted value of one corner; outside the image it is 0, in two dimensions times a weight, which may be NaN (torch's
    vectors do so).
    """
    value = load(x, [*batch, *(place for place, _, _ in corner)])
    outside = reduce(lambda a, b: binary("or", a, b), [outside for _, _, outside in corner])
    if len(corner) == 2:
        value = where(outside, const(0.0), value)
    for _, weight, _ in corner:
        value = value * weight
    return value if len(corner) == 2 else where(outside, const(0.0), value)


def _taps(
    place: Expr, size: Int, mode: int, padding: int, align_corners: bool, rank: int
) -> list[tuple[Int, Expr, Expr]]:
    """(index, weight, whether it is outside) of every element that is read along one dimension. Padding by border or
    reflection moves all of them inside.
    """
    if mode != _CUBIC:
        place = _inside(place, size, padding, align_corners, rank)
    if mode == _NEAREST:
        low, weights = unary("round", place), [const(1.0)]
    elif mode == _LINEAR:
        low = unary("floor", place)
        weights = [low + 1.0 - place, place - low]
    else:
        low = unary("floor", place)
        weights = cubic_weights(place - low)
        low = low - 1.0
    found = []
    for k, weight in enumerate(weights):
        here = low + float(k)
        if mode == _CUBIC:
            here = _inside(here, size, padding, align_corners, rank)
        if padding == _ZEROS:  # in the range of int32, but still outside; nowhere is outside too
            near = binary("max", binary("min", here, index(size + 2, DType.float32)), -3.0)
            here = where(unary("isnan", here), const(-3.0), near)
        whole = cast_to(here, DType.int32)
        outside = binary("or", binary("lt", whole, 0), binary("gt", whole, index(size - 1)))
        found.append((clamped(whole, size), weight, outside))
    return found


def _inside(place: Expr, size: Int, padding: int, align_corners: bool, rank: int) -> Expr:
    """The coordinate moved into the image: clamped to the border, or reflected first; NaN is moved to 0, in three dimensions to the
    end (as torch's minimum of NaN and a number is what stands first). Unchanged for padding by zeros.
    """
    if padding == _ZEROS:
        return place
    last = index(size - 1, DType.float32)
    if padding == _REFLECTION:
        if align_corners:
            place = _reflected(place, const(0.0), last)
        else:
            place = _reflected(place, const(-0.5), last + 0.5)
    return where(
        unary("isnan", place), const(0.0) if rank == 2 else last, binary("max", binary("min", place, last), 0.0)
    )


def _reflected(place: Expr, low: Expr, high: Expr) -> Expr:
    """The coordinate reflected at low and high until it is between them."""
    span = high - low
    offset = unary("abs", place - low)
    flips = unary("floor", offset / span)
    rest = offset - flips * span
    odd = binary("ne", flips - unary("floor", flips * 0.5) * 2.0, 0.0)
    return where(binary("gt", span, 0.0), where(odd, high - rest, low + rest), low)
