"""No kernel binds more buffers than every device takes, however many values a program combines."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import pytest
import torch
import torch.nn.functional as F
from plans import plan

from lapilli.codegen.select import write_all
from lapilli.target import ANY, CPU, GPU, KNOWN, METAL, Target, on_device

Values = list[torch.Tensor]


def total(values: Values) -> torch.Tensor:
    return reduce(add, values)


def sums_in_a_chain(x: Values, y: Values) -> torch.Tensor:
    t = x[0]
    for a, b in zip(x, y, strict=True):
        t = (t * a).sum(-1, keepdim=True) + b
    return t


def additions_at_places(x: Values, y: Values) -> torch.Tensor:
    t = torch.zeros(8, 8)
    for a, b in zip(x, y, strict=True):
        t = t.index_add(0, a[:, 0].abs().long() % 8, b)
    return t.sum(-1)


def second_of_two_sums(x: Values, y: Values) -> torch.Tensor:
    return (total(x).sum(-1, keepdim=True) * total(y)).softmax(-1) + total(x) * total(y).amax(-1, keepdim=True)


CASES: list[Callable[[Values, Values], torch.Tensor]] = [
    sums_in_a_chain,
    additions_at_places,
    second_of_two_sums,
    lambda x, y: total(x).sum(-1, keepdim=True) * total(y),
    lambda x, y: total([((a - a[:, :1]) * (b - b[:, :1])).sum(-1) for a, b in zip(x, y, strict=True)]),
    lambda x, y: total([a - a[:, :1] for a in (*x, *y)]),
    lambda x, y: total([a.sum(-1) for a in x]) * total([b.amax(-1) for b in y]),
    lambda x, y: total([a.softmax(-1) for a in x]) + total([b.mean(-1, keepdim=True) for b in y]),
    lambda x, y: total(x) @ total(x).T + total(y) @ torch.ones(8, 8),
    lambda x, y: (x[0] @ torch.ones(8, 8)) * total(x) + total(y),
    lambda x, y: torch.cat([*x, *y], 1) * total(x).sum(),
    lambda x, y: torch.stack([a.sum(-1) for a in (*x, *y)], -1).softmax(-1),
    lambda x, y: F.layer_norm(total(x), (8,), x[0][0], y[-1][0]) + total(y),
    lambda x, y: total([torch.where(a > 0, b.sum(-1, keepdim=True), a.sum(-1, keepdim=True)) for a, b in zip(x, y, strict=True)]),
]  # fmt: skip


@pytest.mark.parametrize("target", [CPU, on_device(GPU, KNOWN[METAL].limits), ANY], ids=lambda t: t.name)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernels_bind_what_devices_take(case: int, target: Target) -> None:
    for count in (7, 9, 12, 13, 24, 33, 60):
        values = [torch.zeros(8, 8) for _ in range(2 * count)]
        made = plan(lambda *v, n=count: CASES[case](list(v[:n]), list(v[n:])), *values, target=target)
        assert max(len(k.bindings) for k in write_all(made).values()) <= target.bindings
