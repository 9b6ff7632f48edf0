"""Folds over one element: the element itself, also for a compiler. A difference between both is NaN where it is not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lapilli

FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(2, keepdim=True),
    "mean": lambda x: x.mean(2, keepdim=True),
    "prod": lambda x: x.prod(2, keepdim=True),
    "amax": lambda x: x.amax(2, keepdim=True),
    "amin": lambda x: x.amin(2, keepdim=True),
    "median": lambda x: x.median(2, keepdim=True).values,
    "logsumexp": lambda x: x.logsumexp(2, keepdim=True),
    "cumsum": lambda x: x.cumsum(2),
    "cumprod": lambda x: x.cumprod(2),
    "cummax": lambda x: x.cummax(2).values,
    "sort": lambda x: x.sort(2).values,
    "topk": lambda x: x.topk(1).values,
    "gather": lambda x: x.gather(2, torch.zeros(x.shape, dtype=torch.int64)),
    "product": lambda x: x @ x.new_ones(1, 1),
    "outer": lambda x: x.new_ones(1, 1) @ x.mT,
    "linear": lambda x: F.linear(x, x.new_ones(1, 1)),
    "convolution": lambda x: F.conv1d(x.mT, x.new_ones(1, 1, 1)).mT,
    "average pool": lambda x: F.avg_pool1d(x, 1),
    "max pool": lambda x: F.max_pool1d(x, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(torch.zeros_like(x), x * 0, x),
    "einsum": lambda x: torch.einsum("abk,kc->abc", x, x.new_ones(1, 1)),
    "diagonal": lambda x: x.unsqueeze(3).diagonal(dim1=2, dim2=3),
}
READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x - f": lambda x, f: x - f,
    "f - x": lambda x, f: f - x,
    "f - f": lambda x, f: (f + 1) - (f + 1),
    "x + -f": lambda x, f: x + -f,
    "2 x - 2 f": lambda x, f: x * 2 - f * 2,
    "x / f": lambda x, f: x / f,
    "x == f": lambda x, f: (x == f).float(),
    "x * (x - f)": lambda x, f: x * (x - f),
    "exp(x - f)": lambda x, f: (x - f).exp(),
}


class Model(torch.nn.Module):
    """All readers of one fold."""

    def __init__(self, fold: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fold = fold

    def forward(self, x: Tensor) -> list[Tensor]:
        return [read(y, self.fold(y).reshape(y.shape)) for y in (x, x * 0.5) for read in READERS.values()]


@pytest.mark.poor_device
@pytest.mark.parametrize("fold", FOLDS)
def test_differences_from_what_they_are_made_of(fold: str) -> None:
    _check(fold)


@pytest.mark.parametrize("fold", FOLDS)
def test_by_kernels_for_gpus(fold: str, on_any_device: None) -> None:
    _check(fold, target="gpu-fp32")


def _check(fold: str, target: str | None = None) -> None:
    x = torch.tensor([0.5, -1.5, float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38]).reshape(1, 8, 1)
    model = Model(FOLDS[fold])
    with lapilli.compile(model, (x,), target=target) as program:
        for k, (ours, single, double) in enumerate(zip(program(x), model(x), model(x.double()), strict=True)):
            agreed = (single.isnan() == double.isnan()) & (single.isinf() == double.isinf())
            torch.testing.assert_close(ours[agreed], single[agreed], equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")
