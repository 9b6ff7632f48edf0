"""Resizing: which pixels a result is made of, seen by NaN, whatever their weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from agreement import Function
from torch import Tensor

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
@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
@pytest.mark.parametrize("is_open", [False, True])
def test_infinities_antialiased(name: str, align_corners: bool, is_open: bool) -> None:
    """One infinite pixel: a dimension whose size stays is copied, whatever its scale; in another one every tap of a window counts,
    also with a weight of 0. Where torch's float32 and float64 differ in which they read, ours may be either."""
    resize = getattr(torch.ops.aten, name).default
    sizes = [(2, 2), (2, 3), (2, 5), (5, 3), (7, 2), (9, 9), (4, 8)]

    def resized(x: Tensor) -> list[Tensor]:
        results = [resize(x, list(size), align_corners, None, None) for size in sizes]
        return [*results, resize(x, [x.shape[2], x.shape[3]], align_corners, 1.3, 0.7)]

    x = torch.ones(1, 1, 5, 4)
    dynamic = (
        (({2: torch.export.Dim("h", min=2, max=40), 3: torch.export.Dim("w", min=2, max=40)},),) if is_open else None
    )
    given = x if not is_open else torch.ones(1, 1, 6, 7)
    unlike = 0
    with lapilli.compile(Function(resized), (given,), dynamic_shapes=dynamic) as program:
        for place in [(0, 0), (2, 1), (4, 3), (3, 0), (1, 2)]:
            strange = x.clone()
            strange[(0, 0, *place)] = float("inf")
            for k, (ours, single, double) in enumerate(
                zip(program(strange), resized(strange), resized(strange.double()), strict=True)
            ):
                if torch.equal(single.isfinite(), double.isfinite()) and torch.equal(single.isnan(), double.isnan()):
                    torch.testing.assert_close(
                        ours, single, equal_nan=True, msg=lambda m, k=k, p=place: f"{k}, {p}: {m}"
                    )
                else:
                    unlike += 1
    assert unlike < 5


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
