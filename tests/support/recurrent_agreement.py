"""Whether recurrent layers are right, and are one method."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import lapilli

UNIT = 2.0**-24
"""The rounding of a number around 1, as states are: a step adds a few, and gates let less than all of the old ones pass."""


def agree(got: Any, model: nn.Module, args: Any, length: int, factor: float = 8) -> None:
    """Every number is what float64 has, up to a few roundings a step."""
    with torch.no_grad():
        double = tree_map(lambda t: t.double() if t.is_floating_point() else t, args)
        want = model.double()(*double)
    model.float()
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).abs().max()) <= factor * UNIT * (length + 2)


def is_one_method(program: lapilli.Program) -> bool:
    """Whether the native player can run it: nothing is left to the host."""
    return str(program.report()).splitlines()[1] == "segments: gpu"
