"""bfloat16, of which NumPy knows nothing, in programs that run in several segments: on the CPU it is bfloat16 too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils._pytree import tree_leaves

import lapilli

CONSTANT = torch.tensor([0.5, -3.25, 7.0, 0.5, 2.0, 1.0, 0.0, 4.0]).bfloat16()

CASES: dict[str, Callable[[Tensor], Any]] = {
    "transform of an input": lambda x: torch.linalg.eigvals(x.float().outer(x.float())).abs().amax(),
    "input": lambda x: torch.unique(x) + 1,
    "value": lambda x: torch.unique(x * 3 + 1) * 2,
    "masked": lambda x: (x * 2)[x > 0.5] * 3,
    "input and output": lambda x: (x, torch.unique(x)),
    "constants": lambda x: (torch.unique(CONSTANT)[0] + x, torch.unique(x + CONSTANT)[0] + CONSTANT),
    "number": lambda x: x * x.sum().item(),
    "cond": lambda x: torch.cond(x.sum() > 3, lambda x: torch.unique(x * 2).sum(), lambda x: x.sum() - 1, (x,)),
    "while": lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1],
    "scan": lambda x: scan(lambda c, y: (c + y, c * y), x[0] * 0, x),
}


@pytest.mark.parametrize("name", CASES)
def test_segments(name: str) -> None:
    x = torch.tensor([1.0, 2.0, 0.5, 2.0, 3.0, 0.25, 4.0, 1.0]).bfloat16()
    model = Function(CASES[name])
    program = lapilli.compile(model, (x,))
    for given in (x, x - 3):
        for ours, theirs in zip(tree_leaves(program(given)), tree_leaves(model(given)), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_states() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            self.total += x
            return torch.unique(self.total * 2)

    model, x = Sum(), CONSTANT
    program = lapilli.compile(copy.deepcopy(model), (x,))
    for _ in range(3):
        torch.testing.assert_close(program(x), model(x))
