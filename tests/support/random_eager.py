"""Random chains of operators on quantized tensors, as torch.ao.quantization's eager recipe makes them, against torch's codes.

python tests/support/random_eager.py [--seconds 60] [--seed 0] [--plan cpu-fp32] [--gpu-plans]
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import random_cases
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.nn.quantized import FloatFunctional
from torch.nn import functional as F

import lapilli

KINDS = ("module", "traced", "scripted")
_SLACK = 2.0**-20
"""By which part of the largest operand, and of the range of codes, float32 may miss the real number that is rounded."""


class Plus(nn.Module):
    def __init__(self, term: float) -> None:
        super().__init__()
        self.term, self.f = term, FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.add_scalar(x, self.term)
        return y


class Times(Plus):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.mul_scalar(x, self.term)
        return y


class Own(nn.Module):
    """Functions whose results have a scale of their own."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        if self.which == 0:
            return torch.sigmoid(x)
        if self.which == 1:
            return torch.tanh(x)
        return F.hardsigmoid(x) if self.which == 2 else F.gelu(x)


class Limits(Own):
    def forward(self, x: Tensor) -> Tensor:
        if self.which == 0:
            return F.hardtanh(x, -0.37, 0.81)
        if self.which == 1:
            return x.clamp(-0.21, 0.57)
        return F.relu6(x) if self.which == 2 else F.threshold(x, 0.1, 0.3)


class Gate(nn.Module):
    """other: gives a second operand of another scale."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.f, self.other = FloatFunctional(), Own(which)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.mul(x, self.other(x))
        return y


class Sum(Gate):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.add(self.other(x), x)
        return y


class SumAboveZero(Gate):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.add_relu(x, x.flip(1))
        return y


class Joined(Gate):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f.cat([self.other(x), x], 1)
        return y


class Parts(Own):
    """Lists of quantized tensors."""

    def forward(self, x: Tensor) -> Tensor:
        if self.which == 0:
            a, b = x.chunk(2, 1)
            return torch.cat([b, a], 1)
        if self.which == 1:
            parts = torch.split(x, 2, 1)
            return torch.cat([parts[-1], parts[0]], 1)
        if self.which == 2:
            rows = x.unbind(1)
            return torch.stack([rows[1], rows[0]], 1)
        kept = [x]
        kept.append(torch.tensor_split(x, 2, 1)[1])
        return torch.cat(kept, 1)


class Moved(Own):
    def forward(self, x: Tensor) -> Tensor:
        if self.which == 0:
            return x.flip(1)
        if self.which == 1:
            return x.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:]
        return F.pad(x, (1, 0), value=0.4) if self.which == 2 else x.repeat_interleave(2, 1)


class Pool(Own):
    """By nine or three, so that no average is at a tie."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return F.max_pool1d(x, 2) if self.which == 0 else F.avg_pool1d(x, 3)
        if self.which == 0:
            return F.max_pool2d(x, 2)
        if self.which == 1:
            return F.avg_pool2d(x, 3)
        return F.interpolate(x, scale_factor=2.0) if self.which == 2 else x[..., :3].mean(3, keepdim=True)


class Window(Own):
    """Of images: pools whose windows leave them, and sizes that are interpolated."""

    def forward(self, x: Tensor) -> Tensor:
        if self.which == 0:
            return F.avg_pool2d(x, 3, 2, 1)
        if self.which == 1:
            return F.max_pool2d(x, 3, 2, 1)
        return F.interpolate(x, (7, 11), mode="bilinear") if self.which == 2 else F.adaptive_avg_pool2d(x, (1, 3))


@dataclass(frozen=True)
class Operator:
    """make: of a number of channels, dimensions beside these and the batch, and chance. exact: whether torch rounds nothing, or as
    a formula that has to be followed to the bit."""

    make: Callable[[int, int, random.Random], nn.Module]
    exact: bool = False


