"""What tools/special_values.py tries: families of cases over inputs full of special values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

INF, NAN = float("inf"), float("nan")


class Given:
    """Inputs by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, tensor)


@dataclass(frozen=True)
class Case:
    """function: of a namespace of inputs; atol, rtol: beside the bounds that all have; signed: signs of zeros count;
    exact: float64 knows better than float32 (not for what depends on the type, as nextafter); half: for half inputs too.

    reference and slope: of float64 inputs; torch's own results in float32 are right too."""

    name: str
    function: Callable[[Any], Any]
    atol: float = 0.0
    rtol: float = 0.0
    signed: bool = False
    exact: bool = True
    half: bool = True
    differentiable: bool = True
    reference: Callable[[Any], Any] | None = None  # better than torch in float64
    slope: Callable[[Any], Any] | None = None  # the gradient, where torch's in float64 is not exact either


@dataclass
class Family:
    name: str
    inputs: dict[str, torch.Tensor]
    cases: list[Case] = field(default_factory=list)
    differentiable: bool = False
    constants: frozenset[str] = frozenset()  # inputs that are a compiled program's constants


VALUES = torch.tensor([
    NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, 2.0**-126, -(2.0**-126), 3.4028234663852886e38,
    -3.4028234663852886e38, 1e7, 3e7, 1e8, 3e8, -1e8, -3e8, 1e5, -1e5, -1e6, 1 - 2.0**-24, 1 + 2.0**-23, -1 + 2.0**-24,
    -1 - 2.0**-23, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 2.0, -2.0, 3.0, -3.0, 1e-20, -1e-20, 1e20, -1e20, 1e30, 1e-4,
    -1e-4, 88.5, 89.0, -87.0, -104.0, 10.0, -10.0, 20.5, -5.3, 0.99, -0.99, 3.1415927, 1.5707964, 6e-8, 65504.0, 70000.0,
    -65504.0, 8388609.0, 6e-5, 1e12,
])  # fmt: skip
FEW = torch.tensor([
    NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3.4028234663852886e38, -3.4028234663852886e38, 1.0, -1.0, 0.5, -0.5,
    2.0, -3.0, 1e20, -1e30, 1e-20, 1e7, -65504.0, 3.1415927, -0.1, 7.0,
])  # fmt: skip
