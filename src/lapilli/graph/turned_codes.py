"""Weights are turned once, as codes: a product with a matrix [k, n] becomes a linear layer of [n, k], and transposes vanish.

Kernels read the codes of a weight row by row, several in a word, and a block of elements that share a scale lies in a row. ONNX and
torch.matmul have matrices whose columns are those rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lapilli.code_operators import DEQUANTIZE
from lapilli.graph.module import Module

aten = torch.ops.aten

_MATRIX = 2
_PRODUCTS = (aten.matmul.default, aten.mm.default)
_TRANSPOSES = (aten.transpose.int, aten.t.default, aten.permute.default)


def turn_codes(module: Module) -> int:
    """Turns constant matrices that are dequantized. Returns the number of calls that were replaced."""
    turned: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        if node.target in _PRODUCTS:
            x, w = node.args
            if not _can_be_turned(module, w) or x.meta["val"].dim() < _MATRIX:
                continue
            new = _turned(module, w, turned)
            node.target, node.args = aten.linear.default, (x, new)
        elif node.target in _TRANSPOSES and _can_be_turned(module, node.args[0]) and _swaps(node):
            module.replace(node, _turned(module, node.args[0], turned))
        else:
            continue
        count += 1
    module.clean()
    return count


def _can_be_turned(module: Module, w: fx.Node) -> bool:
    if w.target is not DEQUANTIZE or w.args[0] not in module.constants:
        return False
    return (
        all(
            p is None or (p in module.constants and module.constants[p].dim() <= _MATRIX)  # type: ignore[index]
            for p in w.args[1:3]
        )
        and len(w.meta["val"].shape) == _MATRIX
    )


def _swaps(node: fx.Node) -> bool:
    """Whether a transposing call of a matrix exchanges its axes."""
    dims: Any = node.args[1] if node.target is aten.permute.default else node.args[1:]
    first, second = (d % _MATRIX for d in dims or (1, 0))
    return first != second and (first == 1 or node.target is not aten.permute.default)


def _turned(module: Module, w: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    if w not in made:
        arguments: Any = w.args
        codes, scale, zero, block, dtype = arguments
        with module.graph.inserting_after(w):
            args = [p if p is None else _transposed(module, p, k) for k, p in enumerate((codes, scale, zero))]
            new = module.graph.call_function(DEQUANTIZE, (*args, list(reversed(block)), dtype))
        new.meta["val"] = w.meta["val"].t()
        made[w] = new
    return made[w]


def _transposed(module: Module, node: fx.Node, place: int) -> fx.Node:
    value = module.constants[node]
    if value.dim() < _MATRIX or (place and value.numel() == 1):
        return node
    return module.add_constant(value.t().contiguous(), f"{node.name}_turned")
