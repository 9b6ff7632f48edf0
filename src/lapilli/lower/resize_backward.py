"""Gradients of interpolation: every element of the input gathers from the outputs whose window holds it, dimension by dimension.

These lie side by side, and no others are multiplied: a number that is not finite stays where it is. With which weight an output
holds an input, the operator itself says. It is asked about many inputs at once: all of one colour, which lie so far apart that no
output within reach of one has another in its window.

A dimension of open size is a product with the matrix of all weights: there a number that is not finite spreads along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


@dataclass(frozen=True)
class _Kind:
    """An operator, and its window: input i is in that of output o where (o + centre) * step, with `step` input pixels per output
    pixel, is from i + start to i + start + length. With the option align_corners, these are given for aligned corners. An
    antialiased window is as much wider as the image shrinks."""

    forward: Callable[..., Any]
    rank: int
    option: bool
    length: float
    start: float = 0.0
    centre: float = 0.0
    antialias: bool = False

    def window(self, step: float, aligned: bool) -> tuple[float, float, float]:
        """start, length and centre."""
        if self.antialias:
            return 0.5 - self.length / 2 * max(step, 1.0), self.length * max(step, 1.0), 0.5
        if aligned or not self.option:
            return self.start, self.length, self.centre
        if self.length == 2:
            # Left of the first pixel's centre an output is moved onto it, and has the second one with a weight of zero.
            return self.start, self.length + 0.5, 0.5
        return self.start + 0.5, self.length, 0.5

    def copied(self, sizes: Sequence[Any], targets: Sequence[Any]) -> list[bool]:
        """Along which dimensions torch copies. Of four taps, only if no size changes."""
        if not self.option or self.antialias:
            return [False] * self.rank
        same = [isinstance(s, int) and isinstance(t, int) and s == t for s, t in zip(sizes, targets, strict=True)]
        return [all(same)] * self.rank if self.length == 4 else same


@dataclass(frozen=True)
class _Reach:
    """Input i may be in the windows of `outputs` outputs from number (i + start) * rate on; of the last input there are `tail`, for
    with a scale of the caller's places may lie far behind it. Inputs with the same remainder by `colours` are of one colour."""

    start: float
    rate: float
    outputs: int
    tail: int
    colours: int

    def first(self, source: int, device: torch.device) -> Tensor:
        inputs = torch.arange(source, device=device)
        return ((inputs + self.start) * self.rate).ceil().clamp(min=0).to(torch.int64)


def _reach(kind: _Kind, source: int, target: int, aligned: bool, scale: float | None) -> _Reach:
    over, under = (target - 1, source - 1) if aligned else (target, source)
    given = scale if scale is not None and scale > 0 and not aligned else None
    if under == 0 or over == 0:
        return _Reach(0.0, 0.0, target, target, source)
    rate = over / under if given is None else given
    start, length, centre = kind.window(1 / rate, aligned)
    rounded = 0.125 + target * 2.0**-20  # what places are off by at most, in outputs: here, and in the operator
    begins = [max(math.ceil((i + start) * rate - centre - 2 * rounded), 0) for i in range(source)]
    ends = [min(math.ceil((i + start + length) * rate - centre + rounded), target) for i in range(source)]
    outputs = max(1, *(end - begin for begin, end in zip(begins, ends, strict=True)))
    tail = outputs if given is None or kind.antialias else max(outputs, target - begins[-1])
    colours = math.ceil((outputs + 1) / rate + max(-start, 0.0)) + 2
    return _Reach(start - (centre + rounded) / rate, rate, outputs, tail, min(colours, source))


def _asked(
    kind: _Kind, ones: Tensor, one: float, target: Any, options: Sequence[Any], scale: float | None, dtype: torch.dtype
) -> Tensor:
    """What the operator makes along one dimension of images with `one` in some places and 0 in others: [images, target]"""
    # Along the last dimension: torch's own antialiased images of one column are wrong.
    before = [1] * (kind.rank - 1)
    images = torch.where(ones, one, 0.0).to(dtype).reshape(1, ones.shape[0], *before, ones.shape[1])
    made = kind.forward(images, [*before, target], *options, *[None] * (kind.rank - 1), scale)
    return made.reshape(ones.shape[0], target)  # type: ignore[no-any-return]


def _gathered(
    kind: _Kind, grad: Tensor, source: int, target: int, options: Sequence[Any], scale: float | None
) -> Tensor:
    """grad [..., target] -> [..., source]"""
    reach = _reach(kind, source, target, any(options), scale)
    colour = torch.arange(source, device=grad.device) % reach.colours
    ones = colour == torch.arange(reach.colours, device=grad.device).unsqueeze(1)
    weights = _asked(kind, ones, 1.0, target, options, scale, grad.dtype)
    held = _asked(kind, ones, math.nan, target, options, scale, grad.dtype).isnan()
    steps = torch.arange(reach.tail, device=grad.device)
    outputs = reach.first(source, grad.device).unsqueeze(1) + steps
    inside = outputs < target
    if reach.tail > reach.outputs:
        inside &= (steps < reach.outputs) | (torch.arange(source, device=grad.device).unsqueeze(1) == source - 1)
    outputs = outputs.clamp(max=target - 1)
    place = colour.unsqueeze(1) * target + outputs
    weight = weights.reshape(-1)[place]
    taken = grad[..., outputs]
    return torch.where(held.reshape(-1)[place] & inside, taken * weight, 0.0).sum(-1)


def _multiplied(
    kind: _Kind, grad: Tensor, source: Any, target: Any, options: Sequence[Any], scale: float | None
) -> Tensor:
    """As `_gathered`, for open sizes."""
    units = torch.eye(source, dtype=torch.bool, device=grad.device)
    return grad @ _asked(kind, units, 1.0, target, options, scale, grad.dtype).t()


def _backward(kind: _Kind) -> Any:
    def build(grad: Tensor, output_size: Any, input_size: Any, *rest: Any) -> Tensor:
        options, scales = rest[: kind.option], [*rest[kind.option :], *[None] * kind.rank][: kind.rank]
        sizes = input_size[2:]
        result = grad.to(torch.float32) if grad.dtype in (torch.float16, torch.bfloat16) else grad
        for d, copied in enumerate(kind.copied(sizes, output_size)):
            if copied:
                continue
            known = isinstance(sizes[d], int) and isinstance(output_size[d], int)
            along = _gathered if known else _multiplied
            lines = result.movedim(2 + d, -1)
            result = along(kind, lines, sizes[d], output_size[d], options, scales[d]).movedim(-1, 2 + d)
        return result.to(grad.dtype) if result is not grad else grad.clone()

    return build


def _register(name: str, *window: Any, **more: Any) -> None:
    backward = getattr(aten, f"{name}_backward").default
    decomposition(backward)(_backward(_Kind(getattr(aten, name).default, *window, **more)))


for _n in (1, 2, 3):
    _register(f"upsample_nearest{_n}d", _n, False, 1.0)
    _register(f"_upsample_nearest_exact{_n}d", _n, False, 1.0, centre=0.5)
    _register(f"upsample_{('', 'bi', 'tri')[_n - 1]}linear{_n}d", _n, True, 2.0, -1.0)
_register("upsample_bicubic2d", 2, True, 4.0, -2.0)
_register("_upsample_bilinear2d_aa", 2, True, 2.0, antialias=True)
_register("_upsample_bicubic2d_aa", 2, True, 4.0, antialias=True)
