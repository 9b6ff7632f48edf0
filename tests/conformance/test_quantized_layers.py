"""Layers of two quantized operands: sums of codes are exact, so results differ from torch's reference only where what is rounded
lies at a tie."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")

decomposed = torch.ops.quantized_decomposed
PLANS = ("cpu-fp32", "gpu-fp32", "gpu-fp16", "gpu-fp32-dot", "gpu-fp16-dot", "gpu-fp32-int8", "gpu-fp16-matrix-int8")


class Layer(torch.nn.Module):
    """A convolution, or a linear layer (dims 0), of codes of the type `kind`, as PT2E writes it. geometry: stride, padding,
    dilation and groups."""

    q: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor | None

    def __init__(
        self, shape: tuple[int, ...], dims: int, kind: torch.dtype, zeros: tuple[int, int], per_channel: bool, bias: bool,
        geometry: tuple[int, int, int, int] = (1, 0, 1, 1), activation: str = "none", codes: bool = True, shifted: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        out = shape[0]
        self.dims, self.kind, self.geometry, self.activation, self.codes = dims, kind, geometry, activation, codes
        self.zeros, self.per_channel = zeros, per_channel
        self.register_buffer("q", torch.randint(-127, 128, shape, dtype=torch.int8))
        self.register_buffer("s", (torch.rand(out if per_channel else 1) + 0.5) / 100)
        self.register_buffer(
            "z", torch.randint(-9, 9, self.s.shape) if shifted else torch.zeros_like(self.s, dtype=torch.int64)
        )
        self.register_buffer("b", torch.randn(out) if bias else None)
        size = float(torch.tensor(shape[1:]).prod())
        self.scale_in, self.scale_out = 0.023, 0.02 * size**0.5
        self.limits = (0, 255) if kind is torch.uint8 else (-128, 127)
        self.numbers = [float(v) for v in self.s], [int(v) for v in self.z]

    def layer(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.dims:
            return F.linear(x, w, bias)
        stride, padding, dilation, groups = self.geometry
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[self.dims - 1]
        result: torch.Tensor = convolve(x, w, bias, stride, padding, dilation, groups)
        return result

    def acted(self, y: torch.Tensor) -> torch.Tensor:
        return {"none": lambda v: v, "relu": F.relu, "relu6": F.relu6}[self.activation](y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.limits
        a = decomposed.quantize_per_tensor(x, self.scale_in, self.zeros[0], low, high, self.kind)
        a = decomposed.dequantize_per_tensor(a, self.scale_in, self.zeros[0], low, high, self.kind)
        if self.per_channel:
            w = decomposed.dequantize_per_channel(self.q, self.s, self.z, 0, -127, 127, torch.int8)
        else:
            w = decomposed.dequantize_per_tensor(self.q, self.numbers[0][0], self.numbers[1][0], -127, 127, torch.int8)
        y = self.acted(self.layer(a, w, self.b))
        y = decomposed.quantize_per_tensor(y, self.scale_out, self.zeros[1], low, high, self.kind)
        if self.codes:
            return y
        return decomposed.dequantize_per_tensor(y, self.scale_out, self.zeros[1], low, high, self.kind)

    def check(self, x: torch.Tensor, got: torch.Tensor) -> None:
        """In float64, where sums of codes are exact."""
        low, high = self.limits
        a = (
            decomposed.quantize_per_tensor(x, self.scale_in, self.zeros[0], low, high, self.kind).double()
            - self.zeros[0]
        )
        column = (-1, *[1] * (self.q.dim() - 1))
        w = self.q.double() - self.z.double().reshape(column)
        scale = self.scale_in * self.s.double().reshape((-1, *[1] * self.dims))
        bias = 0.0 if self.b is None else self.b.double().reshape((-1, *[1] * self.dims))
        total = self.layer(a, w, None) * scale
        steps = self.acted(total + bias) / self.scale_out
        wanted = steps.clamp(low - self.zeros[1], high - self.zeros[1])
        found = got.double() - self.zeros[1] if self.codes else got.double() / self.scale_out
        # The scales, the bias and the step are each rounded once or twice in float32: what is rounded differs by that much.
        slack = 12 * 2.0**-24 * ((total.abs() + abs(bias)) / self.scale_out + 1)
        assert ((found - wanted).abs() <= 0.5 + slack + (0 if self.codes else 2.0**-22 * 256)).all()


def run(model: Layer, x: torch.Tensor, plan: str) -> lapilli.Program:
    program = lapilli.compile(
        model, (x,), target=plan, precision="fp16" if "fp16" in plan else "fp32", fallback="error"
    )
    model.check(x, program(x))
    return program


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (((24, 40), 0, torch.int8, (3, -5), True, True), (5, 40)),
    "a long sum, in 32-bit integers": (((16, 4096), 0, torch.int8, (0, 0), True, True), (3, 4096)),
    "a convolution with a long sum": (
        ((8, 512, 3, 3), 2, torch.uint8, (128, 100), True, True, (1, 1, 1, 1), "relu"), (1, 512, 5, 4),
    ),
    "depthwise": (((16, 1, 3, 3), 2, torch.uint8, (0, 0), True, True, (2, 1, 1, 16), "relu6"), (2, 16, 9, 7)),
    "padding counts as zero, not as the zero point": (
        ((8, 4, 3, 3), 2, torch.int8, (50, -128), True, False, (1, 2, 1, 1), "relu"), (1, 4, 6, 6),
    ),
    "weights with zero points": (
        ((12, 8, 3), 1, torch.int8, (-7, 4), True, True, (1, 1, 2, 1), "none", False, True), (2, 8, 11),
    ),
}  # fmt: skip


@pytest.mark.parametrize("plan", ("cpu-fp32", "gpu-fp32", "gpu-fp32-dot", "gpu-fp32-int8"))
@pytest.mark.parametrize("name", CASES)
def test_layers(name: str, plan: str) -> None:
    torch.manual_seed(0)
    arguments, shape = CASES[name]
    model = Layer(*arguments)
    run(model, torch.randn(shape), plan).close()


def any_layer(seed: int) -> tuple[Layer, torch.Tensor, str]:
    r = random.Random(seed)
    torch.manual_seed(seed)
    dims = r.choice((0, 0, 1, 2, 2, 2, 3))
    groups = r.choice((1, 1, 1, 2, 4)) if dims else 1
    channels, out = (groups * r.choice((1, 3, 4, 8, 16, 17, 48)) for _ in range(2))
    if dims == 2 and r.random() < 0.3:
        groups = out = channels
    kernel = r.choice((1, 2, 3, 5)) if dims else 1
    kind = r.choice((torch.int8, torch.uint8))
    low = 0 if kind is torch.uint8 else -128
    zeros = r.choice((low, low + 128, low + r.randrange(256))), r.choice((low, low + 128, low + r.randrange(256)))
    shape = (out, channels // groups, *[kernel] * dims)
    geometry = r.choice((1, 1, 2, 3)), r.choice((0, 1, kernel // 2)), r.choice((1, 1, 2)), groups
    model = Layer(
        shape, dims, kind, zeros, r.random() < 0.7, r.random() < 0.7, geometry, r.choice(("none", "relu", "relu6")),
        r.random() < 0.5, r.random() < 0.25,
    )  # fmt: skip
    sizes = [r.choice((9, 10, 12, 17)) for _ in range(dims)]
    x = (
        torch.randn(*r.choice(((1,), (3,), (2, 3), ())), channels)
        if not dims
        else torch.randn(r.choice((1, 2)), channels, *sizes)
    )
    return model, x, r.choice(PLANS)


@pytest.mark.parametrize("seed", range(36))
def test_any_layer(seed: int) -> None:
    model, x, plan = any_layer(seed)
    run(model, x, plan).close()


class Chain(torch.nn.Module):
    """Two convolutions with padding, pooling and a view between them, all on one grid."""

    a: torch.Tensor
    b: torch.Tensor
    s: torch.Tensor
    t: torch.Tensor
    zeros: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8))
        self.register_buffer("b", torch.randint(-127, 128, (8, 16, 3, 3), dtype=torch.int8))
        self.register_buffer("s", torch.rand(16) / 1000 + 0.001)
        self.register_buffer("t", torch.rand(8) / 1000 + 0.001)
        self.register_buffer("zeros", torch.zeros(16, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def rounded(v: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
            q = decomposed.quantize_per_tensor(v, scale, zero, -128, 127, torch.int8)
            return decomposed.dequantize_per_tensor(q, scale, zero, -128, 127, torch.int8)

        def weight(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return decomposed.dequantize_per_channel(q, s, self.zeros[: len(s)], 0, -127, 127, torch.int8)

        y = rounded(F.relu(F.conv2d(rounded(x, 0.03, 5), weight(self.a, self.s), padding=1)), 0.05, -128)
        y = rounded(F.pad(y, (1, 1, 1, 1)), 0.05, -128)
        y = rounded(F.max_pool2d(y, 2), 0.05, -128)
        return rounded(F.conv2d(y, weight(self.b, self.t)), 0.1, 11)


@pytest.mark.parametrize("plan", PLANS)
def test_codes_stay_codes_between_layers(plan: str) -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(2, 8, 12, 10)
    precision: Literal["fp16", "fp32"] = "fp16" if "fp16" in plan else "fp32"
    with lapilli.compile(model, (x,), target=plan, precision=precision, fallback="error") as program:
        got, wanted = program(x), model(x)
        kernels = [k.name for k in program.description.kernels]
    steps = ((got - wanted) / 0.1).round()
    # A tie in the first layer can move a sum of the second by one code times a weight, and that by one step.
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() <= 0.01
    assert sum("convolution" in k or "matmul" in k for k in kernels) >= 1
    assert len(kernels) <= 8, kernels  # no kernel dequantizes between them
