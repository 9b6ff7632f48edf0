"""Conversions that a model writes, and the values that they are tried on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VALUES = torch.tensor([
    0.0, -0.0, 0.1, 1 / 3, -2.7, 1.00390625 * 1.5, 2049.0, 2051.0, 65503.0, 65519.9, 65520.0, -65520.0, 70000.0, 3e38,
    6.1e-5, 5.9e-8, 2.9e-8, 2.99e-8, 1e-8, float("inf"), -float("inf"), float("nan"),
])  # fmt: skip

TO_HALF: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16().float(),
    "scaled half": lambda x: (x.half() * 300).float(),
    "scaled bfloat16": lambda x: (x.bfloat16() * 300).float(),
    "half, promoted": lambda x: (x.half() * 300) * torch.ones_like(x),
    "half of bfloat16": lambda x: x.bfloat16().half().float(),
    "bfloat16 of half": lambda x: (x.half() * 3).bfloat16().float(),
    "half of a sum": lambda x: (x.half() + 1).half(),
    "compared": lambda x: (x.half() * 300 > 65504).float(),
    "sum": lambda x: (x.half() * 300).nan_to_num(1, 2, 3).sum(dtype=torch.float32).expand(len(VALUES)),
    "integer": lambda x: (x.half().nan_to_num(0, 9, 9) * 0.5).int(),
    "twice": lambda x: x.half().float().half().float() - x.half().float(),
    "view": lambda x: (x.half() * 3).view(2, -1).t().float().t().reshape(-1),
    "quantized": lambda x: (x / 7).half().to(torch.float32) * 7,
    "copied": lambda x: torch.zeros_like(x, dtype=torch.float16).copy_(x * 3).float(),
}
"""Of float32 values; torch computes half precision so that each of these has one right result."""
