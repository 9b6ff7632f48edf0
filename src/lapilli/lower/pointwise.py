"""Pointwise operators: arithmetic, comparison, activations, conversion. Operands broadcast to the shape of the result."""

from __future__ import annotations

import math
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, binary, cast_to, const, is_finite, unary, where
from lapilli.ir.integer import as_int
from lapilli.ir.interval import INT32, MOST
from lapilli.ir.node import Node
from lapilli.ir.ranges import fits
from lapilli.lower.registry import (
    Call,
    Number,
    Operand,
    convert,
    element,
    exactly,
    from_torch,
    lowering,
    member,
    rounded,
    scalar,
)

aten = torch.ops.aten

CONVERSIONS = (aten._to_copy.default, aten.to.dtype, aten.to.other)
"""Operators that only change a tensor's dtype, as far as the GPU is concerned."""


def clamp(x: Expr, lo: Operand | None, hi: Operand | None) -> Expr:
    """min(max(x, lo), hi); NaN stays NaN."""
    for name, bound in (("max", lo), ("min", hi)):
        if bound is None:
            continue
        if isinstance(bound, float) and math.isnan(bound):
            return const(math.nan)
        if x.dtype is DType.int32 and isinstance(bound, int) and (bound < INT32[0] if name == "max" else bound > MOST):
            continue  # excludes no int32
        x = binary(name, x, element(bound, (), x.dtype))
    return x


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))"""
    return 1.0 / (unary("exp", -x) + 1.0)


def softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    """log(1 + exp(beta * x)) / beta; x itself where beta * x is above the threshold."""
    scaled = x * float(beta)
    return where(binary("gt", scaled, float(threshold)), x, unary("log1p", unary("exp", scaled)) / float(beta))


def gelu(x: Expr, approximate: str = "none") -> Expr:
    """x * Phi(x), with erf, or by the tanh approximation (Hendrycks and Gimpel 2016)."""
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * sigmoid(inner * 2.0)  # (1 + tanh) / 2 without cancellation
    return x * 0.5 * (unary("erf", x * math.sqrt(0.5)) + 1.0)


# Float functions of one value: the result is floating point for any input type.
_FLOAT = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos",
    "atan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
    "erf": "erf", "reciprocal": "reciprocal",
}  # fmt: skip

# Activations with float parameters: (x, *parameters) -> expression.
_ACTIVATIONS: dict[Any, Any] = {
    aten.relu.default: lambda x: clamp(x, 0, None),
    aten.relu6.default: lambda x: clamp(x, 0, 6),
    aten.hardtanh.default: lambda x, lo=-1.0, hi=1.0: clamp(x, lo, hi),
    aten.sigmoid.default: sigmoid,
    aten.silu.default: lambda x: x * sigmoid(x),
    aten.mish.default: lambda x: x * unary("tanh", softplus(x)),
    aten.hardsigmoid.default: lambda x: clamp(x + 3.0, 0, 6) / 6.0,
    aten.hardswish.default: lambda x: x * clamp(x + 3.0, 0, 6) / 6.0,
    aten.softplus.default: softplus,
    aten.leaky_relu.default: lambda x, slope=0.01: where(binary("gt", x, 0.0), x, x * float(slope)),
    aten.elu.default: lambda x, alpha=1.0, scale=1.0, input_scale=1.0: where(
        binary("gt", x, 0.0), x * float(scale), unary("expm1", x * float(input_scale)) * float(alpha * scale)
    ),
    aten.log_sigmoid.default: lambda x: 0.0 - softplus(-x, 1.0, 88.0),
    aten.logit.default: lambda x, eps=None: (lambda y: unary("log", y / (1.0 - y)))(
        x if eps is None else clamp(x, eps, 1 - eps)
    ),
}


def _register_tables() -> None:
    def float_function(name: str) -> Any:
        return lambda call, x: call.pointwise(lambda a: unary(name, a), x, compute=DType.float32)

    for aten_name, name in _FLOAT.items():
        lowering(getattr(aten, aten_name).default)(float_function(name))

    def activation(f: Any) -> Any:
        def build(call: Call, x: Node, *args: Any) -> Node:
            kind = call.dtype.compute if call.dtype.is_float else x.dtype.compute
            return call.pointwise(lambda a: f(a, *args), x, compute=kind)

        return build

    for overload, f in _ACTIVATIONS.items():
        lowering(overload)(activation(f))

    def comparison(name: str) -> Any:
        def build(call: Call, a: Node, b: Operand) -> Node:
            if isinstance(b, int) and call.common is DType.int64 and not fits((b, b)):
                holds = const(name in (("lt", "le", "ne") if b > 0 else ("gt", "ge", "ne")))
                return call.map(lambda *at: holds)
            return call.pointwise(lambda x, y: binary(name, x, y), a, b, common=call.common)

        return build

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        packet = getattr(aten, name)
        lowering(packet.Tensor, packet.Scalar)(comparison(name))

    def logical(name: str) -> Any:
        def f(x: Expr, y: Expr) -> Expr:
            return binary(name, cast_to(x, DType.bool), cast_to(y, DType.bool))

        return lambda call, a, b: call.pointwise(f, a, b, common=call.common)

    for name in ("and", "or", "xor"):
        lowering(getattr(aten, f"logical_{name}").default)(logical(name))

    def bitwise(name: str) -> Any:
        def build(call: Call, a: Operand, b: Operand) -> Node:
            op = name if call.dtype is DType.bool else f"bit{name}"
            return call.pointwise(lambda x, y: binary(op, x, y), a, b, common=call.dtype)

        return build

    for name in ("and", "or", "xor"):
        packet = getattr(aten, f"bitwise_{name}")
        lowering(packet.Tensor, packet.Scalar)(bitwise(name))

    def binary_op(name: str) -> Any:
        return lambda call, a, b: call.pointwise(lambda x, y: binary(name, x, y), a, b, common=call.dtype)

    def or_number(name: str) -> Any:
        """Minimum or maximum that ignores NaN unless both operands are NaN."""

        def f(x: Expr, y: Expr) -> Expr:
            if x.dtype is not DType.float32:
                return binary(name, x, y)
            return where(unary("isnan", x), y, where(unary("isnan", y), x, binary(name, x, y)))

        return lambda call, a, b: call.pointwise(f, a, b, common=call.dtype)

    for aten_name, name in {"fmax": "max", "fmin": "min"}.items():
        lowering(getattr(aten, aten_name).default)(or_number(name))

    for aten_name, name in {"maximum": "max", "minimum": "min", "atan2": "atan2"}.items():
        lowering(getattr(aten, aten_name).default)(binary_op(name))
    lowering(aten.mul.Tensor, aten.mul.Scalar)(_multiply)
    lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)(binary_op("mod"))
    lowering(aten.fmod.Tensor, aten.fmod.Scalar)(binary_op("fmod"))
    lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)(binary_op("pow"))

    def rounding(name: str) -> Any:
        def build(call: Call, x: Node) -> Node:
            integer = x.dtype.compute is not DType.float32
            return call.pointwise((lambda a: a) if integer else (lambda a: unary(name, a)), x)

        return build

    for name in ("floor", "ceil", "round", "trunc"):
        lowering(getattr(aten, name).default)(rounding(name))


def _multiply(call: Call, a: Operand, b: Operand) -> Node:
    """a * b; `and` for bools."""
    if call.dtype is DType.bool:
        return call.pointwise(lambda x, y: binary("and", x, y), a, b)
    return call.pointwise(lambda x, y: x * y, a, b, common=call.dtype)


_register_tables()


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(call: Call, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    """a + alpha * b; `or` for bools."""
    if call.dtype is DType.bool:
        return call.pointwise(lambda x, y: binary("or", x, y), a, b)
    return call.pointwise(lambda x, y: x + y * scalar(alpha, call.dtype), a, b, common=call.dtype)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(call: Call, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    """a - alpha * b. PyTorch refuses bools, but writes graphs that subtract them: TypeError here too."""
    if call.dtype is DType.bool:
        raise TypeError(f"{call.op}: bools are not subtracted")
    return call.pointwise(lambda x, y: x - y * scalar(alpha, call.dtype), a, b, common=call.dtype)


@lowering(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(call: Call, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    """b - alpha * a."""
    return sub(call, b, a, alpha)


@lowering(aten.div.Tensor, aten.div.Scalar)
def div(call: Call, a: Operand, b: Operand) -> Node:
    """a / b, floating point."""
    return call.pointwise(lambda x, y: x / y, a, b, compute=DType.float32)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(call: Call, a: Operand, b: Operand, rounding_mode: str | None = None) -> Node:
    """a / b rounded toward zero ("trunc") or down ("floor"), in the promoted type; unrounded and floating point
    for None.
    """
    if rounding_mode is None:
        return div(call, a, b)
    if rounding_mode == "floor":
        return call.pointwise(lambda x, y: binary("floordiv", x, y), a, b, common=call.dtype)
    if call.dtype.is_float:
        return call.pointwise(lambda x, y: unary("trunc", x / y), a, b, common=call.dtype)
    return call.pointwise(lambda x, y: x / y, a, b, common=call.dtype)


@lowering(aten.floor_divide.default)
def floor_divide(call: Call, a: Operand, b: Operand) -> Node:
    """a / b rounded down, in the promoted type."""
    return div_mode(call, a, b, "floor")


@lowering(aten.pow.Tensor_Scalar)
def pow_scalar(call: Call, x: Node, exponent: float) -> Node:
    """x^exponent; small exponents as products or roots. Raises TypeError for negative exponents of integers, as
    torch does.
    """
    simple = {
        0: lambda a: const(1, a.dtype), 1: lambda a: a, 2: lambda a: a * a, 3: lambda a: a * a * a,
        0.5: lambda a: unary("sqrt", a), -0.5: lambda a: unary("rsqrt", a), -1: lambda a: unary("reciprocal", a),
    }.get(exponent)  # fmt: skip
    kind = call.dtype.compute
    if x.dtype is DType.bool and isinstance(exponent, bool):
        raise TypeError("torch's result is bool, although its declared type is int64")
    if isinstance(exponent, int) and kind is DType.int32 and exponent < 0:
        raise TypeError("Integers to negative integer powers are not allowed.")
    if isinstance(exponent, int) and kind is DType.int32:
        exactly(exponent, call.dtype)
    if simple is not None and (kind is DType.float32 or exponent in (0, 1, 2, 3)):
        return call.pointwise(simple, x, compute=kind)
    return call.pointwise(lambda a: binary("pow", a, const(exponent, kind)), x, compute=kind)


@lowering(aten.clamp.default)
def clamp_scalar(call: Call, x: Node, lo: float | None = None, hi: float | None = None) -> Node:
    """min(max(x, lo), hi) with numbers as bounds; NaN stays NaN."""
    low, high = (None if bound is None else _bound(bound, call.dtype) for bound in (lo, hi))
    return call.pointwise(lambda a: clamp(a, low, high), x, common=call.dtype)


def _bound(number: Operand, dtype: DType) -> Operand:
    """A bound in the given type. Raises TypeError if the type cannot represent it."""
    number = exactly(number, dtype)
    return convert(number, dtype) if isinstance(number, Expr) else number


@lowering(aten.clamp_min.default)
def clamp_min(call: Call, x: Node, lo: float) -> Node:
    """max(x, lo); NaN stays NaN."""
    return clamp_scalar(call, x, lo)


@lowering(aten.clamp_max.default)
def clamp_max(call: Call, x: Node, hi: float) -> Node:
    """min(x, hi); NaN stays NaN."""
    return clamp_scalar(call, x, None, hi)


@lowering(aten.clamp.Tensor)
def clamp_tensor(call: Call, x: Node, lo: Node | None = None, hi: Node | None = None) -> Node:
    """min(max(x, lo), hi) with broadcast tensors as bounds; NaN stays NaN."""
    kind = call.dtype

    def body(*at: Any) -> Expr:
        e = member(x, at, kind)
        if lo is not None:
            e = binary("max", e, member(lo, at, kind))
        return e if hi is None else binary("min", e, member(hi, at, kind))

    return call.map(body)


@lowering(aten.gelu.default)
def gelu_op(call: Call, x: Node, approximate: str = "none") -> Node:
    """x * Phi(x); see `gelu`. For results of 16 bits, Phi is as precise as they need it, which takes a third of the time."""
    if approximate == "none" and call.storage(call.dtype).is_short_float:
        return call.pointwise(lambda a: a * unary("normal_cdf", a), x)
    return call.pointwise(lambda a: gelu(a, approximate), x)


@lowering(aten.gelu_backward.default)
def gelu_backward(call: Call, grad: Node, x: Node, approximate: str = "none") -> Node:
    """grad * d(x * Phi(x)) / dx. In the tanh approximation, (1 + tanh(y)) / 2 is computed as sigmoid(2y), which does not
    cancel for negative y.
    """

    def body(g: Expr, x: Expr) -> Expr:
        if approximate == "tanh":
            inner = (x + x * x * x * 0.044715) * (2 * math.sqrt(2 / math.pi))
            slope = (x * x * (3 * 0.044715) + 1.0) * (2 * math.sqrt(2 / math.pi))
            phi = sigmoid(inner)
            return g * (phi + x * phi * sigmoid(-inner) * slope)
        density = unary("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return g * ((unary("erf", x * math.sqrt(0.5)) + 1.0) * 0.5 + x * density)

    return call.pointwise(body, grad, x)


@lowering(aten.prelu.default, aten._prelu_kernel.default)
def prelu(call: Call, x: Node, weight: Node) -> Node:
    """x where x > 0, else weight * x. weight: of the shape of x, or [C] or [1] for x [N, C, *]."""

    def body(*at: Any) -> Expr:
        a = element(x, at)
        slope = element(weight, at) if weight.rank == x.rank else element(weight, at[1:2] or at[:1] or [as_int(0)])
        return where(binary("gt", a, 0.0), a, a * slope)

    return call.map(body)


@lowering(aten.neg.default)
def neg(call: Call, x: Node) -> Node:
    """-x."""
    return call.pointwise(lambda a: -a, x)


@lowering(aten.abs.default)
def abs_(call: Call, x: Node) -> Node:
    """x|."""
    return call.pointwise(lambda a: unary("abs", a), x)


@lowering(aten.sign.default)
def sign(call: Call, x: Node) -> Node:
    """-1, 0 or 1; bools are unchanged."""
    return call.pointwise(lambda a: a if a.dtype is DType.bool else unary("sign", a), x)


@lowering(aten.square.default)
def square(call: Call, x: Node) -> Node:
    """x * x."""
    return call.pointwise(lambda a: a * a, x)


@lowering(aten.logical_not.default)
def logical_not(call: Call, x: Node) -> Node:
    """x == 0, bool."""
    return call.pointwise(lambda a: unary("not", a), x, compute=DType.bool)


@lowering(aten.bitwise_not.default)
def bitwise_not(call: Call, x: Node) -> Node:
    """~x; `not` for bools."""
    return call.pointwise(lambda a: unary("not" if a.dtype is DType.bool else "bitnot", a), x)


@lowering(aten.isnan.default)
def isnan(call: Call, x: Node) -> Node:
    """Whether elements are NaN, bool; integers never are."""
    return call.pointwise(lambda a: unary("isnan", a) if a.dtype is DType.float32 else const(False), x)


@lowering(aten.isinf.default)
def isinf(call: Call, x: Node) -> Node:
    """Whether elements are infinite, bool; integers never are."""
    return call.pointwise(lambda a: unary("isinf", a) if a.dtype is DType.float32 else const(False), x)


@lowering(aten.isfinite.default)
def isfinite(call: Call, x: Node) -> Node:
    """Whether elements are neither infinite nor NaN, bool; integers always are."""
    return call.pointwise(lambda a: is_finite(a) if a.dtype is DType.float32 else const(True), x)


@lowering(aten.hypot.default)
def hypot(call: Call, a: Node, b: Node) -> Node:
    """sqrt(a^2 + b^2). Both are scaled by a power of two first, so that squares neither overflow nor underflow."""

    def length(x: Expr, y: Expr) -> Expr:
        size = binary("max", unary("abs", x), unary("abs", y))
        huge, tiny = binary("gt", size, 2.0**60), binary("lt", size, 2.0**-60)
        down = where(huge, const(2.0**-70), where(tiny, const(2.0**100), const(1.0)))
        up = where(huge, const(2.0**70), where(tiny, const(2.0**-100), const(1.0)))
        x, y = x * down, y * down
        infinite = binary("or", unary("isinf", x), unary("isinf", y))
        return where(infinite, const(math.inf), unary("sqrt", x * x + y * y) * up)

    return call.pointwise(length, a, b, compute=DType.float32)


@lowering(aten.frac.default)
def frac(call: Call, x: Node) -> Node:
    """x - trunc(x); for whole numbers 0, never -0."""
    return call.pointwise(lambda a: (a - unary("trunc", a)) + 0.0, x)


@lowering(aten.angle.default)
def angle(call: Call, x: Node) -> Node:
    """The argument of a real number: 0 or pi, and NaN for NaN."""
    return call.pointwise(
        lambda a: where(unary("isnan", a), a, where(binary("lt", a, 0.0), const(math.pi), const(0.0))),
        x,
        compute=DType.float32,
    )


@lowering(aten.round.decimals)
def round_decimals(call: Call, x: Node, *, decimals: int) -> Node:
    """x rounded to `decimals` decimal places, half to even; negative ones round to powers of ten."""
    if x.dtype.compute is not DType.float32:
        return call.pointwise(lambda a: a, x)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return call.pointwise(lambda a: unary("round", a / scale) * scale, x)
    return call.pointwise(lambda a: unary("round", a * scale) / scale, x)


@lowering(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where_op(call: Call, condition: Node, a: Operand, b: Operand) -> Node:
    """a where the condition holds, else b."""
    a, b = (exactly(x, call.dtype) for x in (a, b))
    return call.map(
        lambda *at: where(element(condition, at, DType.bool), member(a, at, call.dtype), member(b, at, call.dtype))
    )


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(call: Call, x: Node, mask: Node, value: Operand) -> Node:
    """`value` where the mask holds, else x."""
    return where_op(call, mask, value, x)


@lowering(aten.addcmul.default)
def addcmul(call: Call, x: Node, a: Node, b: Node, value: Number = 1) -> Node:
    """x + value * a * b."""
    return call.pointwise(lambda s, p, q: s + p * q * scalar(value, call.dtype), x, a, b, common=call.dtype)


@lowering(aten.addcdiv.default)
def addcdiv(call: Call, x: Node, a: Node, b: Node, value: Number = 1) -> Node:
    """x + value * a / b, floating point."""
    return call.pointwise(lambda s, p, q: s + p * scalar(value, DType.float32) / q, x, a, b, compute=DType.float32)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(call: Call, a: Node, b: Node, weight: Operand) -> Node:
    """a + weight * (b - a). As in torch, computed from the nearer end, which makes both ends exact."""

    def body(x: Expr, y: Expr, w: Expr) -> Expr:
        if isinstance(w, Const):
            return x + (y - x) * w.value if abs(w.value) < 0.5 else y + (y - x) * (w.value - 1.0)
        near = binary("lt", unary("abs", w), 0.5)
        return where(near, x, y) + (y - x) * where(near, w, w - 1.0)

    return call.pointwise(body, a, b, weight, compute=DType.float32)


@lowering(aten.copy.default)
def copy(call: Call, _: Node, source: Node, *__: Any) -> Node:
    """`source` expanded to the shape of the first argument and converted to its dtype."""
    return _converted(call, source, call.given[1])


@lowering(*CONVERSIONS)
def convert_type(call: Call, x: Node, *_: Any, **__: Any) -> Node:
    """x in another dtype. A conversion that a model asks for rounds to 16 bits, whether or not the result is stored."""
    return _converted(call, x, call.given[0])


def _converted(call: Call, x: Node, known: torch.Tensor) -> Node:
    """x converted to the call's dtype. Floats are truncated to integers. known: x as torch knows it."""
    if x.dtype.is_float and call.dtype.compute is DType.int32:
        return call.pointwise(lambda a: convert(unary("trunc", a), call.dtype), x)
    if call.dtype.is_float and from_torch(known.dtype) is not call.dtype:
        return call.pointwise(lambda a: rounded(cast_to(a, DType.float32), call.dtype), x)
    return call.pointwise(lambda a: a, x)


@lowering(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.contiguous.default
)
def identity(call: Call, x: Node, *_: Any, **__: Any) -> Node:
    """x itself: copies and aliases need no computation."""
    return call.pointwise(lambda a: a, x)
