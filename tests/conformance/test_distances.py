"""Distances between points with infinite coordinates: of many points, torch computes |a|^2 - 2 a b + |b|^2, maybe NaN there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import lapilli

inf, nan = float("inf"), float("nan")
MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


def points(many: int) -> torch.Tensor:
    """[many, 2]: all pairs of special numbers first."""
    special = torch.tensor(list(product((1.5, -2.0, inf, -inf, nan, 0.0, -0.0), repeat=2))[::2])
    return torch.cat([special, torch.rand(many, 2)])[:many]


def distances(mode: str, p: float = 2.0) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cdist(a, b, p=p, compute_mode=mode)

    return Model()


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # of products, half of the digits remain
    torch.testing.assert_close(found.cpu(), wanted, rtol=2**-10, atol=2**-10, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(25, 25), (26, 3), (3, 26), (25, 1)], ids=str)
def test_infinities(mode: str, sizes: tuple[int, int]) -> None:
    a, b = points(sizes[0]), points(sizes[1]).flip(1)
    model = distances(mode)
    wanted = model(a, b)
    same(lapilli.compile(model, (a, b))(a, b), wanted)
    same(model(a.to("vulkan"), b.to("vulkan")), wanted)


@pytest.mark.parametrize("least, most", [(2, 25), (26, 60)])
def test_open_numbers_of_points(least: int, most: int) -> None:
    """torch does not export what is on both sides of 25."""
    dims = [{0: torch.export.Dim("p", min=least, max=most)}, {0: torch.export.Dim("r", min=least, max=most)}]
    model, usual = distances(MODES[0]), (least + 1, least + 2)
    compiled = lapilli.compile(model, (points(usual[0]), points(usual[1])), dynamic_shapes=dims)
    for p, r in ((least, most), (most, least), usual):
        a, b = points(p), points(r).flip(1)
        same(compiled(a, b), model(a, b))


@pytest.mark.parametrize("p", [0.0, 1.0, 3.0, inf])
def test_other_norms(p: float) -> None:
    a, b = points(30), points(27).flip(1)
    model = distances(MODES[0], p)
    same(lapilli.compile(model, (a, b))(a, b), model(a, b))
