"""Layers of a quantized weight as one operator each, for callers whose weights are tensors of their own, not constants of a
program: the eager device, and graphs of torch.compile.

A program of such an operator decodes the weight as it reads it, so that a call has no memory for its floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from lapilli.code_operators import DEQUANTIZE, UNPACK
from lapilli.custom_operators import define
from lapilli.graph.module import Module

aten = torch.ops.aten


def weight_of(
    codes: Tensor, scale: Tensor, zero: Tensor | None, block: Sequence[int], low: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """The numbers [rows, columns] of codes: int8 [rows, columns], or uint8 [rows, ceil(columns / 2)] with two in a byte, `low`
    subtracted. block: as `lapilli::dequantize` has it.
    """
    whole = UNPACK(codes, low, columns) if codes.dtype is torch.uint8 else codes
    made: Tensor = DEQUANTIZE(whole, scale, zero, list(block), dtype)
    return made


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, block: Sequence[int], low: int, columns: int
) -> Tensor:  # fmt: skip
    return functional.linear(x, weight_of(codes, scale, zero, block, low, columns, x.dtype), bias)


def embedding(
    ids: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, block: Sequence[int], low: int, columns: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return functional.embedding(ids, weight_of(codes, scale, zero, block, low, columns, dtype))


define(
    "coded_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, Tensor? bias, int[] block, int low, int columns) "
    "-> Tensor",
    linear, lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0])),
)  # fmt: skip
define(
    "coded_embedding(Tensor ids, Tensor codes, Tensor scale, Tensor? zero_point, int[] block, int low, int columns, "
    "ScalarType dtype) -> Tensor",
    embedding,
    lambda ids, codes, scale, zero, block, low, columns, dtype: codes.new_empty((*ids.shape, columns), dtype=dtype),
)
CODED_LINEAR: Any = torch.ops.lapilli.coded_linear.default
CODED_EMBEDDING: Any = torch.ops.lapilli.coded_embedding.default
LAYERS = (CODED_LINEAR, CODED_EMBEDDING)


def mark_given_weights(module: Module) -> None:
    """Marks the inputs of a graph that quantized weights consist of, so that what is computed of them alone has no memory."""
    for node in module.graph.nodes:
        if node.target is DEQUANTIZE:
            codes = node.args[0]
            found = [codes.args[0] if codes.target is UNPACK else codes, *node.args[1:3]]
        elif node.target is aten._int_mm.default:
            found = [node.args[1]]
        else:
            continue
        roots = [_root(part) for part in found if isinstance(part, fx.Node)]
        if roots[0].meta["val"].dtype in (torch.int8, torch.uint8):
            for root in roots:
                if root.op == "placeholder" and root not in module.constants:
                    root.meta["decoded"] = True


def _root(node: fx.Node) -> fx.Node:
    """What a value is a view of, as far as the views go that a call's operands are given by."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


_VIEWS = (
    aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.unsqueeze.default,
)  # fmt: skip