def _layer(channels: int, dims: int, r: random.Random) -> nn.Module:
    groups = r.choice((1, 1, channels))
    kind: Any = (nn.Conv1d, nn.Conv2d)[dims - 1]
    layer: nn.Module = kind(
        channels,
        channels * r.choice((1, 2)),
        r.choice((1, 3)),
        r.choice((1, 2)),
        1,
        groups=groups,
        bias=r.random() < 0.7,
    )
    return layer if r.random() < 0.5 else nn.Sequential(layer, nn.ReLU())


def _linear(channels: int, dims: int, r: random.Random) -> nn.Module:
    """Of rows, as many as there may be."""
    layer: nn.Module = nn.Linear(r.choice((9, 12, 15)), r.choice((9, 12, 15)), bias=r.random() < 0.7)
    return layer if r.random() < 0.5 else nn.Sequential(layer, nn.ReLU())


def _transposed(channels: int, dims: int, r: random.Random) -> nn.Module:
    """As many channels as it reads: oneDNN, which "x86" calls, computes others wrongly (torch 2.13)."""
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dims - 1]
    layer: nn.Module = kind(channels, channels, r.choice((2, 3)), r.choice((1, 2)), r.choice((0, 1)))
    return layer


def _activation(channels: int, dims: int, r: random.Random) -> nn.Module:
    return r.choice((nn.Sigmoid, nn.Hardswish, nn.ELU, lambda: nn.LeakyReLU(0.137)))()


OPERATORS = (
    Operator(_layer), Operator(_layer), Operator(_transposed), Operator(_activation), Operator(_linear),
    Operator(lambda c, d, r: Plus(r.choice((0.0, -2.0, 0.7, 3.1, -0.4, 12.0, -30.0))), True),
    Operator(lambda c, d, r: Times(r.choice((0.0, 3.0, -1.7, 0.3, -1.0))), True),
    Operator(lambda c, d, r: Own(r.randrange(4))), Operator(lambda c, d, r: Own(r.randrange(4))),
    Operator(lambda c, d, r: Limits(r.randrange(4)), True), Operator(lambda c, d, r: nn.ReLU(r.random() < 0.5), True),
    Operator(lambda c, d, r: Gate(r.randrange(4))), Operator(lambda c, d, r: Sum(r.randrange(4))),
    Operator(lambda c, d, r: SumAboveZero(0)), Operator(lambda c, d, r: Joined(r.randrange(4))),
    Operator(lambda c, d, r: Parts(r.randrange(4)), True),
    Operator(lambda c, d, r: Moved(r.randrange(4)), True), Operator(lambda c, d, r: Pool(r.randrange(4))),
    Operator(lambda c, d, r: (Window if d == 2 else Pool)(r.randrange(4))),
)  # fmt: skip


class Chain(nn.Module):
    """watched: whether all values between operators are results, or the last one only."""

    def __init__(self, steps: list[nn.Module], watched: bool) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.steps, self.watched = nn.ModuleList(steps), watched

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.quant(x)
        found = [self.dequant(x)]
        for step in self.steps:
            x = step(x)
            if self.watched:
                found.append(self.dequant(x))
        return found if self.watched else [self.dequant(x)]


@contextmanager
def engine_of(name: str) -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before


