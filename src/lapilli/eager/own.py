"""Operators that need no program of their own: copies, constants, and what is made of other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lapilli.eager import movement, storage
from lapilli.eager.call import call, copy, run
from lapilli.eager.launch import bits
from lapilli.eager.signature import operand, see

aten = torch.ops.aten


def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return _dense_copy(x, x.dtype, memory_format)


def _dense_copy(x: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> torch.Tensor:
    if memory_format is None or memory_format is torch.preserve_format:
        seen = see(tuple(x.shape), x.stride(), x.dtype)
        order = tuple(range(x.dim())) if seen.spread else seen.order
    else:
        order = _orders[memory_format](x.dim())
    made = storage.empty(x.shape, dtype, x.get_device(), movement.dense_strides(x.shape, order))
    copy(made, x)
    return made


_orders: dict[torch.memory_format, Callable[[int], tuple[int, ...]]] = {
    torch.contiguous_format: lambda rank: tuple(range(rank)),
    torch.channels_last: lambda rank: (0, 2, 3, 1),
    torch.channels_last_3d: lambda rank: (0, 2, 3, 4, 1),
}


def _zero(x: torch.Tensor) -> torch.Tensor:
    return _fill(x, 0)


def _fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    """A dense tensor is filled by words; 0 is 0 in every type."""
    if not x.numel():
        return x
    seen = operand(x)
    if seen.strided or seen.spread or (value != 0 and x.dtype not in _WORDS):
        return _write(x, value)
    pattern = 0 if value == 0 else _WORDS[x.dtype](value)
    offset, size = x.storage_offset() * x.itemsize, x.numel() * x.itemsize
    if offset % 4 or size % 4:
        return _write(x, value)
    storage.stream_of(x.get_device()).fill((storage.buffer_of(x), offset), size, pattern)
    return x


def _write(x: torch.Tensor, value: Any) -> torch.Tensor:
    host = torch.full((), value, dtype=x.dtype, device="cpu")
    copy(x, storage.from_cpu(host, x.get_device()).expand(x.shape))
    return x


_WORDS: dict[torch.dtype, Callable[[Any], int]] = {
    torch.float32: lambda value: bits(float(value)), torch.int32: lambda value: bits(int(value)),
}  # fmt: skip


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return call(aten.convolution_backward.default, (grad, x, weight, [grad.shape[1]], *rest), {})


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, epsilon: float
) -> Any:
    """In training it updates the running statistics, though its schema does not say so."""
    if not training or mean is None:
        return run(aten.native_batch_norm.default)(x, weight, bias, mean, variance, training, momentum, epsilon)
    functional = aten._native_batch_norm_legit_functional.default
    *results, new_mean, new_variance = call(
        functional, (x, weight, bias, mean, variance, training, momentum, epsilon), {}
    )
    copy(mean, new_mean)
    copy(variance, new_variance)
    return tuple(results)


OPERATORS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: lambda x, value: _fill(x, value.item()),
    aten.equal.default: _equal,
    aten.native_batch_norm.default: _batch_norm,
    aten.convolution_backward_overrideable.default: _convolution_backward,
}
