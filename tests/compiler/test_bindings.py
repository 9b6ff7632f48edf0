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
from lapilli.compiler import compile_to_bytes
from lapilli.runtime.description import Description
from lapilli.target import ANY, CPU, FEW, GPU, KNOWN, METAL, Target, on_device

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


@pytest.mark.part(8)
@pytest.mark.parametrize("target", [CPU, on_device(GPU, KNOWN[METAL].limits), ANY], ids=lambda t: t.name)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernels_bind_what_devices_take(case: int, target: Target) -> None:
    for count in (7, 9, 12, 13, 24, 33, 60):
        values = [torch.zeros(8, 8) for _ in range(2 * count)]
        made = plan(lambda *v, n=count: CASES[case](list(v[:n]), list(v[n:])), *values, target=target)
        assert max(len(k.bindings) for k in write_all(made).values()) <= target.bindings


@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernels_bind_what_every_device_takes(case: int) -> None:
    values = [torch.zeros(8, 8) for _ in range(14)]
    made = plan(lambda *v: CASES[case](list(v[:7]), list(v[7:])), *values, target=FEW)
    assert max(len(k.bindings) for k in write_all(made).values()) <= FEW.bindings == 4


class ScaledTwice(torch.nn.Module):
    """Reads two values, and three constants that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.rand(8)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * self.a + y) * self.b + self.c


def test_constants_share_a_buffer_when_the_program_is_loaded() -> None:
    made = plan(ScaledTwice(), torch.zeros(4, 8), torch.zeros(4, 8), target=FEW)
    assert [t.reason for t in made.order.load] == ["values that share a buffer"]
    assert len(made.order.run) == 1


def test_only_programs_that_need_the_plan_have_it() -> None:
    x = torch.zeros(4, 8)
    plans = [p.name for p in Description.of(compile_to_bytes(ScaledTwice(), (x, x))).methods[0].plans]
    assert plans[-2:] == [ANY.name, FEW.name]
    methods = {"few": (torch.nn.Linear(8, 8), (x,)), "many": (ScaledTwice(), (x, x))}
    few, many = Description.of(compile_to_bytes(methods)).methods
    assert [p.name for p in few.plans] == plans[:-1]
    assert [p.name for p in many.plans] == plans
