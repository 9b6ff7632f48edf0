"""Special functions: accuracy against float64, and what they give for 0, infinity and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agreement import Case, Function, on_device, relative_error, through_interpreter
from pointwise_cases import EDGES, POLYNOMIALS, RANGES, between, special

import lapilli

aten = torch.ops.aten


@pytest.mark.parametrize("packet", RANGES, ids=str)
def test_accuracy(packet: Any) -> None:
    """In norm within 2e-6 of float64, which is close to what single precision can give."""
    case = Case(packet.default, (between(*RANGES[packet], 2000),))
    assert relative_error(through_interpreter([case])[0], case(lambda t: t.double())[0]) < 2e-6


@pytest.mark.parametrize("packet", RANGES, ids=str)
def test_zero_infinity_and_nan(packet: Any) -> None:
    case = Case(packet.default, (EDGES,))
    got, want = through_interpreter([case])[0], case()[0].numpy()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


_X = torch.tensor([1.0, -2.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf")])


@pytest.mark.poor_device
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * 0.0,
        lambda x: x * -0.0,
        lambda x: 0.0 / x,
        lambda x: x - x,
        lambda x: x / 0.0,
        lambda x: x**-2,
        lambda x: x**-3,
    ],
    ids=["x * 0", "x * -0", "0 / x", "x - x", "x / 0", "x ** -2", "x ** -3"],
)
def test_zeros_do_not_hide_nan_and_infinity(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compilers of shaders and drivers make 0 of these. The sign of a zero is kept too."""
    want = call(_X).numpy()
    ours = lapilli.compile(Function(call), (_X,), target="any-fp32")(_X).numpy()
    np.testing.assert_array_equal(ours, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(want[numbers]))


@pytest.mark.poor_device
def test_division_with_remainder() -> None:
    """Bit for bit torch's, near multiples too, where x - trunc(x / y) * y is off by y."""
    x, y = between(-10, 10, 500), between(-1, 1, 500)
    tenths = torch.arange(-60, 60) * 0.1
    special = torch.tensor([0.0, -0.0, 3.0, -7.0, 1e30, float("inf"), -float("inf"), float("nan")])
    x = torch.cat([x, tenths, special.repeat_interleave(len(special))])
    y = torch.cat([y, torch.full_like(tenths, 0.1), special.repeat(len(special))])

    def divide(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.fmod(x, y), torch.remainder(x, y), torch.floor_divide(x, y)

    for ours, want in zip(
        lapilli.compile(Function(divide), (x, y), target="any-fp32")(x, y), divide(x, y), strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), want.numpy())


def test_error_function_on_device() -> None:
    """Within two units in the last place: 1.1 of the formula and the driver's error of exp(x), which 1 - exp(x) makes smaller.
    What others make of it by 1 + erf(x) depends on that (the normal distribution, gelu)."""
    x = torch.cat([torch.linspace(-6, 6, 20001), torch.logspace(-8, 0, 1001), torch.tensor([3e38, float("inf")])])
    exact = torch.erf(x.double())
    ours = lapilli.compile(Function(torch.erf), (x,))(x).double()
    assert ((ours - exact).abs() <= 2.0 * 2**-23 * exact.abs()).all()
    assert lapilli.compile(Function(torch.erf), (x[:1],))(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.poor_device
def test_on_device() -> None:
    """All of them, and those of two numbers, by the functions of lapilli_special.slang."""
    cases = [c for row in special().values() for c in row]
    for case in cases:
        ours, want = on_device([case], "any-fp32")[0], case(lambda t: t.double() if t.is_floating_point() else t)[0]
        assert relative_error(ours, want) < 5e-6, case


def test_polynomials_of_high_degree() -> None:
    x, n = between(-0.99, 0.99, 200), torch.full((200,), 40.0)
    for packet in POLYNOMIALS:
        if "chebyshev" in str(packet) and "shifted" not in str(packet):
            case = Case(packet.default, (x, n))
            assert relative_error(through_interpreter([case])[0], case(lambda t: t.double())[0]) < 1e-5
