"""Finds the intermediates of norms that a model or a decomposition writes out; they stay float32 in half-precision
programs.

Numbers such as 300 and 1e-4 fit half precision, and so does the norm of a row of them, but their squares do not.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_POWERS = {aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor}
_TOTALS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
_ROOTS = {aten.sqrt.default, aten.rsqrt.default, aten.pow.Tensor_Scalar}
_EPSILONS = {aten.add.Tensor, aten.add.Scalar, aten.clamp_min.default}


def is_inside_norm(node: fx.Node) -> bool:
    """Whether a node is a power that is only summed, or a sum of which only the root is used."""
    if node.target in _POWERS:
        repeated = node.target is not aten.mul.Tensor or node.args[0] is node.args[1]
        return repeated and bool(node.users) and all(u.target in _TOTALS for u in node.users)
    return node.target in _TOTALS and bool(node.users) and all(map(_is_root, node.users))


def _is_root(node: fx.Node) -> bool:
    if node.target in _EPSILONS:
        return not isinstance(node.args[1], fx.Node) and bool(node.users) and all(map(_is_root, node.users))
    shrinks = node.target is not aten.pow.Tensor_Scalar or (isinstance(node.args[1], float) and abs(node.args[1]) < 1)
    return node.target in _ROOTS and shrinks
