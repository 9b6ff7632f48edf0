"""Operators without a program of their own: copies, constants, and compositions of other operators. Each registers
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.eager import device_copy, storage
from lapilli.eager.call_signature import describe_operand, operand
from lapilli.eager.dispatch import call, composite, run
from lapilli.eager.jit_trace import is_tracing, untraced
from lapilli.eager.launch import bits
from lapilli.eager.refused_numbers import has
from lapilli.eager.transfer import copy

aten = torch.ops.aten


@composite(aten.clone.default)
def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return _dense_copy(x, x.dtype, memory_format)


def _dense_copy(x: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> torch.Tensor:
    if memory_format is None or memory_format is torch.preserve_format:
        seen = describe_operand(tuple(x.shape), x.stride(), x.dtype)
        order = tuple(range(x.dim())) if seen.expanded else seen.order
    else:
        order = _orders[memory_format](x.dim())
    made = storage.empty(x.shape, dtype, x.get_device(), device_copy.dense_strides(x.shape, order))
    copy(made, x)
    return made


_orders: dict[torch.memory_format, Callable[[int], tuple[int, ...]]] = {
    torch.contiguous_format: lambda rank: tuple(range(rank)),
    torch.channels_last: lambda rank: (0, 2, 3, 1),
    torch.channels_last_3d: lambda rank: (0, 2, 3, 4, 1),
}


@composite(aten.zero_.default)
def _zero(x: torch.Tensor) -> torch.Tensor:
    return _fill(x, 0)


@composite(aten.fill_.Scalar)
def _fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    """Fills a dense tensor by words; 0, but not -0, has the same bits in every type."""
    if not x.numel():
        return x
    if 0 in x.stride():  # elements that share memory are filled once
        sizes = [1 if step == 0 else size for size, step in zip(x.shape, x.stride(), strict=True)]
        if sizes != list(x.shape):
            _fill(x.as_strided(sizes, x.stride()), value)
            return x
    seen = operand(x)
    zero = value == 0 and "-" not in repr(value)
    if seen.strided or seen.expanded or (not zero and (x.dtype not in _WORDS or not _holds(x.dtype, value))):
        return _write(x, value)
    pattern = 0 if zero else _WORDS[x.dtype](value)
    place, size = device_copy.slice_of(x), x.numel() * x.itemsize
    if place[1] % 4 or size % 4:
        return _write(x, value)
    storage.stream_of(x.get_device()).fill(place, size, pattern)
    return x


def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Whether a 32-bit type can represent a number; torch reports the error for others."""
    if dtype is torch.int32:
        return bool(-(2**31) <= value < 2**31)
    return not abs(value) > _LARGEST or math.isinf(value)


_LARGEST = torch.finfo(torch.float32).max


def _write(x: torch.Tensor, value: Any) -> torch.Tensor:
    host = torch.full((min(x.numel(), 2),), value, dtype=x.dtype, device="cpu")[0]  # a single half is not checked
    copy(x, storage.from_cpu(host, x.get_device()).expand(x.shape))
    return x


_WORDS: dict[torch.dtype, Callable[[Any], int]] = {
    torch.float32: lambda value: bits(float(value)), torch.int32: lambda value: bits(int(value)),
}  # fmt: skip


@composite(aten.equal.default)
def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


