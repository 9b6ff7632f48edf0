"""Derivatives of activations. At NaN they are what torch's vectorised kernels on the CPU give: conditions are written so that NaN
fulfils none of them, and falls where it belongs."""

from __future__ import annotations

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


@decomposition(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Zero between -threshold and threshold, and for NaN."""
    return torch.where((x > threshold) | (x < -threshold), grad, 0.0)


@decomposition(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Zero outside of low and high, and for NaN."""
    return torch.where((x > low) & (x < high), grad, 0.0)


@decomposition(aten.elu_backward.default)
def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:  # fmt: skip
    """x: of the activation, or (is_result) its result."""
    if is_result:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * (input_scale * alpha * scale) * torch.exp(x * input_scale)
    return torch.where(x > 0, grad * scale, below)


@decomposition(aten.hardswish_backward.default)
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """(2x + 3) / 6 is exactly 0 at -1.5, where x / 3 + 1/2 is not by a rounded third."""
    inside = grad * ((x * 2.0 + 3.0) / 6.0)
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, inside))
