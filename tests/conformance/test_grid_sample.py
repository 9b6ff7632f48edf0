"""grid_sample where coordinates are NaN, infinite or far away."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli


class _Sample(nn.Module):
    def __init__(self, mode: str, padding: str, align_corners: bool) -> None:
        super().__init__()
        self.how = mode, padding, align_corners

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, *self.how)


@pytest.mark.parametrize("device", ["program", "vulkan"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    "mode, rank", [("bilinear", 2), ("nearest", 2), ("bicubic", 2), ("bilinear", 3), ("nearest", 3)]
)
def test_coordinates_that_are_nowhere(mode: str, rank: int, padding: str, device: str) -> None:
    torch.manual_seed(0)
    x, grid = torch.randn(2, 3, *[5] * rank), torch.randn(2, *[3] * rank, rank)
    far = [torch.nan, torch.inf, -torch.inf]
    if padding != "reflection":  # where float32 says nothing of the place
        far += [1e30, -1e30, 3e9]
    for align_corners in (False, True):
        model = _Sample(mode, padding, align_corners)
        run = lapilli.compile(model, (x, grid)) if device == "program" else _on_device(model)
        for value, axis in itertools.product(far, range(rank)):
            given = grid.clone()
            given[(0,) * (rank + 1) + (axis,)] = value
            torch.testing.assert_close(run(x, given), model(x, given), rtol=1e-5, atol=2e-5, equal_nan=True)


def _on_device(model: nn.Module) -> lapilli.Program:
    return lambda x, grid: model(x.to("vulkan"), grid.to("vulkan")).cpu()  # type: ignore[return-value]
