"""Backward operators of pooling, convolution, padding and losses. They are written as gathers, so that no two invocations
add to the same element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.gradient_operators import DEPTHWISE_GRADIENT
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, index, load, select, where
from lapilli.ir.integer import Int, as_int, ceildiv, maximum, minimum
from lapilli.ir.node import DepthwiseGradient, Node
from lapilli.lower.pooling import Adaptive
from lapilli.lower.registry import BESIDE, LEAST_PART, LONG, MOST_PARTS, Call, decomposition, lowering

aten = torch.ops.aten


def _each(value: int | Sequence[int], n: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value)
    return listed * n if len(listed) == 1 else listed


def _through_windows(
    call: Call, n: int, grad: Node, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int],
    term: Callable[[tuple[Int, ...], list[Int]], Expr],
) -> Node:  # fmt: skip
    """For every input i, the sum of term(i, o) over the outputs o whose window contains it: o * stride - padding + k *
    dilation = i.
    """

    if dilation == [1] * n:  # those windows are neighbours, and few of them do not contain it

        def near(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
            outs, guards = [], []
            for d in range(n):
                place = at[-n + d] + padding[d]
                outs.append(place // stride[d] - r[d])
                guards += [outs[d], grad.shape[-n + d] - 1 - outs[d]]
                if kernel[d] % stride[d]:
                    guards.append(kernel[d] - 1 - (place % stride[d]) - r[d] * stride[d])
            return select(guards, term(at, [*at[:-n], *outs]), const(0.0))

        return call.reduce("sum", near, call.shape, [as_int(-(-k // s)) for k, s in zip(kernel, stride, strict=True)])

    def body(at: tuple[Int, ...], k: tuple[Int, ...]) -> Expr:
        outs, guards = [], []
        for d in range(n):
            t = at[-n + d] + padding[d] - k[d] * dilation[d]
            outs.append(t // stride[d])
            guards += [t, grad.shape[-n + d] - 1 - outs[d]]
            if stride[d] > 1:
                guards.append(-(t % stride[d]))
        return select(guards, term(at, [*at[:-n], *outs]), const(0.0))

    return call.reduce("sum", body, call.shape, [as_int(k) for k in kernel])


def _avg_pool(n: int) -> Any:
    """The gradient of average pooling in n dimensions: grad [*, *out], x [*, *in] -> [*, *in]. Each output's gradient,
    divided by the size of its window, goes to every element of the window.
    """

    def build(
        call: Call, grad: Node, x: Node, kernel: Any, stride: Any, padding: Any, ceil: bool, include_pad: bool,
        divisor: int | None = None,
    ) -> Node:  # fmt: skip
        k, pad = _each(kernel, n), _each(padding, n)
        step = _each(stride or k, n)

        def term(at: tuple[Int, ...], out: list[Int]) -> Expr:
            size = as_int(1)
            for d in range(n):
                start, length = out[-n + d] * step[d] - pad[d], x.shape[-n + d]
                end = minimum(start + k[d], length + pad[d])
                size = size * (end - start if include_pad else minimum(end, length) - maximum(start, 0))
            return load(grad, out) / index(size if divisor is None else divisor, DType.float32)

        return _through_windows(call, n, grad, k, step, pad, [1] * n, term)

    return build


def _flat_position(at: Sequence[Int], x: Node, n: int) -> Expr:
    """The row-major index of an element within its image, as `max_pool` returns indices."""
    linear = as_int(0)
    for d in range(n):
        linear = linear * x.shape[-n + d] + at[-n + d]
    return index(linear)


def _where_chosen(grad: Node, indices: Node, at: Sequence[Int], x: Node, n: int, out: list[Int]) -> Expr:
    """The gradient of an output whose maximum is at this input, else 0."""
    return where(binary("eq", load(indices, out), _flat_position(at, x, n)), load(grad, out), const(0.0))


def _max_pool(n: int) -> Any:
    """The gradient of max pooling in n dimensions: grad, indices [*, *out], x [*, *in] -> [*, *in]."""

    def build(
        call: Call,
        grad: Node,
        x: Node,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil: bool,
        indices: Node,
    ) -> Node:
        k = _each(kernel, n)
        return _through_windows(
            call, n, grad, k, _each(stride or k, n), _each(padding, n), _each(dilation, n),
            lambda at, out: _where_chosen(grad, indices, at, x, n, out),
        )  # fmt: skip

    return build


def _adaptive(n: int, with_indices: bool) -> Any:
    """The gradient of adaptive average or (with_indices) max pooling in n dimensions: grad [*, *out], x [*, *in] -> [*,
    *in].

    Of I inputs and O outputs, input i is in the windows of outputs floor(i * O / I) to ceil((i + 1) * O / I) - 1.
    """

    def build(call: Call, grad: Node, x: Node, *indices: Node) -> Node:
        sizes, outs = x.shape[-n:], grad.shape[-n:]
        pool = Adaptive(sizes, outs)

        def body(at: tuple[Int, ...], k: tuple[Int, ...]) -> Expr:
            out, guards = list(at[:-n]), []
            for d in range(n):
                i = at[-n + d]
                out.append(i * outs[d] // sizes[d] + k[d])
                guards.append(ceildiv((i + 1) * outs[d], sizes[d]) - 1 - out[-1])
            if with_indices:
                return select(guards, _where_chosen(grad, indices[0], at, x, n, out), const(0.0))
            return select(guards, load(grad, out) / index(pool.size(out[-n:]), DType.float32), const(0.0))

        return call.reduce("sum", body, call.shape, [ceildiv(o, s) + 1 for s, o in zip(sizes, outs, strict=True)])

    return build


for _n in (2, 3):
    lowering(getattr(aten, f"avg_pool{_n}d_backward").default)(_avg_pool(_n))
    lowering(getattr(aten, f"max_pool{_n}d_with_indices_backward").default)(_max_pool(_n))
    lowering(getattr(aten, f"_adaptive_avg_pool{_n}d_backward").default)(_adaptive(_n, False))
    lowering(getattr(aten, f"adaptive_max_pool{_n}d_backward").default)(_adaptive(_n, True))


@decomposition(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """clamp((x - target) / beta, -1, 1) times grad, divided by the number of elements for reduction 1 (mean); same shapes.
    NaN stays NaN.
    """
    distance = x - target
    slope = torch.where(distance >= beta, 1.0, torch.where(distance <= -beta, -1.0, distance / beta))
    return slope * grad / (x.numel() if reduction == 1 else 1)


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x [N, C, *] or [C]; target [N, *] or []; weight [C] -> the shape of x: -grad * weight at the target's class, and 0
    elsewhere.

    torch's decomposition multiplies by a one-hot tensor instead, which turns infinite gradients into NaN everywhere.
    """
    axis = min(1, x.dim() - 1)
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    classes = torch.arange(x.shape[axis], device=x.device).reshape(shape)
    target = target.unsqueeze(axis)
    slope = grad / total_weight if reduction == 1 else grad.unsqueeze(axis) if reduction == 0 and x.dim() > 1 else grad
    if weight is not None:
        slope = slope * weight.reshape(shape)
    return torch.where((classes == target) & (target != ignore_index), -slope, torch.zeros_like(x)).to(x.dtype)


