"""Pooling, and the windows and padding that it shares with convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_indexing import padded
from lapilli.capture.onnx.onnx_registry import OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM: Any = torch.sym_max  # which has no types

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def spans(
    call: OnnxCall, sizes: list[Any], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[tuple[Any, Any]]:
    """The elements before and after each axis, of `pads` and `auto_pad`."""
    how, rank = call.get("auto_pad", "NOTSET"), len(kernel)
    if how == "NOTSET":
        pads = call.get("pads") or [0] * (2 * rank)
        return [(pads[k], pads[k + rank]) for k in range(rank)]
    if how == "VALID":
        return [(0, 0)] * rank
    result = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        out = (size + s - 1) // s
        total = (out - 1) * s + (k - 1) * d + 1 - size
        total = max(total, 0) if isinstance(total, int) else MAXIMUM(total, 0)
        small = total // 2
        result.append((small, total - small) if how == "SAME_UPPER" else (total - small, small))
    return result


def _ceiled(
    call: OnnxCall,
    sizes: list[Any],
    pads: list[tuple[Any, Any]],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
) -> list[Any]:
    """What `ceil_mode` adds after each axis, so that the last window is whole: none begins behind the elements."""
    if not call.get("ceil_mode", 0) or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return [0] * len(kernel)
    more = []
    for size, (before, after), k, s, d in zip(sizes, pads, kernel, strides, dilations, strict=True):
        window = (k - 1) * d + 1
        out = (size + before + after - window + s - 1) // s + 1
        if (out - 1) * s >= size + before:
            out = out - 1
        more.append(max((out - 1) * s + window - size - before - after, 0))
    return more


def _window(call: OnnxCall, x: Tensor) -> tuple[list[int], list[int], list[int]]:
    kernel = call.get("kernel_shape")
    if len(kernel) != x.ndim - 2 or len(kernel) > 3:
        raise CompileError(
            f"the window has {len(kernel)} axes, and the input {x.ndim}; windows of 1 to 3 are supported"
        )
    return kernel, call.get("strides") or [1] * len(kernel), call.get("dilations") or [1] * len(kernel)


@operator("MaxPool")
def max_pool(call: OnnxCall, x: Tensor) -> Any:
    kernel, strides, dilations = _window(call, x)
    rank = len(kernel)
    sizes = list(x.shape[2:])
    pads = spans(call, sizes, kernel, strides, dilations)
    more = _ceiled(call, sizes, pads, kernel, strides, dilations)
    data = x if x.is_floating_point() else x.to(torch.float32)
    even = all(
        _is(b, a) and isinstance(b, int) and 2 * b <= k for (b, a), k in zip(pads, kernel, strict=True)
    ) and not any(more)
    inner = [b for b, _ in pads] if even else [0] * rank
    if not even:
        data = padded(
            data, {k + 2: (b, a + m) for k, ((b, a), m) in enumerate(zip(pads, more, strict=True))}, value=-torch.inf
        )
    if not call.wants(1):
        return _MAX[rank](data, kernel, strides, inner, dilations).to(x.dtype)
    values, places = _MAX[rank](data, kernel, strides, inner, dilations, return_indices=True)
    shape = list(data.shape[2:])
    coordinates: list[Tensor] = []
    for k in reversed(range(rank)):
        place = places % shape[k]
        coordinates.insert(0, place if even else place - pads[k][0])
        places = places // shape[k]
    order = range(rank) if not call.get("storage_order", 0) else reversed(range(rank))
    flat: Any = 0
    for k in order:
        flat = flat * sizes[k] + coordinates[k]
    count: Any = 1
    for n in sizes:
        count = count * n
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape([x.shape[0], x.shape[1]] + [1] * rank)
    return values.to(x.dtype), flat + planes * count


def _is(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a == b


@operator("AveragePool")
def average_pool(call: OnnxCall, x: Tensor) -> Tensor:
    kernel, strides, dilations = _window(call, x)
    sizes = list(x.shape[2:])
    pads = spans(call, sizes, kernel, strides, dilations)
    more = _ceiled(call, sizes, pads, kernel, strides, dilations)
    counted = bool(call.get("count_include_pad", 0))
    even = all(_is(b, a) and 2 * b <= k for (b, a), k in zip(pads, kernel, strict=True))
    if even and not any(more) and all(d == 1 for d in dilations):
        return _AVERAGE[len(kernel)](x, kernel, strides, [b for b, _ in pads], count_include_pad=counted)
    ones = torch.ones([1, 1, *sizes], dtype=x.dtype)
    around = {k + 2: (b, a) for k, (b, a) in enumerate(pads)}
    ones = padded(ones, around, value=1.0 if counted else 0.0)
    whole = {k + 2: (b, a + m) for k, ((b, a), m) in enumerate(zip(pads, more, strict=True))}
    rest = {k + 2: (0, m) for k, m in enumerate(more)}
    total = _sums(padded(x, whole), kernel, strides, dilations)
    return total / _sums(padded(ones, rest), kernel, strides, dilations)


def _sums(x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]) -> Tensor:
    """Sums over windows, each channel by itself."""
    channels = x.shape[1]
    weight = torch.ones([channels, 1, *kernel], dtype=x.dtype)
    return CONVOLUTIONS[len(kernel)](x, weight, None, strides, 0, dilations, channels)


@operator("LpPool")
def lp_pool(call: OnnxCall, x: Tensor) -> Tensor:
    kernel, strides, dilations = _window(call, x)
    sizes = list(x.shape[2:])
    pads = spans(call, sizes, kernel, strides, dilations)
    more = _ceiled(call, sizes, pads, kernel, strides, dilations)
    p = call.get("p", 2)
    whole = {k + 2: (b, a + m) for k, ((b, a), m) in enumerate(zip(pads, more, strict=True))}
    return _sums(padded(x, whole).abs() ** p, kernel, strides, dilations) ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(call: OnnxCall, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(call: OnnxCall, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(call: OnnxCall, x: Tensor) -> Tensor:
    p = call.get("p", 2)
    return (x.abs() ** p).sum(list(range(2, x.ndim)), keepdim=True) ** (1.0 / p)


@operator("MaxUnpool")
def max_unpool(call: OnnxCall, x: Tensor, places: Tensor, _: Tensor | None = None) -> Tensor:
    kernel, strides, _ones = _window(call, x)
    pads = call.get("pads") or [0] * (2 * len(kernel))
    natural = [
        (n - 1) * s + k - pads[i] - pads[i + len(kernel)]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    shape = [x.shape[0], x.shape[1], *natural]
    count: Any = 1
    for n in shape:
        count = count * n
    # Places count the elements of the smaller result, whatever shape is wanted.
    result = torch.zeros([count], dtype=x.dtype).scatter(0, places.reshape(-1), x.reshape(-1)).reshape(shape)
    wanted = call.numbers(2)
    if wanted is None:
        return result
    return padded(result, {k: (0, wanted[k] - shape[k]) for k in range(len(shape))})
