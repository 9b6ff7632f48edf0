"""Models whose values can be laid out in several orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)

X = torch.randn(1, 8, 12, 12)

T = torch.randn(1, 32, 48)

CONV, LINEAR, HEADS = nn.Conv2d(8, 16, 3), nn.Linear(16, 24), nn.Linear(48, 48)


def heads(x: torch.Tensor) -> torch.Tensor:
    """Self-attention in 4 heads, and the projection of what they give."""
    q = x.reshape(1, 32, 4, 12).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(1, 32, 48)
    return HEADS(y) + x


def heads_by_hand(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(1, 32, 4, 12).transpose(1, 2)
    y = torch.softmax(q @ q.transpose(-1, -2), -1) @ q
    return HEADS(y.transpose(1, 2).reshape(1, 32, 48)) + x


def to_linear(x: torch.Tensor) -> torch.Tensor:
    return LINEAR(CONV(x).permute(0, 2, 3, 1))


def from_linear(x: torch.Tensor) -> torch.Tensor:
    """Back from channels-last for one more convolution."""
    y = F.gelu(LINEAR(CONV(x).permute(0, 2, 3, 1)))[..., :8]
    return CONV(y.permute(0, 3, 1, 2))


def chain(x: torch.Tensor) -> torch.Tensor:
    """Pointwise values between convolutions stay channels-last."""
    y = CONV(x).sigmoid()
    z = (y * y.mean((2, 3), keepdim=True)).relu()
    return CONV(z[:, :8] + z[:, 8:])


def transposed_products(x: torch.Tensor) -> torch.Tensor:
    """The left operand of the second product is the first one transposed."""
    y = x[0] @ x[0].transpose(0, 1)
    return (y + 1).transpose(0, 1) @ x[0]


IN, OUT = "args_0", "conv2d_1_out"  # row-major, whatever convolutions would like

MODELS: dict[str, tuple[Callable[..., Any], torch.Tensor, set[str]]] = {  # and which values no order helps
    "attention": (heads, T, set()),
    "attention by hand": (heads_by_hand, T, set()),
    "convolution to linear": (to_linear, X, {IN}),
    "linear to convolution": (from_linear, X, {IN, OUT}),
    "chain": (chain, X, {IN, OUT}),
    "transposed products": (transposed_products, T, {"add"}),
}
