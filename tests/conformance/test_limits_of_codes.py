"""Activations that limit numbers are limits of codes: the codes are torch's, to the last one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from agreement import Function

import lapilli
from lapilli.capture import capture
from lapilli.legalize.passes import prepare

decomposed = torch.ops.quantized_decomposed
Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "above": lambda x: x.clamp(min=0.37),
    "below": lambda x: x.clamp(max=-0.2), "between": lambda x: x.clamp(0.51, 1.24), "both": lambda x: F.relu6(x.clamp(-3.0, 2.0)),
}  # fmt: skip


def quantized(activation: Activation, scale: float, zero: int, low: int) -> Function:
    dtype = torch.uint8 if low == 0 else torch.int8

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = decomposed.quantize_per_tensor(activation(x), scale, zero, low, low + 255, dtype)
        return q, decomposed.dequantize_per_tensor(q, scale, zero, low, low + 255, dtype) + 1.0

    return Function(f)


@pytest.mark.poor_device
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_codes_are_those_of_torch(name: str) -> None:
    r = random.Random(name)
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(4000) * 3, torch.linspace(-2, 2, 4093), torch.tensor([0.0, -0.0, 1e30, -1e30, 6.0, 0.37, 0.51])]
    )
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf])])
    for low in (0, -128):
        for _ in range(3):
            model = quantized(ACTIVATIONS[name], r.uniform(0.002, 0.1), low + r.choice((0, 255, r.randrange(256))), low)
            with lapilli.compile(model, (x,), fallback="error") as program:
                (codes, numbers), (right, wanted) = program(x), model(x)
                assert torch.equal(codes, right)
                torch.testing.assert_close(numbers, wanted)  # a device may multiply and add in one


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nothing_is_left_of_them(name: str) -> None:
    module = prepare(capture(quantized(ACTIVATIONS[name], 0.01, 3, -128).eval(), (torch.zeros(8),)))
    names = {str(n.target) for n in module.graph.nodes if n.op == "call_function"}
    assert not {n for n in names if any(word in n for word in ("relu", "hardtanh", "clamp"))}, names


@pytest.mark.poor_device
def test_nan_does_not_reach_its_neighbours() -> None:
    """torch leaves open which code it gets."""
    x = torch.randn(3, 16)
    x[0, 1] = x[1, 4] = x[2, 15] = torch.nan
    weight = torch.eye(16)

    def f(x: torch.Tensor) -> torch.Tensor:
        q = decomposed.quantize_per_tensor(x, 0.03, 5, -128, 127, torch.int8)
        return F.linear(decomposed.dequantize_per_tensor(q, 0.03, 5, -128, 127, torch.int8), weight)

    model = Function(f)
    with lapilli.compile(model, (x,), fallback="error") as program:
        got, wanted = program(x), model(x)
    real = ~x.isnan()
    assert torch.equal(got[real], wanted[real])
    assert got.isfinite().all()
