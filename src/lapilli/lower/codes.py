"""Quantized tensors: numbers as expressions of codes, and codes of numbers. See `code_operators.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lapilli.code_operators import DEQUANTIZE, QUANTIZE, UNPACK
from lapilli.graph.coded_layers import CODED_EMBEDDING, CODED_LINEAR, embedding, linear
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, index, load, unary
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node
from lapilli.lower.registry import Call, decomposition, lowering

decomposition(CODED_LINEAR)(linear)
decomposition(CODED_EMBEDDING)(embedding)


def _parameter(p: Node, at: Sequence[Int], block: Sequence[int]) -> Expr:
    """The parameter of an element. Its own shape may lack dimensions of one block, or have further ones of size 1."""
    kept = [i if b == 1 else i // b for i, b in zip(at, block, strict=True) if b != -1]
    if p.rank == len(at):
        rest = iter(kept)
        place = [as_int(0) if b == -1 else next(rest) for b in block]
    elif p.rank == len(kept):
        place = kept
    else:
        real = iter([i for i in kept if i != 0])
        place = [as_int(0) if size == 1 else next(real) for size in p.shape]
    return load(p, [as_int(0) if size == 1 else i for i, size in zip(place, p.shape, strict=True)])


@lowering(DEQUANTIZE)
def dequantize(call: Call, codes: Node, scale: Node, zero: Node | None, block: Sequence[int], _: Any) -> Map:
    """(code - zero point) * scale: codes [*] of any integer type -> [*]."""

    def body(*at: Int) -> Expr:
        value = cast_to(load(codes, at), DType.float32)
        if zero is not None:
            value = value - cast_to(_parameter(zero, at, block), DType.float32)
        return value * _parameter(scale, at, block)

    return call.map(body)


@lowering(QUANTIZE)
def quantize(
    call: Call, x: Node, inverse: Node, zero: Node | None, block: Sequence[int], low: int, high: int, _: Any,
    divides: bool = False,
) -> Map:  # fmt: skip
    """x / scale rounded half to even, plus the zero point, between low and high: [*] -> integers [*], of any type."""

    def body(*at: Int) -> Expr:
        factor, value = _parameter(inverse, at, block), load(x, at)
        value = unary("round", value / factor if divides else value * factor)
        if zero is not None:
            value = value + cast_to(_parameter(zero, at, block), DType.float32)
        return binary("at_most", binary("at_least", value, float(low)), float(high))  # of NaN it makes the least code

    return call.map(body)


def _bits_of(packed: Node, at: Sequence[Int], bits: int) -> Expr:
    """The number of some bits at an index, several in a byte."""
    *rows, column = at
    count = 8 // bits
    shift = index(column % count * bits)
    return binary("bitand", binary("shr", load(packed, [*rows, column // count]), shift), (1 << bits) - 1)


def code_of(packed: Node, at: Sequence[Int], low: int) -> Expr:
    """The code of four bits at an index, two in a byte."""
    return binary("add", _bits_of(packed, at, 4), low)


@lowering(UNPACK)
def unpack(call: Call, packed: Node, low: int, _: int, bits: int = 4, upper: Node | None = None, above: int = 0) -> Map:
    """uint8 [*, ceil(n * bits / 8)] and perhaps [*, ceil(n * above / 8)] -> codes [*, n]."""

    def body(*at: Int) -> Expr:
        code = _bits_of(packed, at, bits)
        if upper is not None:
            code = binary("bitor", code, binary("shl", _bits_of(upper, at, above), bits))
        return binary("add", code, low)

    return call.map(body)
