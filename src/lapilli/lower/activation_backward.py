"""Derivatives of activations. For NaN they match torch's vectorised CPU kernels: conditions are written so that NaN, which
fails every comparison, takes the same branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """grad where |x| > threshold, and 0 elsewhere, also for NaN. All tensors have the same shape."""
    return torch.where((x > threshold) | (x < -threshold), grad, 0.0)


@decomposition(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """grad where low < x < high, and 0 elsewhere, also for NaN. All tensors have the same shape."""
    return torch.where((x > low) & (x < high), grad, 0.0)


@decomposition(aten.elu_backward.default)
def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:  # fmt: skip
    """The derivative of scale * x for x > 0 and of alpha * scale * (exp(input_scale * x) - 1) otherwise, times grad.

    x is the input of the activation, or its result if is_result. All tensors have the same shape.
    """
    if is_result:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * (input_scale * alpha * scale) * torch.exp(x * input_scale)
    return torch.where(x > 0, grad * scale, below)


@decomposition(aten.hardswish_backward.default)
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The derivative of x * clamp(x + 3, 0, 6) / 6, times grad; same shapes.

    (2x + 3) / 6 is exactly 0 at -1.5; x / 3 + 1/2 is not, because a third is rounded.
    """
    inside = grad * ((x * 2.0 + 3.0) / 6.0)
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, inside))
