"""Functions of rows: softmax, norms, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

X = torch.randn(40, 6, 24, generator=torch.Generator().manual_seed(1))


def centered(x: torch.Tensor) -> torch.Tensor:
    """Layer norm written out: the centred value is read twice."""
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)


ROWS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of strided rows": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, (24,)),
    "layer_norm over two dimensions": lambda x: F.layer_norm(x, (6, 24)),
    "layer norm written out": centered,
    "group_norm": lambda x: F.group_norm(x, 3),
    "rms_norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: x.var(-1),
    "std over two dimensions": lambda x: x.std((1, 2)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=1),
    "to the range 0 to 1": lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)),
    "masked softmax": lambda x: (x * 0.5).masked_fill(x > 1, float("-inf")).softmax(-1),
}  # fmt: skip


def heads(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for _ in range(3))
