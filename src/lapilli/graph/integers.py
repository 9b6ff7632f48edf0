"""Linear layers and convolutions of two quantized operands are computed in integers.

sum (q - z) s * c t = s t * sum (q - z) c, where x = (q - z) s is the input and w = c t the weight: 32-bit sums of products of codes
are exact, and the scales, with what else follows, are the epilogue. What cannot be taken so keeps its dequantized operands: scales
that differ along the sum, as those of groups, and sums that might not fit into 32 bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from lapilli.graph.module import Module
from lapilli.graph.quantized import DEQUANTIZE

aten = torch.ops.aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_LARGEST = 2**31 - 1


def compute_in_integers(module: Module) -> int:
    """Replaces layers whose operands are both dequantized from codes of 8 bits. Returns their number."""
    found = 0
    for node in list(module.graph.nodes):
        if node.target is aten.linear.default or node.target in _CONVOLUTIONS or _is_plain_convolution(node):
            found += _replace(module, node)
    module.clean()
    return found


def _is_plain_convolution(node: fx.Node) -> bool:
    """Whether this is the general operator, not transposed."""
    return node.target is aten.convolution.default and not node.args[6]


def _replace(module: Module, node: fx.Node) -> bool:
    x, w = node.args[:2]
    if not _of_bytes(x) or not _of_bytes(w) or node.meta["val"].dtype is not torch.float32:
        return False
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    codes, scale, zero, block, _ = x.args
    weights, factor, shift, of_weight, _ = w.args
    size = weights.meta["val"].shape  # type: ignore[union-attr]
    linear = node.target is aten.linear.default
    whole = all(b == -1 for b in block)  # type: ignore[union-attr]
    rows = linear and all(b == 1 for b in block[:-1]) and block[-1] == -1  # type: ignore[index,union-attr]
    if not (whole or rows) or any(b != -1 for b in of_weight[1:]) or of_weight[0] not in (-1, 1):  # type: ignore[index]
        return False
    if weights not in module.constants or len(size) < 2 or 255 * 128 * math.prod(size[1:]) > _LARGEST:
        return False
    if shift is not None and shift not in module.constants:
        return False
    writer = _Writer(module, node)
    with module.graph.inserting_before(node):
        left = writer.call(aten._to_copy.default, codes, dtype=torch.int32)
        if zero is not None:
            left = writer.call(aten.sub.Tensor, left, writer.parameter(zero, x, rows, torch.int32), like=left)
        right = writer.call(aten._to_copy.default, weights, dtype=torch.int32)
        if shift is not None:
            right = writer.weights(module.constants[weights], module.constants[shift], f"{node.name}_weight")
        rest: list[Any] = list(node.args[2:])
        bias = rest[0] if rest else None
        total = writer.call(node.target, left, right, *([None, *rest[1:]] if rest else []), like=node, dtype=torch.int32)
        value = writer.call(aten._to_copy.default, total, dtype=torch.float32)
        trailing = 0 if linear else len(size) - 2
        value = writer.call(
            aten.mul.Tensor, value, writer.parameter(scale, x, rows, torch.float32), like=value
        )
        value = writer.call(aten.mul.Tensor, value, writer.of_channels(factor, trailing), like=value)
        if bias is not None:
            value = writer.call(aten.add.Tensor, value, writer.of_channels(bias, trailing), like=value)
    module.replace(node, value)
    module.graph.erase_node(node)
    return True


def _of_bytes(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not DEQUANTIZE:
        return False
    codes: Any = node.args[0]
    return codes.meta["val"].dtype in (torch.int8, torch.uint8) and node.meta["val"].dtype is torch.float32


class _Writer:
    """Writes the calls that replace a layer."""

    def __init__(self, module: Module, node: fx.Node) -> None:
        self.module, self.node = module, node

    def call(
        self, target: Any, *args: Any, like: fx.Node | None = None, dtype: torch.dtype | None = None
    ) -> fx.Node:
        copies = target is aten._to_copy.default
        node = self.module.graph.call_function(target, args, {"dtype": dtype} if copies else {})
        shape: fx.Node = args[0] if like is None else like
        value = shape.meta["val"]
        node.meta["val"] = value.new_empty(value.shape, dtype=dtype or value.dtype)
        return node

    def reshaped(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        known = self.module.constants.get(node)
        if known is not None:
            return self.module.add_constant(known.reshape(shape), f"{node.name}_reshaped")
        made = self.module.graph.call_function(aten.reshape.default, (node, shape))
        made.meta["val"] = node.meta["val"].new_empty(shape)
        return made

    def parameter(self, parameter: fx.Node, x: fx.Node, rows: bool, dtype: torch.dtype) -> fx.Node:
        """A parameter of x for a whole tensor, or for each of its rows, to be broadcast."""
        value = parameter.meta["val"]
        if value.dtype is not dtype:
            parameter = self.call(aten._to_copy.default, parameter, dtype=dtype)
        if not rows:
            return self.reshaped(parameter, []) if value.dim() else parameter
        outer = x.meta["val"].shape[:-1]
        if value.dim() == len(outer):
            made = self.module.graph.call_function(aten.unsqueeze.default, (parameter, -1))
            made.meta["val"] = parameter.meta["val"].new_empty((*value.shape, 1))
            return made
        return parameter

    def of_channels(self, parameter: fx.Node, trailing: int) -> fx.Node:
        """A parameter of the results' channels, to be broadcast over what follows them."""
        value = parameter.meta["val"]
        count = value.numel()
        return self.reshaped(parameter, [count] + [1] * trailing)

    def weights(self, codes: torch.Tensor, shift: torch.Tensor, name: str) -> fx.Node:
        """Codes less their zero points."""
        shift = shift.reshape([-1] + [1] * (codes.dim() - 1))
        return self.module.add_constant(codes.to(torch.int32) - shift.to(torch.int32), name)
