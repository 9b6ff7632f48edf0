"""Calls with much work: which they are, and the sizes that their programs see.

Kernels of matrix units read eight elements at once, and have tiles according to the amount of work. Sizes are therefore not
entirely dynamic: a symbol is an eighth of a size that is a multiple of eight, and is bounded, with two ranges per power of two. A
growing sequence passes through few of these.

Without matrix units, and for transposed convolutions, gradients of convolutions and attention in training, the fast kernels need
fixed sizes. So do reductions of many elements in training, which are shared out by how many there are, and on a GPU products of
few results with long sums, which are shared out too. These calls are compiled for any sizes the first time, and for their own the
second: most programs repeat their sizes, and those that vary do not compile without end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.eager.call_signature import CallSignature, TensorOperand
from lapilli.eager.programs import target_of
from lapilli.lower.registry import FROM_TORCH, LONGEST
from lapilli.target import Target

aten = torch.ops.aten

HEAVY = 1 << 26
"""Multiplications for which the kernels for dynamic sizes take longer than Python takes for a call."""
LONG = 1024
"""Terms of a sum for which a product takes longer than Python takes for a call if the sum is not divided, however few results it
has. Those with no more rows and columns than terms are divided."""
LARGE = 1 << 20
"""Elements of a matrix that is too large to be packed in every call, as those kernels do, for however few rows."""

_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
}  # fmt: skip
"""The positions of the matrices among the arguments."""
_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}

_ATTENTION: dict[Any, tuple[int, int]] = {ATTENTION: (0, 1), ATTENTION_BACKWARD: (1, 2)}
"""The positions of queries and keys. These operators are of training, where sizes repeat."""

_REDUCTIONS = {
    aten.sum.dim_IntList, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
    aten.embedding_dense_backward.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default,
}  # fmt: skip
"""Of training, too. (Prompts of any length would compile those of inference for each, which gain less.)"""
_MANY = 1 << 18
"""Elements of an operand of a reduction for which the kernels for dynamic sizes take longer than Python takes for a call."""

_MOST_SEEN, _MOST_EXACT = 10_000, 1_000
_seen: set[str] = set()
_exact: set[str] = set()


@dataclass(frozen=True)
class CallTarget:
    """target: what a call is compiled for. signature: the call's there. passing: whether the next call of this form is to
    choose anew."""

    target: Target
    signature: CallSignature
    passing: bool = False


def choose(signature: CallSignature, device: int) -> CallTarget:
    """How a call is compiled."""
    plain, full = target_of(device), target_of(device, matrix=True)
    reduces, heavy = _reduces_many(signature), is_heavy(signature)
    if not (reduces or heavy or (plain.kind == "gpu" and _is_long(signature))):
        return CallTarget(plain, signature)
    on_units = not reduces and all(full.multiplies(FROM_TORCH.get(x.dtype)) for x in signature.operands())
    bounded = not _scatters(signature) and signature.schema.computed not in _ATTENTION and _terms(signature) <= LONGEST
    if heavy and on_units and bounded:
        return CallTarget(full, replace(signature, ranges=True))
    exact = replace(signature, exact=True)
    text = exact.text()
    if text in _exact or (text in _seen and len(_exact) < _MOST_EXACT):
        _exact.add(text)
        return CallTarget(full if on_units else plain, exact)
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(text)
    return CallTarget(plain, signature, passing=len(_exact) < _MOST_EXACT)


def is_heavy(signature: CallSignature) -> bool:
    """Whether a call is a product with enough work, of operands of one type."""
    op = signature.schema.computed
    if op in _CONVOLUTIONS:
        return _multiplications(signature) >= HEAVY
    if op in _ATTENTION:
        q, k = (cast(TensorOperand, signature.leaves[n]) for n in _ATTENTION[op])
        return _alike(q, k) and math.prod(q.shape) * k.shape[-2] >= HEAVY
    if (matrices := _matrices(signature)) is None:
        return False
    left, right = matrices
    large = math.prod(right.shape[-2:]) >= LARGE
    return large or bool(math.prod(left.shape) * right.shape[-1] >= HEAVY)


def _terms(signature: CallSignature) -> int:
    """Of each of a product's sums; 0 for other calls."""
    matrices = _matrices(signature)
    return 0 if matrices is None else int(matrices[0].shape[-1])


def _is_long(signature: CallSignature) -> bool:
    """Whether a call is a product of matrices with few results and a long sum, such as the gradient of a small layer's weight. (The
    layer itself, x @ w.T, may have any number of rows.)"""
    matrices = _matrices(signature)
    if matrices is None or signature.schema.computed is not aten.mm.default:
        return False
    left, right = matrices
    if len(left.shape) != 2 or len(right.shape) != 2 or not left.dtype.is_floating_point:
        return False
    (rows, terms), columns = left.shape, right.shape[1]
    is_layer = left.order == (0, 1) and right.order == (1, 0)
    return bool(terms >= max(LONG, rows, columns)) and not is_layer


def _matrices(signature: CallSignature) -> tuple[TensorOperand, TensorOperand] | None:
    """The matrices of a product, if they have one type."""
    places = _PRODUCTS.get(signature.schema.computed)
    if places is None:
        return None
    left, right = (cast(TensorOperand, signature.leaves[k]) for k in places)
    return (left, right) if _alike(left, right) else None


def _reduces_many(signature: CallSignature) -> bool:
    if signature.schema.computed not in _REDUCTIONS:
        return False
    return any(math.prod(x.shape) >= _MANY for x in signature.operands())


def _multiplications(signature: CallSignature) -> int:
    """Of a convolution, or of one of its gradients; 0 for operands of different types."""
    backward = signature.schema.computed is aten.convolution_backward.default
    leaves: tuple[Any, ...] = tuple(signature.leaves)
    read, weight = leaves[0], leaves[2 if backward else 1]
    if not _alike(read, weight):
        return 0
    if not _scatters(signature):
        positions = math.prod(read.shape) // max(read.shape[1], 1)
        return int(positions * math.prod(weight.shape) // math.prod(leaves[3]))
    # Each element of the result's gradient, or of a transposed convolution's argument, meets the weights of its channel.
    channel = 1 if backward and leaves[7] else 0
    return int(math.prod(read.shape) * math.prod(weight.shape) // max(weight.shape[channel], 1))


def _scatters(signature: CallSignature) -> bool:
    """Whether it is a transposed convolution, or gradients of any convolution."""
    op = signature.schema.computed
    return op is aten.convolution_backward.default or (op is aten.convolution.default and bool(signature.leaves[6]))


def _alike(left: Any, right: Any) -> bool:
    return isinstance(left, TensorOperand) and isinstance(right, TensorOperand) and left.dtype is right.dtype
