"""Sizes that torch keeps as floats, though they are made of integers, and those that really are rounded."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, ToFloat, TruncToInt
from torch.utils._sympy.value_ranges import ValueRanges

from lapilli.errors import UnsupportedOperatorError
from lapilli.lower.torch_sizes import Symbols

N = sympy.Symbol("n", integer=True)


def symbols() -> Symbols:
    return Symbols({N: ValueRanges(1, 64)})


def test_floats_made_of_integers_are_sizes() -> None:
    known = symbols()
    n = known.size(N)
    for e, wanted in (
        (ToFloat(N), n),
        (CeilToInt(ToFloat(N)), n),
        (CeilToInt(FloatTrueDiv(ToFloat(N), sympy.Float(1.0), evaluate=False)), n),
        (TruncToInt(2.0 * ToFloat(N) + 3.0), n * 2 + 3),
        (TruncToInt(1.5 * ToFloat(N)), n * 3 // 2),
    ):
        assert known.size(e) == wanted, e


def test_floats_that_are_rounded_are_refused() -> None:
    for e in (TruncToInt(0.7 * ToFloat(N)), CeilToInt(FloatTrueDiv(ToFloat(N), sympy.Float(0.3)))):
        with pytest.raises(UnsupportedOperatorError, match="rounded from a float"):
            symbols().size(e)
