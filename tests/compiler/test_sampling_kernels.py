"""Which kernels a draw takes: only those that its parameters can need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import plan
from torch import Tensor, nn

from lapilli.codegen.select import write_all
from lapilli.sampling import next_token
from lapilli.target import KNOWN, TARGETS, of_device

LIMITS = ["bins00", "bins11", "bins21"]  # of all; then a digit for top-k, and one for top-p
MORE = ["bins00", "bins11", "bins12", "bins13", "bins21", "bins22", "bins23"]


class Draw(nn.Module):
    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, logits: Tensor, *given: Tensor) -> Tensor:
        return next_token(logits, *(self.numbers or given))


def kernels(target: str, logits: Tensor, *numbers: float) -> list[str]:
    given = () if numbers else (torch.tensor(1.0), torch.tensor(0), torch.tensor(1.0))
    s = plan(Draw(*numbers), logits, *given, target=TARGETS[target])
    return [k.name.removeprefix("sample_") for k in write_all(s).values() if k.name.startswith("sample_")]


@pytest.mark.parametrize("target", ["gpu-fp16-matrix", "gpu-fp16", "cpu-fp16"])
def test_halves_take_two_digits(target: str) -> None:
    assert kernels(target, torch.zeros(1, 50000).half()) == ["best", *LIMITS, "drawn", "choice"]


@pytest.mark.parametrize("target", ["gpu-fp32", "cpu-fp32"])
def test_floats_take_four_digits(target: str) -> None:
    assert kernels(target, torch.zeros(1, 50000)) == ["best", *MORE, "drawn", "choice"]
    assert kernels(target, torch.zeros(1, 50000).bfloat16()) == ["best", *LIMITS, "drawn", "choice"]


@pytest.mark.parametrize("target", ["any-fp32", "any-fp32-few"])
def test_a_group_draws_a_row_where_devices_have_little(target: str) -> None:
    """Logits, the three parameters together, the random key, and the result."""
    given = torch.zeros(3, 9000), torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    (kernel,) = (k for k in write_all(plan(Draw(), *given, target=TARGETS[target])).values() if k.name == "sample_row")
    assert kernels(target, torch.zeros(1, 50000)) == ["row"]
    assert len(kernel.bindings) == 4 and kernel.local == (128, 1, 1) and kernel.shared < 16384


@pytest.mark.parametrize("device", sorted(KNOWN.keys() - {"swiftshader"}))
def test_known_devices_share_rows_out(device: str) -> None:
    target = of_device(KNOWN[device], half=False, matrix=True)
    s = plan(Draw(), torch.zeros(1, 50000), torch.tensor(1.0), torch.tensor(0), torch.tensor(1.0), target=target)
    assert "sample_choice" in {k.name for k in write_all(s).values()}


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ((0.0, 50, 0.9), []), ((0.7, 0, 1.0), ["drawn"]), ((0.7, 50, 1.0), ["bins00", "bins11", "drawn"]),
        ((0.7, 0, 0.9), ["bins00", "bins21", "drawn"]), ((0.7, 50, 0.9), [*LIMITS, "drawn"]),
    ],
)  # fmt: skip
def test_what_numbers_turn_off_takes_no_kernels(numbers: Any, names: list[str]) -> None:
    assert kernels("gpu-fp16", torch.zeros(3, 9000).half(), *numbers) == ["best", *names, "choice"]


def test_a_row_is_shared_out() -> None:
    s = plan(
        Draw(),
        torch.zeros(2, 128256),
        torch.tensor(1.0),
        torch.tensor(0),
        torch.tensor(1.0),
        target=TARGETS["gpu-fp32"],
    )
    groups = {k.name: tuple(int(g.value or 0) for g in k.groups) for k in write_all(s).values()}
    assert groups["sample_bins00"] == groups["sample_drawn"] == (32, 1, 2)  # 4096 elements each
    assert groups["sample_choice"] == (1, 1, 2)
