"""Concatenations are written in place by what computes their parts, where these belong to nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from test_schedule import labels, plan
from torch import nn

import lapilli
from lapilli.target import ANY, GPU

X = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(2))


class Branches(nn.Module):
    """Convolutions of these widths, joined along a dimension."""

    def __init__(self, *widths: int, dim: int = 1, after: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Conv2d(8, n, 1) for n in widths)
        self.after = nn.Conv2d(sum(widths) if dim == 1 else widths[0], 8, 1) if after else nn.Identity()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(torch.cat([b(x).relu() for b in self.branches], self.dim))


class Skip(Branches):
    """One part is there already."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(torch.cat([self.branches[0](x), x], 1))


class Shared(Branches):
    """The first part is read elsewhere too."""

    def forward(self, x: torch.Tensor) -> Any:
        first, second = (b(x) for b in self.branches)
        return self.after(torch.cat([first, second], 1)) + first.sum(1, keepdim=True)


class Twice(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        first, _ = (b(x) for b in self.branches)
        return self.after(torch.cat([first, first], 1))


MODELS: dict[str, tuple[nn.Module, int]] = {  # and how many kernels copy
    "two parts": (Branches(8, 16), 0),
    "ten parts": (Branches(*[8] * 10), 0),
    "unaligned parts": (Branches(3, 5), 1),
    "unaligned last part": (Branches(8, 5), 1),
    "along rows": (Branches(8, 8, dim=2), 0),
    "along batches": (Branches(8, 8, dim=0), 0),
    "skip": (Skip(8, 8), 1),
    "read twice": (Shared(8, 8), 1),
    "the same twice": (Twice(8, 8), 1),
    "an output": (Branches(8, 8, after=False), 1),
}


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", MODELS)
def test_copies(name: str, target: Any) -> None:
    model, copies = MODELS[name]
    assert sum(label == "cat" for label in labels(plan(model, X, target=target))) == copies


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_results_agree(target: str, gpu_plans: None) -> None:
    for name, (model, _) in MODELS.items():
        with torch.no_grad(), lapilli.compile(model, (X,), target=target) as program:
            assert relative_error(program(X), model(X)) <= FLOAT_BOUND, name


def test_parts_need_no_barrier_and_live_in_one_buffer() -> None:
    s = plan(MODELS["two parts"][0], X)
    (whole,) = {w.whole for w in s.windows.values()}
    assert labels(s) == ["pack channels_last", "conv2d + relu", "conv2d + relu", "conv2d"]
    assert s.order.run_barriers == [False, True, False, True]
    assert s.order.lifetimes.keys() == {t.out.id for t in s.order.run} - s.windows.keys() | {whole.id}
    assert s.order.lifetimes[whole.id] == (1, 3)


def test_half_precision(gpu_plans: None) -> None:
    model, _ = MODELS["two parts"]
    for target in ("gpu-fp16", "cpu-fp16", "any-fp32"):
        with torch.no_grad(), lapilli.compile(model, (X,), precision="fp16", target=target) as program:
            assert relative_error(program(X), model(X)) <= 1e-2


def test_dynamic_sizes() -> None:
    model, _ = MODELS["two parts"]
    shapes = ({2: torch.export.Dim("h", min=2, max=64), 3: torch.export.Dim("w", min=2, max=64)},)
    with torch.no_grad(), lapilli.compile(model, (X,), dynamic_shapes=shapes) as program:
        for x in (X, torch.randn(1, 8, 9, 13)):
            assert relative_error(program(x), model(x)) <= FLOAT_BOUND


@pytest.mark.parametrize("name", ["two parts", "ten parts", "skip", "along rows"])
def test_every_part_is_verified(name: str) -> None:
    checks = lapilli.verify(MODELS[name][0], (X,), target="any-fp32")
    assert checks and all(c.error < 1e-6 for c in checks)