@decomposition(*(getattr(aten, f"replication_pad{n}d_backward").default for n in (1, 2, 3)))
def replication_pad_backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """The gradient of an edge includes those of its copies; elements that were cropped have gradient 0. grad [*, *padded]
    -> the shape of x.
    """
    for k in range(len(padding) // 2):
        d = grad.dim() - 1 - k
        size = x.shape[d]
        places = torch.arange(grad.shape[d], device=grad.device) - padding[2 * k]
        shape = list(grad.shape)
        shape[d] = size
        grad = torch.zeros(shape, dtype=grad.dtype, device=grad.device).index_add(d, places.clamp(0, size - 1), grad)
    return grad


@decomposition(aten.convolution_backward.default)
def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients of x [N, C, *in], weight [O, C / groups, *kernel] and bias [O], given grad [N, O, *out]; None where mask is
    False.

    For x: the transposed convolution of grad (a plain one if the forward one was transposed). For the weight: the
    correlation of x and grad, which is a convolution with batch and channels exchanged. For the bias: a sum.
    """
    n = weight.dim() - 2
    stride, padding, dilation, output_padding = (
        _each(given, n) for given in (stride, padding, dilation, output_padding)
    )
    grad_x = grad_w = grad_b = None
    if mask[0]:
        missing = [0] * n
        if not transposed:
            sizes = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            missing = [i - ((o - 1) * s - 2 * p + d * (k - 1) + 1) for i, o, k, s, p, d in sizes]
        grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, missing, groups)
        if transposed:  # output_padding of a stride or more, which dilation allows, is further windows
            for d, (more, step) in enumerate(zip(output_padding, stride, strict=True)):
                if more >= step:
                    grad_x = grad_x.narrow(2 + d, 0, x.shape[2 + d])
    if mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        if isinstance(x.shape[0], int) and x.shape[0] == 0:
            grad_w = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        else:
            grad_w = _correlation(wide, narrow, stride, padding, dilation, groups, weight.shape[2:])
    if mask[2]:
        grad_b = grad.sum([0, *range(2, n + 2)])
    return grad_x, grad_w, grad_b


def _correlation(
    wide: torch.Tensor, narrow: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    kernel: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """out[o, c, k] = sum over n and t of narrow[n, o, t] * wide[n, c, t*stride + k*dilation - padding], group by group."""
    times, outs = narrow.shape[2:], narrow.shape[1] // groups
    if groups > 1 and outs % 4:
        return _by_channels(wide, narrow, stride, padding, dilation, groups, kernel)
    if not all(isinstance(i, int) for i in (*wide.shape, *narrow.shape)) or outs % 4:
        return _by_groups(wide, narrow, stride, padding, dilation, groups, kernel, 1)
    n, positions, lines = wide.shape[0], math.prod(times), wide.shape[1] // groups * math.prod(kernel)
    most = _most_terms(wide, narrow, lines * narrow.shape[1])
    parts = _parts(n, positions, most)
    d = max(range(2, narrow.dim()), key=lambda d: narrow.shape[d])
    reach = (kernel[d - 2] - 1) * dilation[d - 2] + 1
    height = _height(wide, narrow, d, most, reach / stride[d - 2] - 1)
    few = groups * parts * -(-lines // 64) * -(-outs // 64) < _ENOUGH
    rows = max(narrow.shape[d], 1)
    more = _parts(_whole(n * (rows // height)), positions // rows * height, most)
    if positions > 2 * LONG or (few and more >= 2 * parts):
        return _in_bands(wide, narrow, stride, padding, dilation, groups, kernel, d, height, most)
    if groups > 1:  # kernels for groups read whole vectors of images
        wide, narrow = _filled(wide), _filled(narrow)
        parts = _parts(wide.shape[0], positions, most)
    return _by_groups(wide, narrow, stride, padding, dilation, groups, kernel, parts)


def _by_channels(
    wide: torch.Tensor, narrow: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    kernel: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """The same for small groups: each pair of channels that have a weight in common is a channel of a depthwise convolution."""
    channels, outs = wide.shape[1] // groups, narrow.shape[1] // groups
    if min(channels, outs) > _FEW_PAIRS:  # copies would be too many: tiles, with results that are left out
        more = -outs % 4
        cut = narrow.reshape(narrow.shape[0], groups, outs, *narrow.shape[2:])
        cut = aten.constant_pad_nd(cut, [0, 0] * len(kernel) + [0, more]).flatten(1, 2)
        found = _correlation(wide, cut, stride, padding, dilation, groups, kernel)
        return found.reshape(groups, outs + more, channels, *kernel).narrow(1, 0, outs).flatten(0, 1)
    if channels * outs > 1:
        wide, narrow = _in_pairs(wide, (groups, outs, channels), 2), _in_pairs(narrow, (groups, outs, channels), 3)
    made: torch.Tensor = DEPTHWISE_GRADIENT(wide, narrow, stride, padding, dilation, kernel)
    return made.reshape(groups * outs, channels, *kernel)


def _in_pairs(x: torch.Tensor, pairs: Sequence[int], dim: int) -> torch.Tensor:
    """With a channel for each of `pairs`, of groups, results and channels: x has them but for those of dimension `dim`."""
    one = [1 if d == dim else count for d, count in enumerate(pairs, 1)]
    rest = x.shape[2:]
    return x.reshape(x.shape[0], *one, *rest).expand(x.shape[0], *pairs, *rest).flatten(1, 3)


@lowering(DEPTHWISE_GRADIENT)
def depthwise_gradient(
    call: Call, wide: Node, narrow: Node, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    kernel: Sequence[int],
) -> Node:  # fmt: skip
    """wide [N, C, *in], narrow [N, C, *out] -> [C, *kernel]: the sum over n and t of narrow[n, c, t] * wide[n, c, t * stride -
    padding + k * dilation].
    """

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        places = [t * s - p + k * d for t, s, p, k, d in zip(r[1:], stride, padding, at[1:], dilation, strict=True)]
        guards = [g for i, size in zip(places, wide.shape[2:], strict=True) for g in (i, size - 1 - i)]
        term = load(wide, [r[0], at[0], *places]) * load(narrow, [r[0], at[0], *r[1:]])
        return select(guards, term, const(0, term.dtype))

    sizes = (narrow.shape[0], *narrow.shape[2:])
    known = all(i.value is not None for i in (*wide.shape, *narrow.shape))
    made = call.reduce("sum", body, call.shape, sizes, longest=None if known else LONG)
    if known:  # by parts, however long the sum is
        made.contraction = DepthwiseGradient(wide, narrow, tuple(stride), tuple(padding), tuple(dilation))
    return made


def _by_groups(
    wide: torch.Tensor, narrow: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    kernel: Sequence[int], parts: int,
) -> torch.Tensor:  # fmt: skip
    """The same by one convolution, whose groups are parts of the batch, and the sum of the parts."""
    space, times = wide.shape[2:], narrow.shape[2:]
    channels, outs = wide.shape[1] // groups, narrow.shape[1] // groups
    n = wide.shape[0] // parts
    x = wide.reshape(parts, n, groups, channels, *space).movedim((3, 2, 0), (0, 1, 2))
    w = narrow.reshape(parts, n, groups, outs, *times).movedim((2, 0, 3), (0, 1, 2))
    found: torch.Tensor = aten.convolution(
        x.reshape(channels, groups * parts * n, *space), w.reshape(groups * parts * outs, n, *times), None, dilation,
        padding, stride, False, [0] * len(space), groups * parts,
    )  # fmt: skip
    for d, size in enumerate(kernel):
        found = found.narrow(2 + d, 0, size)
    if parts > 1:
        found = found.reshape(channels, groups, parts, outs, *kernel).sum(2).reshape(channels, groups * outs, *kernel)
    return found.transpose(0, 1)


def _in_bands(
    wide: torch.Tensor, narrow: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    kernel: Sequence[int], d: int, height: int, most: int,
) -> torch.Tensor:  # fmt: skip
    """The same for a batch that cannot be divided enough: each image is several ones, cut along d into so many rows of its own, and
    what their windows have in common. most: terms of a part.
    """
    rows, step, reach = narrow.shape[d], stride[d - 2], (kernel[d - 2] - 1) * dilation[d - 2] + 1
    if padding[d - 2]:
        wide = aten.constant_pad_nd(wide, [*[0] * (2 * (wide.dim() - 1 - d)), *[padding[d - 2]] * 2])
    padding = [0 if k == d - 2 else given for k, given in enumerate(padding)]

    def bands(first: int, height: int, count: int) -> torch.Tensor:
        read = wide.narrow(d, first * step, (count * height - 1) * step + reach)
        windows = read.unfold(d, (height - 1) * step + reach, height * step).movedim((d, -1), (1, d + 1))
        x = windows.flatten(0, 1)
        cut = narrow.narrow(d, first, count * height).reshape(*narrow.shape[:d], count, height, *narrow.shape[d + 1 :])
        g = cut.movedim(d, 1).flatten(0, 1)
        if math.prod(g.shape[2:]) > 2 * LONG:  # another side is cut, too
            return _correlation(x, g, stride, padding, dilation, groups, kernel)
        x, g = _filled(x), _filled(g)
        parts = _parts(g.shape[0], math.prod(g.shape[2:]), most)
        return _by_groups(x, g, stride, padding, dilation, groups, kernel, parts)

    found = bands(0, height, rows // height)
    rest = rows % height
    return found + bands(rows - rest, rest, 1) if rest else found


_FEW_PAIRS = 8
"""Channels of a group, or results, up to which the others are copied as often."""
_ENOUGH = 256
"""Tiles of 64 x 64 that a large device works on at once."""
_AT_ONCE = 4
"""Images of a part whose pixels are read together."""
_COPY, _REST = 0.15, 0.05
"""What copying both operands takes, as a part of the whole, and what a second gradient for the rows that are left over."""
_LITTLE = 1 << 20
"""Results of all parts that are no matter, whatever the operands take."""


def _most_terms(wide: torch.Tensor, narrow: torch.Tensor, results: int) -> int:
    """The terms of a part of each sum, at most LONG: few where there are few results, for the results of all parts may take some
    memory.
    """
    terms = narrow.shape[0] * math.prod(narrow.shape[2:])
    parts = max((wide.numel() + narrow.numel()) // BESIDE, _LITTLE) // max(results, 1)
    return min(max(terms // max(min(parts, MOST_PARTS), 1), LEAST_PART), LONG)


def _height(wide: torch.Tensor, narrow: torch.Tensor, d: int, most: int, shared: float) -> int:
    """The rows of a band, so that some bands make a part of so many terms, and little is computed or copied for nothing. shared:
    the rows that a band has in common with the next.
    """
    n, rows = narrow.shape[0], max(narrow.shape[d], 1)
    width = max(math.prod(narrow.shape[2:]) // rows, 1)
    copied = max(shared, 0) * wide.numel() / max(wide.numel() + narrow.numel(), 1)

    def cost(height: int) -> float:
        count, rest = divmod(rows, height)
        computed = (_whole(n * count) * height + _whole(n) * rest) / (n * rows)
        return computed + _COPY * copied / height + (_REST if rest else 0)

    limit = max(rows // 2, 1) if rows * width > 2 * LONG else rows
    return min(
        range(1, min(max(most // (_AT_ONCE * width), math.ceil(4 * copied), 1), limit) + 1), key=lambda h: (cost(h), -h)
    )


def _filled(x: torch.Tensor) -> torch.Tensor:
    """With images of zeros, to a whole number of images that are read together."""
    missing = _whole(x.shape[0]) - x.shape[0]
    return aten.constant_pad_nd(x, [*[0] * (2 * x.dim() - 1), missing]) if missing else x


def _whole(images: int) -> int:
    """So many that pixels can be read together."""
    return -(-images // _AT_ONCE) * _AT_ONCE


def _parts(n: int, positions: int, terms: int) -> int:
    """The number of parts into which a batch of n images is divided, whose gradients are then added: of so many terms, if images
    are small enough. Of images of up to 2 * LONG positions, one kernel sums each part without losing precision.
    """
    divisors = [p for p in range(1, n + 1) if n % p == 0]
    possible, most = [p for p in divisors if p == 1 or n // p % _AT_ONCE == 0], terms
    if n // possible[-1] * positions > 2 * LONG:
        # Few channels are better than a sum in two steps, which no tile kernel computes.
        possible, most = divisors, 2 * LONG
    return next((p for p in possible if n // p * positions <= most), possible[-1])
