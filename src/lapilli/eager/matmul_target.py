"""Products that are worth matrix units: which calls they are, and the sizes that their programs see.

Their kernels read eight elements at once, and have tiles according to the amount of work. Sizes are therefore not entirely
dynamic: a symbol is an eighth of a size that is a multiple of eight, and is bounded, with two ranges per power of two. A
growing sequence passes through few of these.

Transposed convolutions and gradients of convolutions have fast kernels for fixed sizes only. They are compiled for any sizes the
first time, and for their own the second: training repeats its sizes, and sizes that vary do not compile without end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
_SCATTERING = {aten.convolution.default, aten.convolution_backward.default}
"""Operators whose products have a kernel for matrices if their sizes are known, and a slower one if they are not: transposed
convolutions, and gradients of all convolutions, which are transposed ones and correlations."""

_MOST_SEEN, _MOST_EXACT = 10_000, 1_000
_seen: set[str] = set()
_exact: set[str] = set()


@dataclass(frozen=True)
class Choice:
    """target: what a call is compiled for. signature: the call's there. passing: whether the next call of this form is to
    choose anew."""

    target: Target
    signature: CallSignature
    passing: bool = False


def choose(signature: CallSignature, device: int) -> Choice:
    """How a call is compiled. One whose kernels depend on its sizes being known is compiled for any sizes first, which serves
    those that vary, and for its own when they come again."""
    full = target_of(device, matrix=True)
    if is_heavy(signature, full):
        return Choice(full, replace(signature, ranges=True))
    if not is_heavy_scattering(signature):
        return Choice(target_of(device), signature)
    exact = replace(signature, exact=True)
    text = exact.text()
    if text in _exact or (text in _seen and len(_exact) < _MOST_EXACT):
        _exact.add(text)
        return Choice(full if _on_units(signature, full) else target_of(device), exact)
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(text)
    return Choice(target_of(device), signature, passing=len(_exact) < _MOST_EXACT)


def _on_units(signature: CallSignature, target: Target) -> bool:
    types = {x.dtype for x in signature.operands()}
    return len(types) == 1 and target.multiplies(FROM_TORCH.get(*types))


def is_heavy_scattering(signature: CallSignature) -> bool:
    """Whether a call is a transposed convolution, or gradients of a convolution, with enough work for its sizes to matter."""
    op = signature.schema.computed
    if op not in _SCATTERING:
        return False
    # Each element that the weights are read for (the gradient of the result, or a transposed convolution's argument) meets
    # those of one of its channels.
    backward = op is aten.convolution_backward.default
    read, weight = signature.leaves[0], signature.leaves[2 if backward else 1]
    transposed: Any = signature.leaves[7 if backward else 6]
    if not isinstance(read, TensorOperand) or not isinstance(weight, TensorOperand) or not (backward or transposed):
        return False
    channel = 1 if backward and transposed else 0
    return math.prod(read.shape) * math.prod(weight.shape) // max(weight.shape[channel], 1) >= HEAVY


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
