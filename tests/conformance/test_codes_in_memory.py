"""Networks whose values between layers are codes: each takes a byte on the device, and results are torch's to the last bit.

All scales are powers of two, so that neither torch nor a kernel rounds anything but where the model does.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")

decomposed = torch.ops.quantized_decomposed
PLANS = ("cpu-fp32", "any-fp32", "gpu-fp32", "gpu-fp16", "gpu-fp32-int8", "gpu-fp16-matrix-int8")


class Step(torch.nn.Module):
    """A convolution with what follows it, rounded to a grid of its own. zero: of that grid."""

    weight: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self, channels: int, out: int, kernel: int, geometry: tuple[int, int, int, int], zero: int, kind: torch.dtype,
        per_channel: bool, after: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.geometry, self.zero, self.kind, self.after, self.per_channel = geometry, zero, kind, after, per_channel
        size = channels // geometry[3] * kernel * kernel
        self.register_buffer(
            "weight", torch.randint(-20, 21, (out, channels // geometry[3], kernel, kernel), dtype=torch.int8)
        )
        self.register_buffer("scale", 2.0 ** torch.randint(-7, -5, (out,)).float())
        self.register_buffer("shift", torch.zeros(out, dtype=torch.int64))
        self.register_buffer("bias", torch.randint(-2000, 2000, (out,)) * 2.0**-12)
        self.out_scale = 2.0 ** round(torch.tensor(size**0.5 / 8).log2().item() - 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.per_channel:
            w = decomposed.dequantize_per_channel(self.weight, self.scale, self.shift, 0, -127, 127, torch.int8)
        else:
            w = decomposed.dequantize_per_tensor(self.weight, 2.0**-6, 0, -127, 127, torch.int8)
        stride, padding, dilation, groups = self.geometry
        y = F.conv2d(x, w, self.bias, stride, padding, dilation, groups)
        if self.after == "relu":
            y = F.relu(y)
        y = rounded(y, self.out_scale, self.zero, self.kind)
        if self.after == "sum" and y.shape == x.shape:
            y = rounded(F.relu(x + y), 2.0**-3, self.zero, self.kind)
        if self.after == "pool":
            y = rounded(F.max_pool2d(y, 3, 2, 1), self.out_scale, self.zero, self.kind)
        return y


def rounded(v: torch.Tensor, scale: float, zero: int, kind: torch.dtype) -> torch.Tensor:
    low, high = (0, 255) if kind is torch.uint8 else (-128, 127)
    q = decomposed.quantize_per_tensor(v, scale, zero, low, high, kind)
    return decomposed.dequantize_per_tensor(q, scale, zero, low, high, kind)


class Net(torch.nn.Module):
    def __init__(self, kind: torch.dtype, zero: int, steps: list[Step], head: bool) -> None:
        super().__init__()
        self.kind, self.zero, self.head = kind, zero, head
        self.steps = torch.nn.ModuleList(steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x, 2.0**-5, self.zero, self.kind)
        for step in self.steps:
            x = step(x)
        return x.amax((2, 3)) if self.head else x


def any_net(seed: int) -> tuple[Net, torch.Tensor]:
    r = random.Random(seed)
    torch.manual_seed(seed)
    kind = r.choice((torch.int8, torch.uint8))
    low = 0 if kind is torch.uint8 else -128
    zero = r.choice((low, low + 128, low + r.randrange(256)))
    channels = first = r.choice((1, 3, 3, 4, 5, 7, 8, 17))
    steps = []
    for _ in range(r.choice((2, 3))):
        kernel = r.choice((1, 1, 3, 3, 5))
        form = r.choice(("full", "full", "depthwise", "groups", "same"))
        groups = channels if form == "depthwise" else 2 if form == "groups" and channels % 2 == 0 else 1
        out = channels if form in ("depthwise", "same") else groups * r.choice((1, 3, 4, 5, 8, 12, 16, 16, 17, 32))
        geometry = (
            1 if form == "same" else r.choice((1, 1, 2)),
            kernel // 2,
            r.choice((1, 1, 2)) if kernel == 3 else 1,
            groups,
        )
        after = "sum" if form == "same" else r.choice(("none", "relu", "pool"))
        steps.append(Step(channels, out, kernel, geometry, r.choice((low, zero)), kind, r.random() < 0.6, after))
        channels = out
    x = torch.randn(r.choice((1, 3)), first, r.choice((9, 12, 13)), r.choice((8, 11, 16)))
    return Net(kind, zero, steps, r.random() < 0.3), x


@pytest.mark.parametrize("seed", range(24))
def test_any_network(seed: int) -> None:
    model, x = any_net(seed)
    plan = PLANS[seed % len(PLANS)]
    precision: Literal["fp16", "fp32"] = "fp16" if "fp16" in plan else "fp32"
    opened = {"x": {0: torch.export.Dim("n", min=1, max=8)}} if seed % 3 == 0 and len(x) > 1 else None
    with lapilli.compile(
        model, (x,), dynamic_shapes=opened, target=plan, precision=precision, fallback="error"
    ) as program:
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
        if opened is not None:
            torch.testing.assert_close(program(x[:2]), model(x[:2]), rtol=0, atol=0)


def test_a_byte_a_value() -> None:
    """What lies in memory at once is a quarter of what floats take, and so are filters."""
    torch.manual_seed(0)
    shapes = ((8, 16, 3), (16, 32, 1), (32, 32, 3), (32, 64, 1), (64, 12, 3))
    steps = [Step(a, b, k, (1, k // 2, 1, 1), -128, torch.int8, True, "relu") for a, b, k in shapes]
    model, x = Net(torch.int8, 3, steps, True), torch.randn(1, 8, 48, 40)
    with lapilli.compile(model, (x,), target="cpu-fp32", fallback="error") as program:
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
        memory = program.memory()
    plain = torch.nn.Sequential(*(torch.nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in shapes))
    with lapilli.compile(plain.eval(), (x,), target="cpu-fp32", fallback="error") as program:
        program(x)
        floats = program.memory()
    assert memory.arena <= 0.27 * floats.arena
    assert memory.constants <= 1.05 * sum(a * b * k * k for a, b, k in shapes) + 4096 * len(shapes)


def test_a_long_sum_is_cut_into_exact_parts() -> None:
    torch.manual_seed(0)
    step = Step(2048, 8, 3, (1, 1, 1, 1), 0, torch.int8, True, "relu")
    step.weight = torch.randint(-127, 128, step.weight.shape, dtype=torch.int8)
    step.bias = torch.zeros(8)
    model, x = Net(torch.int8, 0, [step], False), torch.rand(1, 2048, 3, 4) * 4
    with lapilli.compile(model, (x,), target="cpu-fp32", fallback="error") as program:
        got = program(x)
    codes = (x.double() * 2**5).round().clamp(-128, 127)
    total = F.conv2d(codes, step.weight.double(), padding=1) * 2.0**-5 * step.scale.double().reshape(-1, 1, 1)
    # The integer sum is rounded once, to float32.
    wanted = (total.float().relu() / step.out_scale).round().clamp(-128, 127) * step.out_scale
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


class Transposed(torch.nn.Module):
    weight: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self, channels: int, out: int, kernel: int, geometry: tuple[int, int, int, int], per_channel: bool
    ) -> None:
        super().__init__()
        self.geometry, self.per_channel = geometry, per_channel
        of_group = out // geometry[3]
        self.register_buffer("weight", torch.randint(-20, 21, (channels, of_group, kernel, kernel), dtype=torch.int8))
        self.register_buffer("scale", 2.0 ** torch.randint(-7, -5, (of_group,)).float())
        self.register_buffer("shift", torch.zeros(of_group, dtype=torch.int64))
        self.register_buffer("bias", torch.randint(-500, 500, (out,)) * 2.0**-11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x, 2.0**-5, 3, torch.int8)
        if self.per_channel:
            w = decomposed.dequantize_per_channel(self.weight, self.scale, self.shift, 1, -127, 127, torch.int8)
        else:
            w = decomposed.dequantize_per_tensor(self.weight, 2.0**-6, 0, -127, 127, torch.int8)
        stride, padding, more, groups = self.geometry
        y = F.conv_transpose2d(x, w, self.bias, stride, padding, more, groups)
        return rounded(y, 2.0**-3, -5, torch.int8)


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "geometry", "per_channel"),
    [
        (8, 4, 3, (2, 1, 1, 1), True), (4, 5, 2, (2, 0, 0, 1), True), (8, 8, 3, (1, 1, 0, 4), False),
        (3, 7, 4, (2, 1, 0, 1), False), (8, 8, 3, (3, 0, 0, 8), False),
    ],
)  # fmt: skip
def test_transposed(
    channels: int, out: int, kernel: int, geometry: tuple[int, int, int, int], per_channel: bool
) -> None:
    torch.manual_seed(0)
    model, x = Transposed(channels, out, kernel, geometry, per_channel), torch.randn(2, channels, 7, 6)
    with lapilli.compile(model, (x,), target="cpu-fp32", fallback="error") as program:
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
        labels = [run.label for run in program.description.methods[0].plans[0].run]
    assert sum("mul" in label for label in labels) == 1  # only what follows the sum is scaled


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = rounded(x, 2.0**-5, 3, torch.int8), rounded(y, 2.0**-4, -7, torch.int8)
        return rounded(torch.bmm(x, y), 2.0**-3, 2, torch.int8)


@pytest.mark.parametrize(("batch", "m", "k", "n"), [(2, 5, 16, 8), (3, 7, 5, 3), (1, 4, 2048, 4), (2, 3, 2048, 5)])
def test_products_of_activations(batch: int, m: int, k: int, n: int) -> None:
    """Also with sums beyond what floats hold, in 32-bit integers."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, m, k), torch.randn(batch, k, n)
    with lapilli.compile(Product(), (x, y), target="cpu-fp32", fallback="error") as program:
        torch.testing.assert_close(program(x, y), Product()(x, y), rtol=0, atol=0)


def test_kernels_agree_with_their_meaning() -> None:
    """Whatever lies in memory as codes is read as the numbers that they stand for."""
    model, x = any_net(1)
    checks = lapilli.verify(model, (x,), target="cpu-fp32")
    assert len(checks) > 3
    assert max(check.error for check in checks) <= 1e-6
