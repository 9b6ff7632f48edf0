"""Operators on one element of each input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_casts import cast
from lapilli.capture.onnx.onnx_graph import BITS, UINT64, kind_of
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, operator

Tensor = torch.Tensor
_SIGN = -(2**63)

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "HardSwish": F.hardswish, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Sinh": torch.sinh, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "IsNaN": torch.isnan,
}  # fmt: skip


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda call, x: function(x)


for _name, _function in _UNARY.items():
    operator(_name)(_unary(_function))


@operator("Abs")
def absolute(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.abs(x) if x.dtype != torch.uint8 else x


@operator("Softplus")
def softplus(call: OnnxCall, x: Tensor) -> Tensor:
    return F.softplus(x)


@operator("LeakyRelu")
def leaky_relu(call: OnnxCall, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.get("alpha", 0.01))


@operator("ThresholdedRelu")
def thresholded_relu(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.where(x > call.get("alpha", 1.0), x, 0)


@operator("Elu")
def elu(call: OnnxCall, x: Tensor) -> Tensor:
    return F.elu(x, call.get("alpha", 1.0))


@operator("Celu")
def celu(call: OnnxCall, x: Tensor) -> Tensor:
    return F.celu(x, call.get("alpha", 1.0))


@operator("Selu")
def selu(call: OnnxCall, x: Tensor) -> Tensor:
    alpha, gamma = call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0)))


@operator("HardSigmoid")
def hard_sigmoid(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.clamp(x * call.get("alpha", 0.2) + call.get("beta", 0.5), 0, 1)


@operator("Shrink")
def shrink(call: OnnxCall, x: Tensor) -> Tensor:
    lambd, bias = call.get("lambd", 0.5), call.get("bias", 0.0)
    if not x.is_floating_point():
        wide = x.to(torch.float32)
        return torch.where(wide < -lambd, wide + bias, torch.where(wide > lambd, wide - bias, 0)).to(x.dtype)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0))


@operator("PRelu")
def prelu(call: OnnxCall, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("Swish")
def swish(call: OnnxCall, x: Tensor) -> Tensor:
    alpha = call.get("alpha", 1.0)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@operator("QuickGelu", domain=MICROSOFT)
def quick_gelu(call: OnnxCall, x: Tensor) -> Tensor:
    return x * torch.sigmoid(call.get("alpha", 1.702) * x)


@operator("Gelu")
def gelu(call: OnnxCall, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=call.get("approximate", "none"))


@operator("Gelu", domain=MICROSOFT)
def contrib_gelu(call: OnnxCall, x: Tensor) -> Tensor:
    return F.gelu(x)


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(call: OnnxCall, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(call: OnnxCall, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("Clip")
def clip(call: OnnxCall, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if call.version < 11:
        least, most = call.get("min"), call.get("max")
        return x if least is None and most is None else torch.clamp(x, least, most)
    # Not torch.clamp: with tensors of both it promotes, and a limit may be a symbol.
    if low is not None:
        x = torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@operator("IsInf")
def is_inf(call: OnnxCall, x: Tensor) -> Tensor:
    negative, positive = call.get("detect_negative", 1), call.get("detect_positive", 1)
    if negative and positive:
        return torch.isinf(x)
    if positive:
        return x == torch.inf
    return x == -torch.inf if negative else torch.zeros_like(x, dtype=torch.bool)


# -- two inputs and more


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda call, a, b: function(a, b)


for _name, _both in (
    ("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul), ("And", torch.logical_and), ("Or", torch.logical_or),
    ("Xor", torch.logical_xor), ("Equal", torch.eq), ("BitwiseAnd", torch.bitwise_and), ("BitwiseOr", torch.bitwise_or),
    ("BitwiseXor", torch.bitwise_xor),
):  # fmt: skip
    operator(_name)(_binary(_both))


def _ordered(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A comparison, of the numbers that uint64 in two's complement stands for."""

    def rule(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
        return function(a ^ _SIGN, b ^ _SIGN) if call.kind(0) == UINT64 else function(a, b)

    return rule


for _name, _both in (
    ("Less", torch.lt),
    ("LessOrEqual", torch.le),
    ("Greater", torch.gt),
    ("GreaterOrEqual", torch.ge),
):
    operator(_name)(_ordered(_both))


@operator("Div")
def div(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return a / b
    if call.kind(0) == UINT64:
        return unsigned_quotient(a, b)
    return torch.div(a, b, rounding_mode="trunc")


def unsigned_quotient(a: Tensor, b: Tensor) -> Tensor:
    """The quotient of unsigned numbers of 64 bits."""
    half = ((a >> 1) & (2**63 - 1)) // torch.where(b <= 0, 1, b)
    guess = half << 1
    rest = a - guess * b
    guess = guess + ((rest ^ _SIGN) >= (b ^ _SIGN)).to(torch.int64)
    return torch.where(b < 0, ((a ^ _SIGN) >= (b ^ _SIGN)).to(torch.int64), guess)


@operator("Mod")
def mod(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    if call.kind(0) == UINT64:
        return a - unsigned_quotient(a, b) * b
    return torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b)


@operator("Pow")
def power(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.pow(a, b.to(a.dtype))
    if b.is_floating_point():
        return torch.pow(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)
    return torch.pow(a, b.to(a.dtype))


@operator("BitShift")
def bit_shift(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    bits = BITS[call.kind(0)][0]
    if call.get("direction") == "LEFT":
        moved = torch.bitwise_left_shift(a, torch.clamp(b, max=bits - 1))
        return torch.where((b >= bits) | (b < 0), 0, moved)
    if call.kind(0) == UINT64:
        first = (a >> 1) & (2**63 - 1)
        moved = torch.where(b == 0, a, first >> torch.clamp(b - 1, 0, 63))
    else:
        far = torch.where(b < 0, bits - 1, torch.clamp(b, max=bits - 1)).to(a.dtype)
        moved = torch.bitwise_right_shift(a, far)
        if BITS[call.kind(0)][1]:  # the sign fills what is left free
            return moved
    return torch.where((b >= bits) | (b < 0), 0, moved)


def _extreme(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def rule(call: OnnxCall, *values: Tensor) -> Tensor:
        if call.kind(0) == UINT64:
            return functools.reduce(function, [v ^ _SIGN for v in values]) ^ _SIGN
        return functools.reduce(function, values)

    return rule


operator("Max")(_extreme(torch.maximum))
operator("Min")(_extreme(torch.minimum))


@operator("Sum")
def sum_(call: OnnxCall, *values: Tensor) -> Tensor:
    return functools.reduce(torch.add, values)


@operator("Mean")
def mean(call: OnnxCall, *values: Tensor) -> Tensor:
    return functools.reduce(torch.add, values) / len(values)


@operator("Where")
def where(call: OnnxCall, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Dropout")
def dropout(call: OnnxCall, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    """At inference; in training mode with a ratio of 0 it is the same."""
    if call.version >= 12 and call.number(2, False) and (call.number(1, 0.5) != 0):
        keep = torch.rand_like(x) >= call.number(1, 0.5)
        return torch.where(keep, x / (1 - call.number(1, 0.5)), 0), keep
    mask = torch.ones_like(x, dtype=torch.bool if call.version >= 10 else x.dtype) if call.wants(1) else None
    return x, mask


@operator("CumSum")
def cum_sum(call: OnnxCall, x: Tensor, _: Tensor) -> Tensor:
    return _cumulative(call, x, torch.cumsum, 0)


@operator("CumProd")
def cum_prod(call: OnnxCall, x: Tensor, _: Tensor) -> Tensor:
    return _cumulative(call, x, torch.cumprod, 1)


def _cumulative(call: OnnxCall, x: Tensor, function: Callable[..., Tensor], neutral: int) -> Tensor:
    axis = int(call.number(1)) % max(x.ndim, 1)
    if call.get("reverse", 0):
        x = x.flip(axis)
    if call.get("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), neutral)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    result = function(x, axis, dtype=x.dtype)
    return result.flip(axis) if call.get("reverse", 0) else result


def as_float(x: Tensor, call: OnnxCall, index: int) -> Tensor:
    """An input in float32, whatever its element type."""
    return cast(x, call.kind(index), kind_of(torch.float32))
