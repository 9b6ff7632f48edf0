"""Convolutions in groups whose channels fill no vectors, and depthwise ones with wide kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import plan
from torch import Tensor, nn

import lapilli
from lapilli.ir.node import Convolution
from lapilli.target import CPU, GPU, GPU_MATRIX, Target

GROUPS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "odd channels": (nn.Conv2d(9, 15, 3, padding=1, groups=3), (3, 9, 6, 7)),
    "odd channels of the input alone": (nn.Conv2d(21, 24, (2, 3), stride=2, groups=3), (2, 21, 9, 8)),
    "odd results alone": (nn.Conv2d(16, 14, 3, dilation=2, groups=2), (1, 16, 9, 8)),
    "more results than a tile has": (nn.Conv2d(10, 62, 3, groups=2, bias=False), (2, 10, 5, 6)),
    "columns of zeros beside whole vectors": (nn.Conv2d(8, 72, 3, groups=2), (2, 8, 5, 6)),
    "fewer channels than a vector has": (nn.Conv2d(8, 12, 3, groups=4), (2, 8, 5, 6)),
    "1x1": (nn.Conv2d(18, 22, 1, groups=2), (2, 18, 5, 6)),
    "one row": (nn.Conv2d(18, 22, (1, 5), groups=2), (1, 18, 1, 5)),
    "1-D": (nn.Conv1d(35, 25, 5, padding=2, groups=5), (3, 35, 19)),
    "few channels and results": (nn.Conv2d(12, 12, 3, padding=1, groups=4), (3, 12, 7, 9)),
    "few results": (nn.Conv2d(24, 6, 3, 2, 1, groups=3), (2, 24, 7, 9)),
    "two of two": (nn.Conv2d(10, 10, (3, 2), groups=5), (1, 10, 7, 9)),
    "3-D": (nn.Conv3d(21, 33, 3, padding=1, groups=3), (2, 21, 4, 5, 6)),
    "transposed": (nn.ConvTranspose2d(21, 33, 3, padding=1, groups=3), (2, 21, 5, 6)),
    "transposed, with stride": (nn.ConvTranspose1d(14, 10, 4, stride=2, groups=2), (2, 14, 9)),
    "depthwise": (nn.Conv2d(11, 11, 3, padding=1, groups=11), (2, 11, 6, 7)),
    "depthwise, three results a channel": (nn.Conv2d(5, 15, 3, padding=1, groups=5), (2, 5, 6, 7)),
    "depthwise, wide": (nn.Conv2d(7, 7, (3, 17), padding=(1, 8), groups=7), (2, 7, 6, 19)),
    "depthwise, wide, few results": (nn.Conv2d(8, 8, 17, padding=8, groups=8), (1, 8, 7, 5)),
    "depthwise, wide, with stride": (nn.Conv2d(8, 8, (2, 18), stride=2, padding=8, groups=8), (2, 8, 9, 30)),
    "depthwise, wide, with dilation": (nn.Conv1d(8, 8, 16, dilation=2, padding=3, groups=8), (2, 8, 60)),
}


def compared(program: Any, model: nn.Module, x: Tensor) -> None:
    """Results against those in float64: sums of at most 567 products in float32, which are NaN or infinite in the same places."""
    with torch.no_grad():
        found, exact = program(x).double(), model.double()(x.double())
        model.float()
    finite = exact.isfinite()
    assert torch.equal(finite, found.isfinite())
    assert (found - exact)[finite].norm() <= 1e-6 * exact[finite].norm()
    assert torch.equal(found.isnan(), exact.isnan())


@pytest.mark.part(4)
@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("target", ["cpu-fp32", "any-fp32", "gpu-fp32"])
@pytest.mark.parametrize("case", GROUPS)
def test_a_group_sees_its_own_channels(case: str, target: str) -> None:
    """Zeros that fill up a group are multiplied with zeros, not with what another group has."""
    torch.manual_seed(0)
    model, shape = GROUPS[case]
    x = torch.randn(shape)
    with lapilli.compile(model.eval(), (x,), target=target, fallback="error") as program:
        compared(program, model, x)
        x[0, 1], x[-1, -1, ..., 2] = torch.inf, torch.nan
        compared(program, model, x)


@pytest.mark.parametrize("target", [CPU, GPU, GPU_MATRIX], ids=lambda t: t.name)
@pytest.mark.parametrize("case", GROUPS)
def test_no_group_is_left_to_the_generic_kernel(case: str, target: Target) -> None:
    model, (n, *shape) = GROUPS[case]
    schedule = plan(model, torch.randn(2 * n, *shape), target=target)
    found = [
        t for t in schedule.order.run if t.reduction is not None and isinstance(t.reduction.contraction, Convolution)
    ]
    assert found and all(t.template is not None for t in found)


def test_groups_of_open_sizes() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped, self.deep = nn.Conv2d(15, 21, 3, padding=1, groups=3), nn.Conv2d(21, 21, (1, 17), groups=21)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.deep(F.relu(self.grouped(x))))

    torch.manual_seed(0)
    model = Layers().eval()
    batch, width = torch.export.Dim("batch", max=8), torch.export.Dim("width", min=18, max=64)
    example = torch.randn(2, 15, 5, 20)
    with lapilli.compile(
        model, (example,), dynamic_shapes=({0: batch, 3: width},), target="cpu-fp32", fallback="error"
    ) as program:
        for n, w in ((1, 18), (3, 25), (5, 31)):
            compared(program, model, torch.randn(n, 15, 5, w))
