"""Splits weights that are too large for one storage buffer: a linear layer or a convolution becomes several."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lapilli.graph.module import Module

aten = torch.ops.aten

LIMIT = 64 << 20
"""The largest weight, in bytes as float32. Vulkan guarantees 128 MiB for a storage buffer, and copies are padded."""

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def split_large_weights(module: Module, limit: int = LIMIT) -> int:
    """linear(x, [w1; w2], b) = cat(linear(x, w1, b1), linear(x, w2, b2)), and the same for convolutions without groups.
    Returns the number of layers that were split.
    """
    split = 0
    for node in list(module.graph.nodes):
        if not _computes_outputs_apart(node) or node.args[1] not in module.constants:
            continue
        weight = module.constants[node.args[1]]
        given = node.args[2] if len(node.args) > 2 else None
        if weight.dim() < 2 or weight.numel() * 4 <= limit or (given is not None and given not in module.constants):
            continue
        bias = None if given is None else module.constants[given]
        parts = -(-weight.numel() * 4 // limit)
        rows = -(-weight.shape[0] // parts // 8) * 8  # whole vectors
        axis = 1 - weight.dim()  # the axis of the outputs, counted from the end
        pieces = [
            _piece(module, node, weight, bias, axis, k, min(rows, weight.shape[0] - k))
            for k in range(0, weight.shape[0], rows)
        ]
        with module.graph.inserting_before(node):
            joined = module.graph.call_function(aten.cat.default, (pieces, axis))
        joined.meta["val"] = node.meta["val"]
        module.replace(node, joined)
        split += 1
    module.clean()
    return split


def _computes_outputs_apart(node: fx.Node) -> bool:
    """Whether every row of the weight computes an output of its own from all inputs."""
    args: Any = node.args
    if node.target is aten.convolution.default:
        return not args[6] and args[8] == 1
    return node.target is aten.linear.default or (node.target in _CONVOLUTIONS and (len(args) < 7 or args[6] == 1))


def _piece(
    module: Module, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None, axis: int, first: int, rows: int
) -> fx.Node:
    """The part of a layer that computes some of its outputs."""
    w = module.add_constant(weight[first : first + rows], f"{node.name}_weight_{first}")
    b = None if bias is None else module.add_constant(bias[first : first + rows], f"{node.name}_bias_{first}")
    target: Any = node.target
    with module.graph.inserting_before(node):
        piece = module.graph.call_function(target, (node.args[0], w, b, *node.args[3:]))
    piece.meta["val"] = node.meta["val"].narrow(axis, first, rows)
    return piece
