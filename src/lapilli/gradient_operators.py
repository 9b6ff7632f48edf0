"""Gradients that no operator of PyTorch computes by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapilli.custom_operators import define


def _depthwise_gradient(
    wide: Tensor, narrow: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    kernel: Sequence[int],
) -> Tensor:  # fmt: skip
    channels, zeros = wide.shape[1], [0] * len(kernel)
    weight = wide.new_empty((channels, 1, *kernel))
    made: Tensor = torch.ops.aten.convolution_backward(
        narrow, wide, weight, None, stride, padding, dilation, False, zeros, channels, [False, True, False]
    )[1]
    return made.squeeze(1)


define(
    "depthwise_gradient(Tensor wide, Tensor narrow, int[] stride, int[] padding, int[] dilation, int[] kernel) -> Tensor",
    _depthwise_gradient,
    lambda wide, narrow, stride, padding, dilation, kernel: wide.new_empty((wide.shape[1], *kernel)),
)

DEPTHWISE_GRADIENT: Any = torch.ops.lapilli.depthwise_gradient.default
"""Of the weight of a depthwise convolution of wide [N, C, *in] whose result has the gradient narrow [N, C, *out]:
[C, *kernel]."""
