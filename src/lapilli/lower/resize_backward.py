"""Gradients of interpolation: every input element gathers from the outputs whose window contains it, dimension by
dimension.

These outputs are adjacent, and no others are read, so that infinities and NaN do not spread. The weights come from the
forward operator itself, evaluated on images with ones at some pixels and zeros elsewhere. Each image serves many inputs,
those of one colour: they are so far apart that no output near one of them has another in its window.

At a border, several taps of a window are the same pixel, and torch adds each one's product to its gradient. For an infinite
gradient that is NaN if their weights differ in sign or one is 0, whatever their sum: they are torn.

Antialiased weights of known sizes are computed from the kernel: torch's forward copies a dimension whose size stays, its gradient
does not.

For a dimension of dynamic size, the window is estimated generously, and the weights are those of an image for each input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


_SCALES = 2**20
"""The denominator of scales given by the caller, where sizes are dynamic."""
_MARGIN = 2
"""Outputs read beyond an estimated window, before and after, for its rounding."""


@dataclass(frozen=True)
class _Kind:
    """A forward operator and its window.

    Input i is in the window of output o if (o + centre) * step is from i + start to i + start + length, where `step` is the
    number of input pixels per output pixel. If the operator has the option align_corners, this holds for aligned corners.
    An antialiased window is widened by the factor by which the image shrinks; kernel: its weights before that, by distance.
    """

    forward: Callable[..., Any]
    rank: int
    option: bool
    length: float
    start: float = 0.0
    centre: float = 0.0
    kernel: Callable[[Tensor], Tensor] | None = None

    @property
    def antialias(self) -> bool:
        """Whether windows are widened, and weights those of a kernel of the distance."""
        return self.kernel is not None

    def window(self, step: float, aligned: bool) -> tuple[float, float, float]:
        """start, length and centre."""
        if self.antialias:
            return 0.5 - self.length / 2 * max(step, 1.0), self.length * max(step, 1.0), 0.5
        if aligned or not self.option:
            return self.start, self.length, self.centre
        if self.length == 2:
            # An output left of the first pixel's centre is clamped to it, and the second pixel has weight zero.
            return self.start, self.length + 0.5, 0.5
        return self.start + 0.5, self.length, 0.5

    def copied(self, sizes: Sequence[Any], targets: Sequence[Any]) -> list[bool]:
        """For each dimension, whether torch copies it unchanged. With four taps, it does so only if no size changes."""
        if not self.option or self.antialias:
            return [False] * self.rank
        same = [isinstance(s, int) and isinstance(t, int) and s == t for s, t in zip(sizes, targets, strict=True)]
        return [all(same)] * self.rank if self.length == 4 else same


@dataclass(frozen=True)
class _Reach:
    """Input i may be in the windows of `outputs` outputs from output (i + start) * rate on.

    The last input may have `tail` outputs, because with a scale given by the caller, coordinates may be far beyond it.
    Inputs with equal remainders modulo `colours` have the same colour.
    """

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
    rounded = 0.125 + target * 2.0**-20  # a bound on the error of coordinates, in outputs, here and in the operator
    begins = [max(math.ceil((i + start) * rate - centre - 2 * rounded), 0) for i in range(source)]
    ends = [min(math.ceil((i + start + length) * rate - centre + rounded), target) for i in range(source)]
    outputs = max(1, *(end - begin for begin, end in zip(begins, ends, strict=True)))
    tail = outputs if given is None or kind.antialias else max(outputs, target - begins[-1])
    colours = math.ceil((outputs + 1) / rate + max(-start, 0.0)) + 2
    return _Reach(start - (centre + rounded) / rate, rate, outputs, tail, min(colours, source))


def _asked(
    kind: _Kind, ones: Tensor, one: float, target: Any, options: Sequence[Any], scale: float | None, dtype: torch.dtype
) -> Tensor:
    """The operator's results along one dimension for images with the value `one` where `ones` [images, source] holds, and 0
    elsewhere: [images, target].
    """
    # Along the last dimension: torch's antialiased results for images with one column are wrong. For an infinity in lines, for
    # other dimensions that stay make it NaN.
    forward, rank = (aten.upsample_linear1d.default, 1) if math.isinf(one) else (kind.forward, kind.rank)
    before = [1] * (rank - 1)
    images = torch.where(ones, one, 0.0).to(dtype).reshape(1, ones.shape[0], *before, ones.shape[1])
    made = forward(images, [*before, target], *options, *[None] * (rank - 1), scale)
    return made.reshape(ones.shape[0], target)  # type: ignore[no-any-return]


def _gathered(
    kind: _Kind, grad: Tensor, source: int, target: int, options: Sequence[Any], scale: float | None
) -> Tensor:
    """grad [*, target] -> [*, source]."""
    reach = _reach(kind, source, target, any(options), scale)
    colour = torch.arange(source, device=grad.device) % reach.colours
    ones = colour == torch.arange(reach.colours, device=grad.device).unsqueeze(1)
    steps = torch.arange(reach.tail, device=grad.device)
    outputs = reach.first(source, grad.device).unsqueeze(1) + steps
    inside = outputs < target
    if reach.tail > reach.outputs:
        inside &= (steps < reach.outputs) | (torch.arange(source, device=grad.device).unsqueeze(1) == source - 1)
    outputs = outputs.clamp(max=target - 1)
    if kind.kernel is not None:
        return _summed_windows(kind.kernel, kind.length, grad, outputs, inside, _step(source, target, options, scale))
    place = colour.unsqueeze(1) * target + outputs

    def asked(one: float) -> Tensor:
        return _asked(kind, ones, one, target, options, scale, grad.dtype).reshape(-1)[place]

    return _summed(kind, grad[..., outputs], asked, inside)


def _step(source: int, target: int, options: Sequence[Any], scale: float | None) -> float:
    """Inputs per output."""
    if any(options):
        return (source - 1) / (target - 1) if target > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else source / target


def _summed_windows(
    kernel: Callable[[Tensor], Tensor], length: float, grad: Tensor, outputs: Tensor, inside: Tensor, step: float
) -> Tensor:
    """As `_summed`, by antialiased windows of `length` before they are widened, whose weights sum to 1.

    outputs: [source, n], those that may have each input in their window; inside: which of them exist."""
    source, target = outputs.shape[0], grad.shape[-1]
    dtype = grad.dtype
    widening = max(step, 1.0)
    support = length / 2 * widening
    # In the order of torch's forward: at the ends of windows a last digit decides.
    centre = step * (torch.arange(target, device=grad.device).to(dtype) + 0.5)
    first = (centre - support + 0.5).to(torch.int64).clamp(min=0)
    end = (centre + support + 0.5).to(torch.int64).clamp(max=source)
    taps = first.unsqueeze(1) + torch.arange(min(source, 2 * math.ceil(support) + 1), device=grad.device)

    def weight(inputs: Tensor, centre: Tensor) -> Tensor:
        return kernel(((inputs.to(dtype) - centre + 0.5) / widening).abs())

    total = torch.where(taps < end.unsqueeze(1), weight(taps, centre.unsqueeze(1)), 0.0).sum(-1)
    inputs = torch.arange(source, device=grad.device).unsqueeze(1)
    weights = weight(inputs, centre[outputs]) / total[outputs]
    reads = (inputs >= first[outputs]) & (inputs < end[outputs]) & inside
    return torch.where(reads, grad[..., outputs] * weights, 0.0).sum(-1)


def _hat(t: Tensor) -> Tensor:
    """The linear interpolation kernel at a distance t >= 0."""
    return (1 - t).clamp(min=0)


def _cubic(t: Tensor) -> Tensor:
    """The cubic convolution kernel with a = -1/2 at a distance t >= 0, in product form, as in `resize.cubic`."""
    a = -0.5
    near = (1 - t) * ((1 - t * (a + 2)) * t + 1)
    far = (t - 1) * (t - 2) * (t - 2) * a
    return torch.where(t <= 1, near, torch.where(t < 2, far, 0.0))


def _summed(kind: _Kind, grad: Tensor, asked: Callable[[float], Tensor], inside: Tensor) -> Tensor:
    """The sum of the gradients [*, source, outputs] times their weights, where the window has the input.

    asked(x): for each, the result of an image with x at the input and 0 elsewhere. inside: which of them exist."""
    weights = asked(1.0)
    products = grad * weights
    if not kind.antialias and kind.length > 1:
        products = torch.where(_torn(kind, weights, asked) & grad.isinf(), math.nan, products)
    return torch.where(asked(math.nan).isnan() & inside, products, 0.0).sum(-1)


def _torn(kind: _Kind, weights: Tensor, asked: Callable[[float], Tensor]) -> Tensor:
    if kind.length == 2:
        return asked(math.inf).isnan()
    # The operator has four taps along the other dimension too, whose weights 0 would make each answer NaN. But of four weights
    # the outer ones are at most 0, the inner ones at least 0, and an inner one is larger than the outer one beside it: at a
    # border, whatever is positive is the sum of several.
    inputs = torch.arange(weights.shape[0], device=weights.device).unsqueeze(1)
    border = (inputs == 0) | (inputs == weights.shape[0] - 1)
    return border & (weights > 0)


def _gathered_open(kind: _Kind, grad: Tensor, source: Any, target: Any, options: Sequence[Any], scale: Any) -> Tensor:
    """As `_gathered`, for dynamic sizes: in integers, with `over` outputs for `under` inputs."""
    over, under = target, source
    if any(options):
        over, under = target - 1, torch.sym_max(source - 1, 1)  # type: ignore[no-untyped-call]
    given = isinstance(scale, float) and scale > 0 and not any(options)
    if given:
        over, under = round(scale * _SCALES), _SCALES
    inputs = torch.arange(source, device=grad.device)
    if kind.antialias:
        half = int(kind.length) * (over + under) // under
        first, length = inputs * over // under - half, 2 * half
    else:
        start, length, _ = (math.floor(2 * x) for x in kind.window(1.0, any(options)))
        first, length = (2 * inputs + start) * over // (2 * under), length * over // (2 * under)
        if given:  # the last input, for places far beyond it
            beyond = target - (2 * source - 2 + start) * over // (2 * under)
            length = torch.sym_max(length, beyond)  # type: ignore[no-untyped-call]
    outputs = first.unsqueeze(1) + torch.arange(-_MARGIN, length + _MARGIN + 1, device=grad.device)
    inside = (outputs >= 0) & (outputs < target)
    outputs = torch.where(inside, outputs, 0)
    units = torch.eye(source, dtype=torch.bool, device=grad.device)

    def asked(one: float) -> Tensor:
        return _asked(kind, units, one, target, options, scale, grad.dtype)[inputs.unsqueeze(1), outputs]

    return _summed(kind, grad[..., outputs], asked, inside)


def _backward(kind: _Kind) -> Any:
    """The gradient operator: grad [N, C, *out] -> [N, C, *in]."""

    def build(grad: Tensor, output_size: Any, input_size: Any, *rest: Any) -> Tensor:
        options, scales = rest[: kind.option], [*rest[kind.option :], *[None] * kind.rank][: kind.rank]
        sizes = input_size[2:]
        result = grad.to(torch.float32) if grad.dtype in (torch.float16, torch.bfloat16) else grad
        for d, copied in enumerate(kind.copied(sizes, output_size)):
            if copied:
                if kind.length == 2:  # torch adds the pixel's products by 1 and by 0
                    result = result + result * 0
                continue
            known = isinstance(sizes[d], int) and isinstance(output_size[d], int)
            along = _gathered if known else _gathered_open
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
_register("_upsample_bilinear2d_aa", 2, True, 2.0, kernel=_hat)
_register("_upsample_bicubic2d_aa", 2, True, 4.0, kernel=_cubic)
