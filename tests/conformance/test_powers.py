"""Powers of floats, against float64: an error in the logarithm of the base would grow with the exponent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agreement import Function

import lapilli

INF, NAN, LARGEST = float("inf"), float("nan"), 3.4028234663852886e38
BASES = (
    0.0,
    -0.0,
    1,
    -1,
    2,
    -2,
    0.5,
    -0.5,
    LARGEST,
    -LARGEST,
    INF,
    -INF,
    NAN,
    1.8446742e19,
    3,
    -3,
    1 + 2.0**-23,
    1 - 2.0**-24,
)
EXPONENTS = (*BASES, 4, 5, -5, 127, 128, -126, -149, 1e10, -1e10, 1e38, 0.25, 1 / 3, 2.5)
UNITS = 2.0**-22
"""Four units in the last place: two of the polynomials, one of the result, and one of a division."""


def powers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with lapilli.compile(Function(torch.pow), (x, y)) as program:
        return program(x, y)


@pytest.mark.parametrize("spread", [80, 1, 0.01])
def test_bases_near_and_far_from_one(spread: float) -> None:
    """Results are all over the range of float32."""
    r = np.random.default_rng(1)
    x = torch.tensor(np.exp(r.uniform(-spread, spread, 20_001)).astype(np.float32))
    y = torch.tensor((r.uniform(-125, 127.9, x.numel()) / x.double().log2().numpy()).astype(np.float32))
    exact = x.double() ** y.double()
    usual = (exact > 2.0**-126) & (exact < LARGEST)
    assert usual.sum() > 19_000
    assert ((powers(x, y) - exact) / exact)[usual].abs().max() <= UNITS


def test_special_numbers() -> None:
    x, y = (t.reshape(-1) for t in torch.meshgrid(torch.tensor(BASES), torch.tensor(EXPONENTS), indexing="ij"))
    found, exact = powers(x, y), x**y
    near = (found - exact).abs() <= UNITS * exact.abs()
    same = (found == exact) | (found.isnan() & exact.isnan())
    tiny = (found.abs() < 2.0**-126) & (exact.abs() < 2.0**-126)  # may be flushed
    wrong = ~(near | same | tiny) | ((found == 0) & (exact == 0) & (found.signbit() != exact.signbit()))
    assert [(x[k].item(), y[k].item(), found[k].item(), exact[k].item()) for k in wrong.nonzero()[:, 0]] == []