def made(seed: int, engine: str) -> tuple[Chain, Chain, Tensor, list[Operator]]:
    """A chain of floats, the same one converted, and an input."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dims, channels = r.choice((1, 2, 2)), r.choice((4, 6, 8))
    x = value = torch.randn(2, channels, *(r.choice((9, 12, 15)) for _ in range(dims)))
    steps, taken = list[nn.Module](), list[Operator]()
    while len(steps) < r.choice((2, 4, 6)):
        operator = r.choice(OPERATORS)
        step = operator.make(value.shape[1], dims, r)
        try:
            found = step(value)
        except RuntimeError:  # too small for it by now
            continue
        if found.numel() and found.numel() < 20000 and found.shape[1] > 3 and found.shape[-1] > 1:
            steps.append(step)
            taken.append(operator)
            value = found
    model = Chain(steps, True).eval()
    settings = quantization.get_default_qconfig(engine)
    model.qconfig = settings
    of_tensors: Any = quantization.QConfig(settings.activation, quantization.default_weight_observer)
    for part in model.modules():
        if isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d):  # torch has no scales of channels for these
            part.qconfig = of_tensors
    prepared = quantization.prepare(model)
    prepared(x)
    prepared(torch.randn_like(x))
    return model, quantization.convert(prepared), x, taken


def turned(model: Chain, kind: str, x: Tensor) -> Any:
    if kind == "module":
        return model
    return torch.jit.script(model) if kind == "scripted" else torch.jit.trace(model, x, check_trace=False)


def _real(step: nn.Module, converted: nn.Module, operand: Tensor) -> Tensor:
    """What is rounded to codes, in float64. operand: quantized."""
    step = copy.deepcopy(step).double()
    parts = dict(converted.named_modules())
    for name, part in step.named_modules():
        if name == "other":  # whose result is rounded before it is an operand
            rounded = parts[name](operand).dequantize().double()
            part.register_forward_hook(lambda *_, rounded=rounded: rounded)
        if isinstance(part, nn.modules.conv._ConvNd | nn.Linear):
            layer: Any = parts[name]
            part.weight.data = layer.weight().dequantize().double()
            if part.bias is not None:
                part.bias.data = layer.bias().double()
    result: Tensor = step(operand.dequantize().double())
    return result


def codes_of(got: Tensor, wanted: Tensor, real: Tensor | None, largest: float = 0, off_by_one: bool = False) -> Tensor:
    """A program's numbers as a quantized tensor, compared with torch's. real: what is rounded; None where all codes have to be
    torch's. largest: of operands. off_by_one: whether torch may round another number than this. Raises AssertionError.
    """
    scale, zero = wanted.q_scale(), wanted.q_zero_point()
    steps = got.double() / scale + zero
    codes = steps.round()
    assert (steps - codes).abs().max() < 2.0**-12, "not on torch's grid"
    off = (codes - wanted.int_repr()).abs()
    if real is None:
        assert not off.any(), f"{int(off.count_nonzero())} of {off.numel()} differ"
    else:
        real = (real.double() / scale + zero).clamp(0, 255)
        slack = _SLACK * (256 + largest / scale)
        missed = float(((codes - real).abs() - 0.5).max())
        assert missed <= slack, f"{missed} steps beyond a tie"
        allowed = (real - real.floor() - 0.5).abs() <= slack
        assert (off <= (1.0 if off_by_one else allowed.double())).all(), "torch's codes differ, at no tie"
    return torch._make_per_tensor_quantized_tensor(codes.to(torch.uint8), scale, zero)


def check(seed: int, plan: str) -> list[str]:
    """Compares each operator with torch's, on the program's own operands. Raises AssertionError."""
    engine, kind = ("x86", "qnnpack")[seed // 6 % 2], KINDS[seed % 3]  # random_cases takes plans in turn
    with engine_of(engine):
        model, converted, x, taken = made(seed, engine)
        with lapilli.compile(turned(converted, kind, x), (x,), target=plan, fallback="error") as program:
            found = program(x)
        what = "the input"
        try:
            operand = codes_of(found[0], converted.quant(x), x)
            for operator, step, own, got in zip(taken, model.steps, converted.steps, found[1:], strict=True):
                what = f"{own} of {operand.q_scale()}, {operand.q_zero_point()}"
                real = None if operator.exact else _real(step, own, operand)
                largest = float(operand.dequantize().abs().max())
                operand = codes_of(got, own(operand.clone()), real, largest, engine == "qnnpack")
        except AssertionError as error:
            raise AssertionError(f"{engine}, {kind}, {what}: {error}") from error
        converted.watched = False
        with lapilli.compile(turned(converted, kind, x), (x,), target=plan, fallback="error") as program:
            (last,) = program(x)
        assert torch.equal(last, found[-1]), f"{engine}, {kind}: other codes where values between are not read"
    return [f"{engine}, {kind}"]


if __name__ == "__main__":
    random_cases.main(__doc__, "chains", ("cpu-fp32", "gpu-fp32"), check)
