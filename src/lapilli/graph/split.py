"""Weights that are too large for one storage buffer: a linear layer becomes several, side by side."""

from __future__ import annotations

import torch
from torch import fx

from lapilli.graph.module import Module

aten = torch.ops.aten

LIMIT = 64 << 20
"""Bytes of a weight as float32. Vulkan guarantees 128 MiB of a storage buffer, and copies are padded."""


def split_large_weights(module: Module, limit: int = LIMIT) -> int:
    """linear(x, [w1; w2], b) = cat(linear(x, w1, b1), linear(x, w2, b2)). Returns how many layers were split."""
    split = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.linear.default or node.args[1] not in module.constants:
            continue
        weight = module.constants[node.args[1]]
        bias = module.constants.get(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else None
        if weight.dim() != 2 or weight.numel() * 4 <= limit or (bias is None and node.args[2:] not in ((), (None,))):
            continue
        parts = -(-weight.numel() * 4 // limit)
        rows = -(-weight.shape[0] // parts // 8) * 8  # whole vectors
        pieces = [
            _piece(module, node, weight, bias, k, min(rows, weight.shape[0] - k))
            for k in range(0, weight.shape[0], rows)
        ]
        with module.graph.inserting_before(node):
            joined = module.graph.call_function(aten.cat.default, (pieces, -1))
        joined.meta["val"] = node.meta["val"]
        module.replace(node, joined)
        split += 1
    module.clean()
    return split


def _piece(
    module: Module, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None, first: int, rows: int
) -> fx.Node:
    """The part of a linear layer that computes some of its outputs."""
    w = module.add_constant(weight[first : first + rows], f"{node.name}_weight_{first}")
    b = None if bias is None else module.add_constant(bias[first : first + rows], f"{node.name}_bias_{first}")
    with module.graph.inserting_before(node):
        piece = module.graph.call_function(aten.linear.default, (node.args[0], w, b))
    piece.meta["val"] = node.meta["val"][..., first : first + rows]
    return piece
