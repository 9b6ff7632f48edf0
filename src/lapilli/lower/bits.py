"""Operators on the bits of numbers: shifts, and the sign, exponent and neighbours of floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, is_finite, unary, where
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, Operand, lowering

aten = torch.ops.aten
_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1


def bits(x: Expr) -> Expr:
    return unary("as_int", x)


def negative(x: Expr) -> Expr:
    """Whether the sign bit is set, also of -0 and NaN."""
    return binary("lt", bits(x), 0)


def _integer(op: str, width: int) -> Any:
    """A shift of a type with `width` bits. As in torch, a shift by `width` or more, or by a negative number, shifts every
    bit out.
    """

    def shift(x: Expr, n: Expr) -> Expr:
        outside = binary("or", binary("lt", n, 0), binary("ge", n, width))
        gone = binary("shr", x, 31) if op == "shr" else const(0)
        return where(outside, gone, binary(op, x, binary("bitand", n, 31)))

    return shift


def _left_in_int64(x: Expr, n: Expr) -> Expr:
    """A left shift of an int64 number that fits into 32 bits, by up to 63: in two steps, because a 32-bit shift is below
    32.
    """
    outside = binary("or", binary("lt", n, 0), binary("ge", n, 64))
    first = binary("min", binary("max", n, 0), 31)
    rest = binary("min", binary("max", n - first, 0), 31)
    return where(outside, const(0), binary("shl", binary("shl", x, first), rest))


def _shift(op: str) -> Any:
    def build(call: Call, a: Operand, b: Operand) -> Node:
        wide = op == "shl" and call.dtype is DType.int64
        shift = _left_in_int64 if wide else _integer(op, min(call.dtype.size * 8, 32))
        return call.pointwise(shift, a, b, common=call.dtype)

    return build


for _name, _dunder, _op in (("left", "lshift", "shl"), ("right", "rshift", "shr")):
    _packet, _special = getattr(aten, f"bitwise_{_name}_shift"), getattr(aten, f"__{_dunder}__")
    lowering(
        _packet.Tensor, _packet.Tensor_Scalar, _packet.Scalar_Tensor, _special.Tensor, _special.Scalar
    )(_shift(_op))  # fmt: skip


@lowering(aten.signbit.default)
def signbit(call: Call, x: Node) -> Node:
    """Whether x is negative, bool of the shape of x; for floats the sign bit, which -0 and NaN may have too."""
    kind = x.dtype.compute
    if kind is DType.bool:
        return call.map(lambda *at: const(False))
    return call.pointwise(lambda a: negative(a) if kind is DType.float32 else binary("lt", a, 0), x)


@lowering(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(call: Call, a: Operand, b: Operand) -> Node:
    """The magnitude of a with the sign of b, with broadcasting; floating point."""

    def join(x: Expr, y: Expr) -> Expr:
        size, sign = binary("bitand", bits(x), _MAGNITUDE), binary("bitand", bits(y), _SIGN)
        return unary("as_float", binary("bitor", size, sign))

    return call.pointwise(join, a, b, compute=DType.float32)


@lowering(aten.nextafter.default)
def nextafter(call: Call, a: Node, b: Node) -> Node:
    """The float next to a in the direction of b, with broadcasting: floats of one sign are ordered as the integers of their
    bits.
    """
    if call.dtype is not DType.float32:
        raise TypeError(f"{call.op} of {call.dtype.name} is not supported; convert the tensors to float32 first")

    def step(x: Expr, y: Expr) -> Expr:
        away = binary("eq", binary("gt", y, x), binary("gt", x, 0.0))
        moved = unary("as_float", bits(x) + where(away, const(1), const(-1)))
        least = unary("as_float", where(binary("gt", y, 0.0), const(1), const(_SIGN + 1)))
        value = where(binary("eq", x, 0.0), least, moved)
        value = where(binary("eq", x, y), y, value)
        return where(binary("or", unary("isnan", x), unary("isnan", y)), x + y, value)

    return call.pointwise(step, a, b)


def parts(a: Expr) -> tuple[Expr, Expr]:
    """The mantissa, 0.5 <= |mantissa| < 1, and the exponent (int32) of a float. For 0, infinities and NaN: the value itself
    and 0.
    """
    size = binary("bitand", bits(a), _MAGNITUDE)
    tiny = binary("lt", size, 1 << 23)  # a denormal is an integer multiple of 2^-149
    scaled = binary("bitor", bits(cast_to(size, DType.float32)), binary("bitand", bits(a), _SIGN))
    word = where(tiny, scaled, bits(a))
    exponent = binary("bitand", binary("shr", word, 23), 255) - where(tiny, const(126 + 149), const(126))
    mantissa = unary("as_float", binary("bitor", binary("bitand", word, _SIGN | 0x7FFFFF), 126 << 23))
    fixed = binary("or", binary("eq", size, 0), unary("not", is_finite(a)))
    return where(fixed, a, mantissa), where(fixed, const(0), exponent)


@lowering(aten.frexp.Tensor)
def frexp(call: Call, x: Node) -> tuple[Node, Node]:
    """x = mantissa * 2^exponent with 0.5 <= |mantissa| < 1: mantissas and exponents (int32), both of the shape of x."""
    second = replace(call, name=f"{call.name}_exponent", shapes=call.shapes[1:], dtypes=call.dtypes[1:])
    mantissa = call.pointwise(lambda a: parts(a)[0], x, compute=DType.float32)
    return mantissa, second.pointwise(lambda a: parts(a)[1], x, compute=DType.float32)


@lowering(aten.gcd.default)
def gcd(call: Call, a: Operand, b: Operand) -> Node:
    """The greatest common divisor of integers, with broadcasting; it is never negative, and gcd(0, 0) = 0."""
    return call.pointwise(lambda x, y: binary("gcd", x, y), a, b, common=call.dtype)
