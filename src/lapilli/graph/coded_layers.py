"""Layers of a quantized weight as one operator each, for callers whose weights are tensors of their own, not constants of a
program: the eager device, and graphs of torch.compile.

A program of such an operator decodes the weight as it reads it, so that a call has no memory for its floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapilli.graph.quantized import DEQUANTIZE, UNPACK, define


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
WEIGHTS: dict[Any, tuple[int, ...]] = {
    CODED_LINEAR: (1, 2, 3), CODED_EMBEDDING: (1, 2, 3), torch.ops.aten._int_mm.default: (1,),
}  # fmt: skip
"""The arguments that a weight consists of, by position: of these operators, and of torch's product of bytes."""
