"""Kernels of open sizes are as long as what they do, whatever polynomial a size is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plans import plan
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import adaptive_max_pool2d, conv2d

from lapilli.codegen.select import write_all
from lapilli.target import ANY, CPU, GPU, Target


def attends(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1) @ v.transpose(1, 2)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda y: y.sort(2)[0],
    "median": lambda y: y.median(3)[0],
    "mode": lambda y: y.mode(2)[0],
    "cumsum": lambda y: y.cumsum(2),
    "flip": lambda y: y.flip(2).roll(1, 3),
    "pool": lambda y: adaptive_max_pool2d(y, (3, 5)),
}


def longest(f: Callable[[Tensor], Tensor], x: Tensor, target: Target, dynamic: object) -> int:
    """Characters of the longest kernel."""
    return max(len(k.source) for k in write_all(plan(f, x, target=target, dynamic=dynamic)).values())


def sums(x: Tensor, weight: Tensor) -> Tensor:
    """[2, 4, open, open]: sizes are sums of quotients, and products of these."""
    y = conv2d(x, weight, stride=2)
    y = torch.cat([y, y.transpose(2, 3).flatten(2)[:, :, :, None].expand(-1, -1, -1, y.shape[3])], 2)
    return torch.cat([y, y, y[:, :, :, 1:]], 3)


@pytest.mark.part(3)
@pytest.mark.parametrize("target", [ANY, CPU, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", READERS)
def test_sizes_that_are_sums_make_kernels_no_longer(name: str, target: Target) -> None:
    read, weight, x = READERS[name], torch.randn(4, 3, 3, 3), torch.randn(2, 3, 37, 41)
    dynamic = (({2: Dim("h", min=16, max=300), 3: Dim("w", min=16, max=300)},),)
    simple = longest(lambda x: read(conv2d(x, weight)), x, target, dynamic)
    alone = longest(lambda x: sums(x, weight), x, target, dynamic)
    assert longest(lambda x: read(sums(x, weight)), x, target, dynamic) < simple + alone


@pytest.mark.parametrize("target", [ANY, CPU, GPU], ids=lambda t: t.name)
def test_operands_of_open_sizes_are_copied_as_those_of_large_ones(target: Target) -> None:
    """Batches and heads that do not lie one stride apart, of products whose work is not known: the largest counts."""
    q, k, v = (torch.zeros(4, n, 8, 64) for n in (64, 512, 512))
    count, keys = Dim("count", max=4096), Dim("keys", max=4096)
    made = plan(attends, q, k, v, target=target, dynamic=(({1: count}, {1: keys}, {1: keys}),))
    contractions = [t for t in made.tasks if t.reduction is not None and t.reduction.contraction is not None]
    assert contractions and all(t.template is not None for t in contractions)
