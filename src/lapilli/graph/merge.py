"""Merges linear layers that read the same value, such as queries, keys and values of attention.

Three small matrix products leave a GPU partly idle three times; one with the rows of all weights does not. The results are
slices of its result, which attention and matrix products read in place.
"""

from __future__ import annotations

import torch
from torch import fx

from lapilli.graph.aliasing import READ_AS_VIEWS
from lapilli.graph.module import Module
from lapilli.graph.split_large_weights import LIMIT

aten = torch.ops.aten

_PRODUCTS = {aten.scaled_dot_product_attention.default, aten.matmul.default, aten.bmm.default, aten.baddbmm.default}


def merge_linear(module: Module) -> int:
    """linear(x, w1, b1), linear(x, w2, b2), ... = slices of linear(x, [w1; w2; ...], [b1; b2; ...]), if only matrix
    products read them, possibly through views. Returns the number of merged layers.
    """
    merged = 0
    for x in list(module.graph.nodes):
        layers = sorted(n for n in x.users if _is_mergeable(module, n, x))
        for biased in (True, False):
            group = [n for n in layers if (_bias(n) is not None) == biased]
            elements = sum(module.constants[n.args[1]].numel() for n in group)
            if len(group) > 1 and elements * 4 <= LIMIT:
                _merge(module, x, group, biased)
                merged += len(group)
    module.clean()
    return merged


def _bias(node: fx.Node) -> fx.Node | None:
    bias = node.args[2] if len(node.args) > 2 else None
    assert bias is None or isinstance(bias, fx.Node)
    return bias


def _is_mergeable(module: Module, node: fx.Node, x: fx.Node) -> bool:
    if node.target is not aten.linear.default or node.args[0] is not x or node in module.outputs:
        return False
    weight, bias = module.constants.get(node.args[1]), _bias(node)  # type: ignore[arg-type]
    known = weight is not None and weight.dim() == 2 and (bias is None or bias in module.constants)
    return known and _is_multiplied(module, node)


def _is_multiplied(module: Module, node: fx.Node) -> bool:
    """Whether a value is only read by matrix products, possibly through views."""
    return bool(node.users) and all(
        user.target in _PRODUCTS
        or (user.target in READ_AS_VIEWS and user not in module.outputs and _is_multiplied(module, user))
        for user in node.users
    )


def _merge(module: Module, x: fx.Node, group: list[fx.Node], biased: bool) -> None:
    first = group[0]
    weights = [module.constants[n.args[1]] for n in group]  # type: ignore[index]
    w = module.add_constant(torch.cat(weights), f"{first.name}_weights")
    arguments: list[fx.Node] = [x, w]
    if biased:
        biases = [module.constants[n.args[2]] for n in group]  # type: ignore[index]
        arguments.append(module.add_constant(torch.cat(biases), f"{first.name}_biases"))
    value = first.meta["val"]
    with module.graph.inserting_before(first):
        whole = module.graph.call_function(aten.linear.default, tuple(arguments))
        whole.meta["val"] = value.new_empty((*value.shape[:-1], sum(len(v) for v in weights)))
        start = 0
        for node, weight in zip(group, weights, strict=True):
            end = start + len(weight)
            part = module.graph.call_function(aten.slice.Tensor, (whole, -1, start, end))
            part.meta["val"] = node.meta["val"]
            module.replace(node, part)
            start = end
