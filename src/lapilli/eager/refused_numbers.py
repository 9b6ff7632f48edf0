"""Operators whose numbers torch refuses: these are given to kernels when they run, so every call is looked at. A call with such a
number goes to the CPU, where torch says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lapilli.eager.dispatch import composite, run

aten = torch.ops.aten


def _checked(op: torch._ops.OpOverload, is_taken: Callable[..., bool]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        operator = run(op)
        if is_taken(*args, **kwargs):
            return operator(*args, **kwargs)
        return operator.on_cpu(args, kwargs, "torch refuses a number that it was given")

    return kernel


def _is_probability(x: torch.Tensor, p: float | None = None, *rest: Any, **options: Any) -> bool:
    return p is None or 0 <= p <= 1


def _is_range(x: torch.Tensor, low: float = 0, high: float = 1, **options: Any) -> bool:
    return not x.is_floating_point() or 0 <= high - low <= torch.finfo(x.dtype).max


def _is_finite(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> bool:
    return math.isfinite(low) and math.isfinite(high)


def _is_below(high: int, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> bool:
    return has(dtype or torch.int64, high - 1)


def _is_between(low: int, high: int, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> bool:
    return has(dtype or torch.int64, low) and has(dtype or torch.int64, high - 1)


def _is_below_like(x: torch.Tensor, high: int, *, dtype: torch.dtype | None = None, **options: Any) -> bool:
    return has(dtype or x.dtype, high - 1)


def _is_between_like(x: torch.Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **options: Any) -> bool:
    return has(dtype or x.dtype, low) and has(dtype or x.dtype, high - 1)


def has(dtype: torch.dtype, number: int) -> bool:
    """Whether an integer is within the bounds of a type."""
    if dtype is torch.bool:
        return 0 <= number <= 1
    limits = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
    return limits.min <= number <= limits.max


_CHECKS: dict[torch._ops.OpOverload, Callable[..., bool]] = {
    aten.bernoulli.p: _is_probability, aten.bernoulli_.float: _is_probability, aten.native_dropout.default: _is_probability,
    aten.uniform_.default: _is_range, aten.histc.default: _is_finite,
    aten.randint.default: _is_below, aten.randint.generator: _is_below,
    aten.randint.low: _is_between, aten.randint.low_generator: _is_between,
    aten.randint_like.default: _is_below_like, aten.randint_like.low_dtype: _is_between_like,
}  # fmt: skip

for _op, _is_taken in _CHECKS.items():
    composite(_op)(_checked(_op, _is_taken))
