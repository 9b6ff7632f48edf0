"""Conversions that a model writes round, overflow and wrap around, whether the result is stored or read by the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from conversion_cases import TO_HALF, VALUES
from torch import Tensor, nn

import lapilli
from lapilli import autoload

autoload.register()


def run(f: Callable[[Tensor], list[Tensor]], x: Tensor, **options: Any) -> None:
    got, want = lapilli.compile(Function(f), (x,), fallback="error", **options)(x), f(x)
    wrong = [
        f"{name}: {ours.tolist()} for {theirs.tolist()}"
        for name, ours, theirs in zip(TO_HALF, got, want, strict=False)
        if not same(ours, theirs)
    ]
    assert not wrong, wrong


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit by bit, but for sums, which may be made in another order, and the sign of NaN."""
    return ours.dtype is theirs.dtype and bool(torch.isclose(ours, theirs, 1e-6, 0, equal_nan=True).all())


def every(x: Tensor) -> list[Tensor]:
    return [f(x) for f in TO_HALF.values()]


@pytest.mark.parametrize(
    "target, precision",
    [pytest.param("any-fp32", "fp32", marks=pytest.mark.poor_device), ("cpu-fp32", "fp32"), ("gpu-fp16", "fp16")],
)
def test_floats_are_rounded(target: str, precision: Any, gpu_plans: None) -> None:
    """Inputs and outputs are float32 whatever the precision, and so are steps of one kernel; in fp16 the values that it stores
    are halves, so that only what is rounded to them anyway is compared."""
    if precision == "fp32":
        run(every, VALUES, target=target)
        return
    program = lapilli.compile(Function(lambda x: x.half().float() + 1), (VALUES,), target=target, precision=precision)
    assert same(program(VALUES), VALUES.half().float() + 1)


def test_floats_are_rounded_by_torch_compile_and_eager() -> None:
    torch._dynamo.reset()
    for name, ours, eager, theirs in zip(
        TO_HALF,
        torch.compile(every, backend="vulkan")(VALUES),
        [f(VALUES.to("vulkan")).cpu() for f in TO_HALF.values()],
        every(VALUES),
        strict=True,
    ):
        assert same(ours, theirs), name
        assert same(eager, theirs), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_halves_are_rounded_where_they_leave_their_type(dtype: torch.dtype) -> None:
    x = VALUES.to(dtype)
    model = Function(lambda x: ((x * 300).float(), x.float() * 3, (x * 300).to(torch.float32) > 1, (x * x).argmax()))
    for ours, theirs in zip(lapilli.compile(model, (x[:-1],))(x[:-1]), model(x[:-1]), strict=True):
        assert same(ours, theirs)


def test_products_under_autocast_have_their_kernels() -> None:
    """A conversion for every reader of a value is made once, and is the copy that the product reads."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            with torch.autocast("cpu", torch.float16):
                return self.q(x).float() * 2 + self.k(x).relu().float()

    torch.manual_seed(1)
    model, x = Layers().eval(), torch.randn(24, 32)
    program = lapilli.compile(model, (x,), target="cpu-fp16", precision="fp16")
    with torch.no_grad():
        assert torch.allclose(program(x), model(x), atol=2e-2, rtol=2e-2)
    kernels = [d.kernel for d in program.description.methods[0].plans[0].run]
    assert sum("mat" in k for k in kernels) >= 1 and len(kernels) <= 4, kernels


def test_floats_to_integers() -> None:
    """Towards zero; small types take the low bits of a number of 32 bits, and what is none becomes the least, as on x86."""
    x = torch.tensor([0.9, -0.9, 2.5, -2.5, 255.0, 256.0, 300.7, -1.0, -300.2, 40000.0, 2147483520.0, -2147483648.0])
    beyond = torch.tensor([2147483648.0, 3e9, -3e9, 1e30, float("inf"), -float("inf"), float("nan")])
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32)

    def f(x: Tensor) -> list[Tensor]:
        return [r for kind in kinds for r in (x.to(kind), x.to(kind).float() * 2)]

    got = lapilli.compile(Function(f), (torch.cat([x, beyond]),))(torch.cat([x, beyond]))
    for k, kind in enumerate(kinds):
        want = torch.cat([x.int(), torch.full((len(beyond),), -(2**31), dtype=torch.int32)]).to(kind)
        assert torch.equal(got[2 * k], want)
        assert torch.equal(got[2 * k + 1], want.float() * 2)


LIMITED: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-128, 127),
    "clamp, round": lambda x: x.round().clamp(0, 255),
    "log": lambda x: torch.log(x.clamp(0, 1)),
    "log2": lambda x: torch.log2(x.clamp(0, 1)) * 3,
    "log10": lambda x: torch.log10(x.abs().clamp(max=100)),
    "tanh": lambda x: torch.tanh(x) * 100,
    "quotient": lambda x: 1 / x.clamp(0, 2),
    "least": lambda x: torch.minimum(x, torch.tensor(9.0)).clamp(min=-9),
    "square root": lambda x: x.clamp(-1, 4).sqrt(),
    "exponential": lambda x: torch.exp(x.clamp(-9, 2)),
}
"""Floats whose range is known, infinities and NaN apart."""


@pytest.mark.parametrize("name", LIMITED)
def test_floats_of_known_ranges_become_integers(name: str) -> None:
    f = LIMITED[name]
    x = torch.tensor(
        [0.0, -0.0, 1.0, 0.5, 1e-3, 3.75, -7.5, 300.0, -300.0, 3e9, float("inf"), -float("inf"), float("nan")]
    )
    kinds = (torch.int8, torch.uint8, torch.int16, torch.int32)

    def converted(x: Tensor) -> list[Tensor]:
        return [f(x).to(kind) for kind in kinds] + [f(x).to(kind).float() * 2 for kind in kinds]

    for target in ("any-fp32", "cpu-fp32"):
        with lapilli.compile(Function(converted), (x,), target=target, fallback="error") as program:
            for kind, ours, theirs in zip(kinds * 2, program(x), converted(x), strict=True):
                assert torch.equal(ours, theirs), f"{kind}: {ours.tolist()} for {theirs.tolist()}"
