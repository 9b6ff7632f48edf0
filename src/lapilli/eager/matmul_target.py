"""Products of halves that are worth matrix units: which calls they are, and how their programs see sizes.

Their kernels read eight halves at once and have tiles for the size of the work, so sizes are not quite open: a symbol is
an eighth of a size where that is whole, and lies between bounds, two to a doubling. A sequence that grows meets few of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from lapilli.eager.call_signature import CallSignature, TensorOperand
from lapilli.eager.programs import target_of
from lapilli.target import Target

aten = torch.ops.aten

HEAVY = 1 << 26
"""Multiplications that take the kernels for open sizes longer than Python takes for a call."""
LARGE = 1 << 20
"""Elements of a matrix that these kernels would pack for every call, however few rows it is multiplied by."""

_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
}  # fmt: skip
"""Where the matrices are among the arguments."""
_CONVOLUTIONS: dict[Any, tuple[int, int]] = {aten.convolution.default: (0, 1)}


def choose(signature: CallSignature, device: int) -> tuple[Target, CallSignature]:
    """What a call is compiled for, and its signature there."""
    full = target_of(device, matrix=True)
    if full.cooperative_matrix and is_heavy(signature):
        return full, replace(signature, ranges=True)
    return target_of(device), signature


def is_heavy(signature: CallSignature) -> bool:
    """Whether a call is a product of halves with enough to do."""
    op = signature.schema.computed
    places = _PRODUCTS.get(op) or _CONVOLUTIONS.get(op)
    if places is None:
        return False
    left, right = (signature.leaves[k] for k in places)
    if (
        not isinstance(left, TensorOperand)
        or not isinstance(right, TensorOperand)
        or {left.dtype, right.dtype} != {torch.float16}
    ):
        return False
    if op in _CONVOLUTIONS:
        stride: Any = signature.leaves[3]
        transposed = signature.leaves[6]
        positions = math.prod(left.shape) // max(left.shape[1], 1)
        return not transposed and positions * math.prod(right.shape) // math.prod(stride) >= HEAVY
    large = math.prod(right.shape[-2:]) >= LARGE
    return large or math.prod(left.shape) * right.shape[-1] >= HEAVY
