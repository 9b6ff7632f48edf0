"""Programs with an open number of rows are right for any number: it decides which kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.target import TARGETS

pytestmark = pytest.mark.usefixtures("on_any_device")

PLANS = ("gpu-fp32", "gpu-fp16", "gpu-fp16-matrix")


class Layers(nn.Module):
    """A chain, so that what one kernel left out would be what the next one reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(x)))
        return x


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        k = q[:, :, :1].expand(-1, -1, 48, -1) * torch.linspace(-1, 1, 48)[:, None].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, k + 1)


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]
] = {  # made, its input, which axis is open
    "linear layers": (lambda: Layers(64), lambda rows: torch.randn(rows, 64), 0),
    "layers whose columns fill no tile": (lambda: Layers(40), lambda rows: torch.randn(1, rows, 40), 1),
    "images": (Images, lambda rows: torch.randn(-(-rows // 49), 16, 7, 7), 0),
    "attention": (Attention, lambda rows: torch.randn(1, 2, rows, 32), 2),
}
PRODUCTS = ("matmul", "few_rows", "matvec")
COUNTS = (1, 2, 7, 8, 9, 16, 17, 128, 129, 256, 257, 300, 1024, 1025)


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plan that software drivers take."""
    name = str(request.param)
    monkeypatch.setitem(TARGETS, name, replace(TARGETS[name], shared_memory=32768))
    return name


def program_of(model: nn.Module, x: Tensor, axis: int, plan: str, **options: Any) -> lapilli.Program:
    half = plan != "gpu-fp32"
    shapes = ({axis: torch.export.Dim("rows", max=2000)},)
    given = x.half() if half else x
    made = model.half() if half else model
    return lapilli.compile(made, (given,), dynamic_shapes=shapes, target=plan, fallback="error", **options)


@pytest.mark.part(2)
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_rows(name: str, plan: str) -> None:
    make, given, axis = MODELS[name]
    torch.manual_seed(len(name))
    model = make().eval()
    with program_of(model, given(300), axis, plan) as program:
        for rows in COUNTS:
            x = given(rows)
            if plan != "gpu-fp32":
                x = x.half()
            with torch.no_grad():
                wanted = model.double()(x.double())
            error = (program(x).double() - wanted).norm() / wanted.norm()
            # Each layer rounds its result; products add up in float32.
            assert error < (2e-6 if plan == "gpu-fp32" else 2**-9), rows


def test_what_has_no_work_is_left_out(plan: str) -> None:
    """Of the kernels of a layer one is in a profile, and values keep their memory from the first to the last of them."""
    torch.manual_seed(0)
    model = Layers(64).eval()
    x = torch.randn(300, 64)
    with program_of(model, x, 0, plan) as program:
        run = program.description.methods[0].plans[0].run
        products = [d for d in run if d.kernel.startswith(PRODUCTS)]
        for rows in (1, 5, 2000):
            given = torch.randn(rows, 64).numpy()
            given = given if plan == "gpu-fp32" else given.astype(np.float16)
            times = program.profile((given,), 1)
            assert sum(k.kernel.startswith(PRODUCTS) for k in times.kernels) == 4
        assert len(products) > 4
        written = [d.buffers[d.written.index(True)] for d in run]
        buffers = program.description.methods[0].plans[0].buffers
        for command, buffer in enumerate(written):
            assert buffers[buffer].first <= command <= buffers[buffer].last or buffers[buffer].kind != "arena"
