"""Folding: batch norm into the preceding convolution, and everything that depends on constants only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from lapilli.code_operators import DECODERS
from lapilli.graph.module import Module

aten = torch.ops.aten

_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)
_CONVOLUTIONS = (aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def fold_batch_norm(module: Module) -> int:
    """Folds batch norm into the preceding convolution. Returns the number of folded ones.

    w' = w * gamma / sqrt(var + eps); b' = (b - mean) * gamma / sqrt(var + eps) + beta, computed in float64.
    """
    folded = 0
    for norm in list(module.graph.nodes):
        if norm.target not in _NORMS or (norm.target is aten.batch_norm.default and norm.args[5]):
            continue
        conv = norm.args[0]
        if conv.target not in _CONVOLUTIONS or len(conv.users) != 1 or conv in module.outputs:
            continue
        w, b = conv.args[1], conv.args[2] if len(conv.args) > 2 else None
        gamma, beta, mean, variance = norm.args[1:5]
        transposed = conv.target is aten.convolution.default and conv.args[6]
        if any(n is not None and n not in module.constants for n in (w, b, gamma, beta, mean, variance)):
            continue
        results = [norm] if norm.target is aten.batch_norm.default else list(norm.users)
        if any(r is not norm and (r.target is not operator.getitem or r.args[1] != 0) for r in results):
            continue
        values = [None if n is None else module.constants[n].double() for n in (w, b, gamma, beta, mean, variance)]
        eps = norm.args[7 if norm.target is aten.batch_norm.default else 6]
        weight, bias = _folded(values, eps, transposed, conv.args[8] if transposed else 1)
        dtype = module.constants[w].dtype
        new_w = module.add_constant(weight.to(dtype), f"{conv.name}_weight")
        new_b = module.add_constant(bias.to(dtype), f"{conv.name}_bias")
        conv.args = (conv.args[0], new_w, new_b, *conv.args[3:])
        for r in results:
            module.replace(r, conv)
        folded += 1
    module.clean()
    return folded


def fold_padding(module: Module) -> int:
    """Folds zero padding into the convolution that reads it. Returns the number of folded ones.

    A kernel starts at the leading padding and ends at the known size of its output. The trailing padding is therefore
    implied, and may differ.
    """
    folded = 0
    for conv in list(module.graph.nodes):
        pad = conv.args[0] if conv.target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default) else None
        if not isinstance(pad, fx.Node) or pad.target not in (aten.pad.default, aten.constant_pad_nd.default):
            continue
        spatial = conv.args[1].meta["val"].dim() - 2
        given: list[Any] = list(conv.args)
        widths: Any = pad.args[1]
        if len(pad.users) != 1 or pad in module.outputs or not _pads_with_zeros(pad, spatial):
            continue
        before = [widths[2 * d] if 2 * d < len(widths) else 0 for d in range(spatial)][::-1]
        given += [None, [1], [0]][len(given) - 2 :]  # bias, stride, padding
        own = given[4] * spatial if len(given[4]) == 1 else given[4]
        given[0], given[4] = pad.args[0], [p + q for p, q in zip(own, before, strict=True)]
        conv.args = tuple(given)
        folded += 1
    module.clean()
    return folded


def _pads_with_zeros(pad: fx.Node, spatial: int) -> bool:
    widths: Any = pad.args[1]
    mode = pad.args[2] if pad.target is aten.pad.default and len(pad.args) > 2 else "constant"
    position = 3 if pad.target is aten.pad.default else 2
    value = pad.args[position] if len(pad.args) > position else 0
    known = all(isinstance(w, int) and w >= 0 for w in widths)
    return mode == "constant" and not value and known and len(widths) <= 2 * spatial


def _folded(values: list[Any], eps: float, transposed: bool, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    w, b, gamma, beta, mean, variance = values
    scale = torch.rsqrt(variance + eps)
    if gamma is not None:
        scale = scale * gamma
    bias = (0 if b is None else b) - mean
    bias = bias * scale + (0 if beta is None else beta)
    if not transposed:
        return w * scale.reshape(-1, *[1] * (w.dim() - 1)), bias
    # transposed weights are [C, O/groups, ...]: output o of group g depends on rows of that group
    per_group = scale.reshape(groups, 1, -1).expand(groups, w.shape[0] // groups, -1).reshape(w.shape[0], -1)
    return w * per_group.reshape(*per_group.shape, *[1] * (w.dim() - 2)), bias


def _is_made_of_numbers(node: fx.Node) -> bool:
    """Whether a call creates a tensor of a known shape from numbers alone."""
    value = node.meta.get("val")
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
    )


def fold_constants(
    module: Module, limit: int = 1 << 26, is_supported: Callable[[Any], bool] = lambda operator: True
) -> int:
    """Computes on the host, once, everything that depends on constants only, and the results of unsupported operators on
    numbers alone, such as the window of a spectrum.

    Results over `limit` bytes that are larger than their operands are left to the device. So are conversions of many small
    integers to wider types, and all that is dequantized, which keeps quantized weights small. Returns the number of folded calls.
    """
    folded = 0
    values: dict[fx.Node, Any] = dict(module.constants)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if not node.all_input_nodes and (is_supported(node.target) or not _is_made_of_numbers(node)):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        if any(n not in values for n in node.all_input_nodes):
            continue
        if node.target in DECODERS or _widens_codes(node, values):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if not node.all_input_nodes and "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        # The strides that were traced are not always those of the constants here, and a view may need a copy.
        run = aten.reshape.default if node.target is aten.view.default else node.target
        with torch.no_grad():
            result = run(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.nbytes > max(
            limit, sum(_bytes(values[n]) for n in node.all_input_nodes)
        ):
            continue
        values[node] = result
    for node in list(module.graph.nodes):
        value = values.get(node)
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            if all(u in values for u in node.users) and node not in module.outputs:
                continue  # it is only read by folded calls
            module.replace(node, module.add_constant(value.detach().clone(), f"{node.name}_folded"))
            folded += 1
    module.clean()
    return folded


_CODES = 1 << 14
"""8-bit integers from this number on are weights rather than tables."""


def _widens_codes(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    made = node.meta.get("val")
    given = [values[n] for n in node.all_input_nodes]
    codes = [
        v for v in given if isinstance(v, torch.Tensor) and v.dtype in (torch.int8, torch.uint8) and v.numel() >= _CODES
    ]
    return isinstance(made, torch.Tensor) and any(made.nbytes > v.nbytes for v in codes)


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
