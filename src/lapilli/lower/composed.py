"""Linear algebra in terms of other operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten

_BLOCKS, _WIDTH = 6, 3
_LARGEST_NORM = 3.0
_SQUARINGS = 10


@decomposition(aten.linalg_matrix_exp.default)
def matrix_exp(a: Tensor) -> Tensor:
    """exp(A) = exp(A / 2^k)^(2^k), with the row-sum norm of A / 2^k at most 3 and 18 terms of the Taylor series, evaluated in
    blocks of three (Paterson and Stockmeyer 1973).

    k is found for every matrix; squarings that it does not need leave it as it is. Norms up to 3072 are exact enough: larger
    ones overflow anyway, but for matrices whose eigenvalues are mostly imaginary."""
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
    first, last = a.shape[:ind], a.shape[ind:]
    inverse: Tensor = torch.linalg.inv_ex(a.reshape(math.prod(last), -1))[0]
    return inverse.reshape(*last, *first)


@decomposition(aten.addbmm.default)
def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """One product: the batch joins the inner dimension."""
    joined = a.permute(1, 0, 2).reshape(a.shape[1], -1)
    total = torch.mm(joined, b.reshape(-1, b.shape[2])) * alpha
    return total if beta == 0 else x * beta + total
