"""Operators composed of others, where torch has no decomposition or one whose results differ from its kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from lapilli import formulas
from lapilli.lower.registry import decomposition

aten = torch.ops.aten

_BLOCKS, _WIDTH = 6, 3
_LARGEST_NORM = 3.0
_SQUARINGS = 10


@decomposition(aten.linalg_matrix_exp.default)
def matrix_exp(a: Tensor) -> Tensor:
    """exp(A) of matrices [*, n, n] by scaling and squaring: exp(A / 2^k)^(2^k), with k such that the row-sum norm of A /
    2^k is at most 3. The Taylor series has 18 terms, evaluated in blocks of three (Paterson and Stockmeyer 1973).

    k is computed for every matrix; squarings that a matrix does not need leave it unchanged. Results are accurate up to
    norms of 3072. Larger ones overflow anyway, except those of matrices with mostly imaginary eigenvalues.
    """
    n = a.shape[-1]
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    norm = a.abs().sum(-1).amax(-1) if n else a.new_zeros(a.shape[:-2])
    k = torch.ceil(torch.log2((norm / _LARGEST_NORM).clamp(min=0.5))).clamp(0, _SQUARINGS)[..., None, None]
    x = a * torch.exp2(-k)
    square = x @ x
    cube = square @ x
    result = torch.zeros_like(a)
    for block in reversed(range(_BLOCKS)):
        one, two, three = (1 / math.factorial(_WIDTH * block + i) for i in range(_WIDTH))
        terms = eye * one + x * two + square * three
        result = terms if block == _BLOCKS - 1 else cube @ result + terms
    for squaring in range(_SQUARINGS):
        result = torch.where(k > squaring, result @ result, result)
    return result


@decomposition(aten.linalg_tensorinv.default)
def tensorinv(a: Tensor, ind: int = 2) -> Tensor:
    """The inverse of `a` as a linear map from its last dimensions to its first `ind` ones: a.shape = first + last -> last +
    first.
    """
    first, last = a.shape[:ind], a.shape[ind:]
    inverse: Tensor = torch.linalg.inv_ex(a.reshape(math.prod(last), -1))[0]
    return inverse.reshape(*last, *first)


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * x + alpha * sum over b of a[b] @ b[b]: x [n, p], a [B, n, m], b [B, m, p] -> [n, p]. It is computed as one
    product, with the batch as part of the inner dimension.
    """
    depth = a.shape[0] * a.shape[2]
    total = torch.mm(a.permute(1, 0, 2).reshape(a.shape[1], depth), b.reshape(depth, b.shape[2])) * alpha
    return total if beta == 0 else x * beta + total


decomposition(aten._native_multi_head_attention.default)(formulas.multi_head_attention)
decomposition(aten._transformer_encoder_layer_fwd.default)(formulas.transformer_encoder_layer)


@decomposition(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """x [N, C] or [C], target [N] or []: mean over classes i != target of weight[target] * max(0, margin - x[target] +
    x[i])^p.

    NaN counts as 0, as in torch's kernels (but not in its decomposition). The result is [N] or [] for reduction 0, else [].
    """
    rank = x.dim()
    x, target = _in_rows(x), target.reshape(-1, 1)
    apart = _hinge(margin - x.gather(1, target) + x)
    if p == 2:
        apart = apart * apart
    if weight is not None:
        apart = torch.where(
            apart > 0, apart * weight.reshape(-1)[target], 0
        )  # an infinite weight of nothing is nothing
    losses = torch.where(torch.arange(x.shape[1], device=x.device) != target, apart, 0).sum(1) / x.shape[1]
    loss = _reduced(losses, reduction)
    return loss.reshape(()) if rank < 2 else loss


@decomposition(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """x and target [N, C] or [C]: the sum over labels t and other classes i of max(0, 1 - x[t] + x[i]) / C. Labels end at
    the first -1.

    Returns the loss ([N] or [] for reduction 0, else []) and, in the shape of x, which classes are labels. NaN counts as 0,
    as above.
    """
    shape, x, target = target.shape, _in_rows(x), _in_rows(target)
    classes = x.shape[-1]
    places = torch.arange(classes, device=x.device)
    count = torch.where(target == -1, places, classes).amin(-1, keepdim=True)
    is_given = places < count
    is_label = (places == torch.where(is_given, target, -1).unsqueeze(-1)).any(1)
    apart = _hinge(1.0 - x.gather(-1, torch.where(is_given, target, 0)).unsqueeze(-1) + x.unsqueeze(1))
    counted = is_given.unsqueeze(-1) & ~is_label.unsqueeze(1)
    losses = torch.where(counted, apart, 0).sum((1, 2)) / classes
    loss = _reduced(losses, reduction)
    return (loss.reshape(()) if len(shape) < 2 else loss), is_label.to(x.dtype).reshape(shape)


@decomposition(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, batch: int, channels: int, count: int, groups: int,
    wanted: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """torch's decomposition: grad and x [N, C, *] -> gradients of x, weight [C] and bias [C], None where not wanted.

    That divides by the number of elements. Without any, the weight's gradient is NaN, as in torch's kernel.
    """
    if count != 0:
        known: Any = decomposition_table[aten.native_group_norm_backward.default]
        return list(known(grad, x, mean, rstd, weight, batch, channels, count, groups, wanted))
    made = (torch.zeros_like(x), x.new_full((channels,), math.nan if batch else 0.0), x.new_zeros(channels))
    return [t if w else None for t, w in zip(made, wanted, strict=True)]


def _in_rows(x: Tensor) -> Tensor:
    return x if x.dim() > 1 else x.reshape(1, -1)


def _hinge(z: Tensor) -> Tensor:
    return torch.where(z > 0, z, 0)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    """reduction: 0 none, 1 mean, 2 sum."""
    return losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses
