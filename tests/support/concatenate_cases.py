"""Models that concatenate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

X = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(2))


class Branches(nn.Module):
    """Convolutions of these widths, joined along a dimension."""

    def __init__(self, *widths: int, dim: int = 1, after: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Conv2d(8, n, 1) for n in widths)
        self.after = nn.Conv2d(sum(widths) if dim == 1 else widths[0], 8, 1) if after else nn.Identity()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(torch.cat([b(x).relu() for b in self.branches], self.dim))


class Skip(Branches):
    """One part is there already."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(torch.cat([self.branches[0](x), x], 1))


class Shared(Branches):
    """The first part is read elsewhere too."""

    def forward(self, x: torch.Tensor) -> Any:
        first, second = (b(x) for b in self.branches)
        return self.after(torch.cat([first, second], 1)) + first.sum(1, keepdim=True)


class Twice(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        first, _ = (b(x) for b in self.branches)
        return self.after(torch.cat([first, first], 1))


MODELS: dict[str, tuple[nn.Module, int]] = {  # and how many kernels copy
    "two parts": (Branches(8, 16), 0),
    "ten parts": (Branches(*[8] * 10), 0),
    "unaligned parts": (Branches(3, 5), 1),
    "unaligned last part": (Branches(8, 5), 1),
    "along rows": (Branches(8, 8, dim=2), 0),
    "along batches": (Branches(8, 8, dim=0), 0),
    "skip": (Skip(8, 8), 1),
    "read twice": (Shared(8, 8), 1),
    "the same twice": (Twice(8, 8), 1),
    "an output": (Branches(8, 8, after=False), 1),
}
