"""Layers between codes are a sum of integers and one multiplication, as onnxruntime computes them.

round((sum (q - z) c * s t + b) / u) = round((sum (q - z) c + n) * (s t / u)), where the bias is b = n s t for integers n. A float
is rounded once instead of three times, so that results are those of onnxruntime, which fuses such graphs, bit for bit. For
quantizations that divide, which ONNX has; those of PyTorch multiply by the inverse of the scale, after the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lapilli.code_operators import DEQUANTIZE, INTEGER_CONVOLUTION, INTEGER_PRODUCT, QUANTIZE
from lapilli.graph.integers import LARGEST, divides, is_of_codes, range_of
from lapilli.graph.module import Module

aten = torch.ops.aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
_LAYERS = (aten.linear.default, *_CONVOLUTIONS, *_PRODUCTS)
_SAME_SCALE = 2**-20
"""How far the scale of a bias may be from the product of the operands' scales, relatively; tools round it in their own way."""


def requantize(module: Module) -> int:
    """Replaces layers whose operands and result are codes. Returns their number."""
    count = 0
    for node in list(module.graph.nodes):
        if node.target is QUANTIZE and divides(node) and all(b == -1 for b in node.args[3]):
            layer = node.args[0]
            if layer.target in _LAYERS and len(layer.users) == 1 and layer not in module.outputs:
                count += _replace(module, node, layer)
    module.clean()
    return count


def _replace(module: Module, node: fx.Node, layer: Any) -> bool:
    x, w, bias, *rest = (*layer.args, None)[: max(len(layer.args), 3)]
    if layer.kwargs or not is_of_codes(x) or not is_of_codes(w):
        return False
    codes, scale, zero, block, _ = x.args
    weights, factor, shift, of_weight, _ = w.args
    convolution, linear = layer.target in _CONVOLUTIONS, layer.target is aten.linear.default
    channels = [of_weight[0], *[-1] * (len(of_weight) - 1)] if convolution or linear else [-1] * len(of_weight)
    if any(b != -1 for b in block) or list(of_weight) != channels or of_weight[0] not in (-1, 1):
        return False
    known = [module.constants.get(p) for p in (scale, factor, node.args[1])]  # type: ignore[arg-type]
    if any(k is None for k in known) or known[0].numel() != 1 or known[2].numel() != 1:  # type: ignore[union-attr]
        return False
    both: Tensor = known[0].reshape(()) * known[1].reshape(-1)  # type: ignore[union-attr]
    size = weights.meta["val"].shape
    terms = size[1:].numel() if convolution else size[-1] if linear else size[-2] if len(size) > 1 else None
    largest = max(map(abs, range_of(module, codes, zero))) * max(map(abs, range_of(module, weights, shift)))
    constants = weights in module.constants and (shift is None or shift in module.constants)
    if not isinstance(terms, int) or terms * largest > LARGEST or ((convolution or linear) and not constants):
        return False
    added = None
    if bias is not None:
        added = _integers(module, bias, both)
        if added is None:
            return False
    trailing = len(size) - 2 if convolution else 0
    with module.graph.inserting_before(node):
        total = _sum(module, layer, (codes, zero, weights, shift), rest)
        if added is not None:
            row = module.add_constant(added.reshape([-1] + [1] * trailing), f"{layer.name}_bias")
            total = _call(module, aten.add.Tensor, (total, row), total, torch.int32)
        total = _call(module, aten._to_copy.default, (total,), total, torch.float32)
        total.kwargs, total.meta["exact"] = {"dtype": torch.float32}, True
    inverse = both / known[2].reshape(())  # type: ignore[union-attr]
    axis = 1 if convolution else len(layer.meta["val"].shape) - 1
    each = [1 if d == axis and inverse.numel() > 1 else -1 for d in range(len(layer.meta["val"].shape))]
    low, high, dtype = node.args[4:7]
    made = module.add_constant(inverse if inverse.numel() > 1 else inverse.reshape(()), f"{node.name}_inverse")
    node.args = (total, made, node.args[2], each, low, high, dtype)
    return True


def _sum(module: Module, layer: fx.Node, operands: tuple[Any, Any, Any, Any], rest: list[Any]) -> fx.Node:
    codes, zero, weights, shift = operands
    value = module.constants.get(shift)
    if zero is not None:
        zero = _number(module, zero)
    if layer.target in _PRODUCTS:
        shift = None if shift is None else _number(module, shift)
        return _call(module, INTEGER_PRODUCT, (codes, zero, weights, shift), layer, torch.int32)
    if layer.target is aten.linear.default:
        turned = module.add_constant(module.constants[weights].t().contiguous(), f"{layer.name}_turned")
        flat = None if value is None else module.add_constant(value.reshape(-1), f"{layer.name}_shift")
        return _call(module, INTEGER_PRODUCT, (codes, zero, turned, flat), layer, torch.int32)
    rank = weights.meta["val"].dim() - 2
    geometry: list[Any] = [*rest, *([1], [0], [1], 1)[len(rest) :]]
    stride, padding, dilation = ([*g] * rank if len(g) == 1 else [*g] for g in geometry[:3])
    if value is not None:
        shift = module.add_constant(value.reshape([-1] + [1] * (rank + 1)), f"{layer.name}_shift")
    given = (codes, zero, weights, shift, stride, [*padding, *padding], dilation, geometry[3])
    return _call(module, INTEGER_CONVOLUTION, given, layer, torch.int32)


def _number(module: Module, zero: fx.Node) -> fx.Node:
    """A zero point of a whole operand without dimensions."""
    if not zero.meta["val"].dim():
        return zero
    known = module.constants.get(zero)
    if known is not None:
        return module.add_constant(known.reshape(()), f"{zero.name}_number")
    made = module.graph.call_function(aten.reshape.default, (zero, []))
    made.meta["val"] = zero.meta["val"].new_empty(())
    return made


def _integers(module: Module, bias: fx.Node, both: Tensor) -> Tensor | None:
    """The integers of a bias that is quantized with the product of the operands' scales."""
    if bias.target is not DEQUANTIZE or bias.args[2] is not None:
        return None
    codes, scale = (module.constants.get(p) for p in bias.args[:2])  # type: ignore[arg-type]
    if codes is None or scale is None or codes.dtype is not torch.int32 or codes.dim() != 1:
        return None
    if scale.numel() not in (1, both.numel()) or not torch.allclose(scale.reshape(-1), both, _SAME_SCALE, 0.0):
        return None
    return codes


def _call(module: Module, target: Any, args: tuple[Any, ...], like: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = module.graph.call_function(target, args)
    node.meta["val"] = like.meta["val"].new_empty(like.meta["val"].shape, dtype=dtype)
    return node
