"""Products that are worth matrix units: which calls they are, and the sizes that their programs see.

Their kernels read eight elements at once, and have tiles according to the amount of work. Sizes are therefore not entirely
dynamic: a symbol is an eighth of a size that is a multiple of eight, and is bounded, with two ranges per power of two. A
growing sequence passes through few of these.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from lapilli.eager.call_signature import CallSignature, TensorOperand
from lapilli.eager.programs import target_of
from lapilli.lower.registry import FROM_TORCH
from lapilli.target import Target

aten = torch.ops.aten

HEAVY = 1 << 26
"""Multiplications for which the kernels for dynamic sizes take longer than Python takes for a call."""
LARGE = 1 << 20
"""Elements of a matrix that is too large to be packed in every call, as those kernels do, for however few rows."""

_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
}  # fmt: skip
"""The positions of the matrices among the arguments."""
_CONVOLUTIONS: dict[Any, tuple[int, int]] = {aten.convolution.default: (0, 1)}


def choose(signature: CallSignature, device: int) -> tuple[Target, CallSignature]:
    """The target for which a call is compiled, and its signature there."""
    full = target_of(device, matrix=True)
    if is_heavy(signature, full):
        return full, replace(signature, ranges=True)
    return target_of(device), signature


def is_heavy(signature: CallSignature, target: Target) -> bool:
    """Whether a call is a product with enough work, of operands that the target's matrix units multiply."""
    op = signature.schema.computed
    places = _PRODUCTS.get(op) or _CONVOLUTIONS.get(op)
    if places is None:
        return False
    left, right = (signature.leaves[k] for k in places)
    if (
        not isinstance(left, TensorOperand)
        or not isinstance(right, TensorOperand)
        or left.dtype is not right.dtype
        or not target.multiplies(FROM_TORCH.get(left.dtype))
    ):
        return False
    if op in _CONVOLUTIONS:
        stride: Any = signature.leaves[3]
        transposed = signature.leaves[6]
        positions = math.prod(left.shape) // max(left.shape[1], 1)
        return not transposed and positions * math.prod(right.shape) // math.prod(stride) >= HEAVY
    large = math.prod(right.shape[-2:]) >= LARGE
    return large or math.prod(left.shape) * right.shape[-1] >= HEAVY
