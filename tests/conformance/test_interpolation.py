"""Resizing: which pixels a result is made of, seen by NaN, whatever their weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import lapilli


class Resized(torch.nn.Module):
    def __init__(self, size: tuple[int, int], mode: str, align_corners: bool) -> None:
        super().__init__()
        self.size, self.mode, self.align_corners = size, mode, align_corners

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=self.size, mode=self.mode, align_corners=self.align_corners)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("height, out", [(13, 1), (7, 7), (3, 9), (13, 5), (9, 3)])
def test_nan_reaches_what_is_read(height: int, out: int, mode: str, align_corners: bool) -> None:
    """Weights are 0 for some of the pixels that torch reads: 0 * NaN is NaN."""
    x = torch.zeros(height, 1, height, 1)
    x[torch.arange(height), 0, torch.arange(height), 0] = float("nan")
    model = Resized((out, 5), mode, align_corners)
    program = lapilli.compile(model, (x,))
    torch.testing.assert_close(program(x).isnan(), model(x).isnan())


@pytest.mark.parametrize("device", ["program", "vulkan"])
@pytest.mark.parametrize("width, scale", [(2, 2.0), (3, 1.5), (4, 1.0), (8, 0.5)])
def test_four_results_have_no_known_weights(width: int, scale: float, device: str) -> None:
    """Four results are one row of lanes, whose places and weights the driver's compiler knows: it replaces 0 * NaN by 0."""
    for k in range(width):
        x = torch.ones(1, 1, width)
        x[..., k] = float("nan")
        wanted = F.interpolate(x, scale_factor=scale, mode="linear")
        if device == "vulkan":
            found = F.interpolate(x.to("vulkan"), scale_factor=scale, mode="linear").cpu()
        else:
            found = lapilli.compile(lambda x: F.interpolate(x, scale_factor=scale, mode="linear"), (x,))(x)
        torch.testing.assert_close(found.isnan(), wanted.isnan())


class Sizes(torch.nn.Module):
    """One image in several sizes."""

    def __init__(self, sizes: list[tuple[int, ...]], mode: str, align_corners: bool) -> None:
        super().__init__()
        self.sizes, self.mode, self.align_corners = sizes, mode, align_corners

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.interpolate(x, size=s, mode=self.mode, align_corners=self.align_corners) for s in self.sizes]


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode, rank", [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)])
@pytest.mark.parametrize("source", [6, 1])
def test_infinities(mode: str, rank: int, source: int, align_corners: bool) -> None:
    """An infinite pixel times a weight of 0 is NaN, also where a size stays as it is: torch's two taps are one pixel there."""
    model = Sizes(list(product((source, 9, 1, 3) if rank < 3 else (source, 7), repeat=rank)), mode, align_corners)
    x = torch.ones(1, 2, *[source] * rank)
    with lapilli.compile(model, (x,)) as program:
        for place in {0, source // 3, source - 1}:
            x = torch.ones(1, 2, *[source] * rank)
            x[(0, 0) + (place,) * rank], x[(0, 1) + (place,) * rank] = float("inf"), float("nan")
            for size, ours, single, double in zip(model.sizes, program(x), model(x), model(x.double()), strict=True):
                if torch.equal(single.isfinite(), double.isfinite()) and torch.equal(single.isnan(), double.isnan()):
                    torch.testing.assert_close(ours, single, equal_nan=True, msg=lambda m, s=size: f"{s}: {m}")