@composite(aten.convolution.default)
def _convolution(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.jit.trace does not record this operator, but the one that it calls on other devices."""
    if is_tracing():
        return aten._convolution.default(*args, **kwargs, **_FLAGS)  # type: ignore[no-any-return]
    return run(aten.convolution.default)(*args, **kwargs)  # type: ignore[no-any-return]


_FLAGS = {"benchmark": False, "deterministic": False, "cudnn_enabled": True, "allow_tf32": True}
"""The cuDNN flags that a trace records."""


@composite(aten.convolution_backward_overrideable.default)
def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return call(aten.convolution_backward.default, (grad, x, weight, [grad.shape[1]], *rest), {})


@composite(aten.native_batch_norm.default)
def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, epsilon: float
) -> Any:
    """Batch norm; in training, it updates the running statistics, although its schema does not say so."""
    if not training or mean is None:
        return run(aten.native_batch_norm.default)(x, weight, bias, mean, variance, training, momentum, epsilon)
    updating = aten._native_batch_norm_legit.default
    return call(updating, (x, weight, bias, mean, variance, training, momentum, epsilon), {})


@composite(aten._index_put_impl_.default)
def _index_put(
    x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> torch.Tensor:
    call(aten.index_put_.default, (x, indices, values, accumulate), {})
    return x


def _made(fill: Callable[[torch.Tensor, tuple[Any, ...]], Any], sizes: bool) -> Callable[..., torch.Tensor]:
    """Creates a tensor of any type with a given value, from a size or in the shape of another tensor."""

    def make(first: Any, *rest: Any, memory_format: torch.memory_format | None = None, **options: Any) -> torch.Tensor:
        options = {name: option for name, option in options.items() if option is not None and name != "pin_memory"}
        if not isinstance(first, torch.Tensor):
            made = torch.empty(first, **options)
        elif sizes:
            made, rest = first.new_empty(rest[0], **options), rest[1:]
        else:
            made = torch.empty_like(first, memory_format=memory_format or torch.preserve_format, **options)
        fill(made, rest)
        return made

    return make


def _zeros(made: torch.Tensor, rest: tuple[Any, ...]) -> None:
    _fill(made, 0)


def _ones(made: torch.Tensor, rest: tuple[Any, ...]) -> None:
    _fill(made, 1)


@composite(aten.full.default)
def _full(
    size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> torch.Tensor:
    made = torch.empty(size, dtype=dtype or torch.tensor(value, device="cpu").dtype, device=device)
    return _fill(made, value)


@composite(getattr(aten.random_, "from"))
def _random(
    x: torch.Tensor, low: int, high: int | None = None, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Integers from low to high - 1."""
    if high is not None and not (has(x.dtype, low) and has(x.dtype, high - 1)):
        run(getattr(aten.random_, "from")).on_cpu((x, low, high), {"generator": generator}, _UNBOUND)
    elif high is None or not 0 < high - low < 2**31:
        run(getattr(aten.random_, "from"))(x, low, high, generator=generator)
    else:
        copy(x, torch.randint(low, high, x.shape, dtype=x.dtype, device=x.device, generator=generator))
    return x


_UNBOUND = "its integers do not fit into the type of the result"


@composite(aten.randperm.generator_out)
def _randperm(n: int, *, generator: torch.Generator | None = None, out: torch.Tensor) -> torch.Tensor:
    """The order of random keys; see `lapilli.lower.random`."""
    floats = out.dtype.is_floating_point
    most = 2 / torch.finfo(out.dtype).eps if floats else 0 if out.dtype is torch.bool else torch.iinfo(out.dtype).max
    if not 0 <= n <= most + 1:
        return run(aten.randperm.generator_out).on_cpu((n,), {"generator": generator, "out": out}, _UNBOUND)  # type: ignore[no-any-return]
    keys = torch.randint(2**31 - 1, (n,), dtype=torch.int32, device=out.device, generator=generator)
    out.resize_(n)
    return out.copy_(keys.argsort())


composite(aten.fill_.Tensor)(lambda x, value: _fill(x, value.item()))
composite(aten.zeros.default, aten.zeros_like.default)(_made(_zeros, False))
composite(aten.ones.default, aten.ones_like.default)(_made(_ones, False))
composite(aten.full_like.default)(_made(lambda made, rest: _fill(made, rest[0]), False))
composite(aten.new_zeros.default)(_made(_zeros, True))
composite(aten.new_ones.default)(_made(_ones, True))
composite(aten.new_full.default)(_made(lambda made, rest: _fill(made, rest[0]), True))
composite(aten.scalar_tensor.default)(
    untraced(lambda value, **options: _full((), value, **{"dtype": torch.get_default_dtype(), **options}))
)
composite(aten.random_.to)(lambda x, high, **options: _random(x, 0, high, **options))
composite(aten._efficientzerotensor.default)(lambda size, **options: torch.zeros(size, **options))
composite(aten._convolution.default)(lambda *args: run(aten.convolution.default)(*args[:9]))
