"""Quantized tensors: numbers as expressions of codes, and codes of numbers. See `code_operators.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lapilli.code_operators import DEQUANTIZE, E2M1, LOOK_UP, NONLINEAR, POWER_OF_TWO, QUANTIZE, UNPACK
from lapilli.graph.coded_layers import CODED_EMBEDDING, CODED_LINEAR, embedding, linear
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, load, narrow, unary, where
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


def bits_of(packed: Node, at: Sequence[Int], bits: int, by_fours: bool) -> Expr:
    """The number of some bits at an index, of which a byte has several: of neighbours, or by fours (`code_operators.py`)."""
    *rows, column = at
    count = 8 // bits
    byte, place = (column // (4 * count) * 4 + column % 4, column // 4) if by_fours else (column // count, column)
    shift = index(place % count * bits)
    return binary("bitand", binary("shr", load(packed, [*rows, byte]), shift), (1 << bits) - 1)


def code_of(planes: Sequence[tuple[Node, int]], at: Sequence[Int], low: int, by_fours: bool) -> Expr:
    """The code at an index. planes: bytes that hold its bits, and how many of them, the lowest ones first."""
    code, above = None, 0
    for packed, bits in planes:
        part = bits_of(packed, at, bits, by_fours)
        code = part if code is None else binary("bitor", code, binary("shl", part, above))
        above += bits
    assert code is not None
    return binary("add", code, low)


@lowering(UNPACK)
def unpack(
    call: Call, packed: Node, low: int, _: int, bits: int = 4, upper: Node | None = None, above: int = 0,
    by_fours: bool = False,
) -> Map:  # fmt: skip
    """uint8 [*, ceil(n * bits / 8)] and perhaps [*, ceil(n * above / 8)] -> codes [*, n]."""
    planes = [(packed, bits), *([(upper, above)] if upper is not None else [])]
    return call.map(lambda *at: code_of(planes, at, low, by_fours))


@lowering(LOOK_UP)
def look_up(call: Call, codes: Node, numbers: Sequence[int]) -> Map:
    """The number [*], float32, that each code [*] stands for. Raises TypeError if there are not 16 numbers of 8 bits."""
    if len(numbers) != 1 << _LOOKED_UP or not all(-128 <= n < 128 for n in numbers):
        raise TypeError(f"a table of codes has 16 numbers from -128 to 127, and this one is {list(numbers)}")
    return call.map(lambda *at: _number(load(codes, at), numbers))


_LOOKED_UP = 4
"""Bits of a code that is looked up."""


def _number(code: Expr, numbers: Sequence[int]) -> Expr:
    """A number of a table, in registers alone: kernels have no memory that lanes read apart at their speed."""
    if tuple(numbers) in TABLES:
        return TABLES[tuple(numbers)](code)
    words = [const(_word(numbers[k : k + 4])) for k in range(0, len(numbers), 4)]
    low, high = where(binary("lt", code, 4), *words[:2]), where(binary("lt", code, 12), *words[2:])
    word = where(binary("lt", code, 8), low, high)
    place = binary("shl", binary("bitand", code, 3), 3)
    return cast_to(narrow(binary("shr", word, place), DType.int8), DType.float32)  # with its sign


_POLYNOMIAL = (0.0015783309936523438, 0.031219482421875, -1.3720703125, 24.171875, -126.5625)
"""Highest power first. It is 0.46 off the table at most, computed with halves as with floats, whether a step is rounded once or
twice.
"""


def _nonlinear(code: Expr) -> Expr:
    """The table's differences grow on both sides, so a polynomial, rounded, is the table."""
    x = cast_to(code, DType.float32)
    value = const(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        value = value * x + coefficient
    return unary("round", value)


def _e2m1(code: Expr) -> Expr:
    """Twice a float of a sign, two bits of exponent and one of fraction. These are where those of a float32 would be, but for the
    numbers below 1, which have no leading one.
    """
    bits = binary("add", binary("shl", binary("bitand", code, 7), _FRACTION - 1), _BIAS << _FRACTION)
    size = unary("as_float", bits)  # 1, 1.5, 2, 3, ...
    size = binary("at_most", size, size * 2 - 2)  # 0, 1, 2, 3, ...
    return unary("as_float", binary("bitor", unary("as_int", size), binary("shl", binary("bitand", code, 8), 28)))


TABLES: dict[tuple[int, ...], Callable[[Expr], Expr]] = {NONLINEAR: _nonlinear, E2M1: _e2m1}
"""Formulas of tables; kernels/operands.slang has the same ones for halves, 1 and 2 of `TABLE`."""


def _word(numbers: Sequence[int]) -> int:
    """Numbers of 8 bits, the first one lowest, as an int32."""
    word = sum((n & 255) << 8 * k for k, n in enumerate(numbers))
    return word - (1 << 32) if word >> 31 else word


@lowering(POWER_OF_TWO)
def power_of_two(call: Call, exponents: Node, bias: int) -> Map:
    """2^(exponent - bias) [*], also below the least normal number. Raises TypeError for a bias that gives others than floats."""
    if not _BIAS <= bias <= _BIAS + _FRACTION - 1:
        raise TypeError(f"the exponents' bias is {bias}, and may be 127 to 149")

    def body(*at: Int) -> Expr:
        power = binary("sub", load(exponents, at), bias - _BIAS)
        small = binary("shr", const(1 << _FRACTION - 1), binary("at_least", unary("neg", power), 0))
        return unary("as_float", where(binary("ge", power, 1), binary("shl", power, _FRACTION), small))

    return call.map(body)


_BIAS, _FRACTION = 127, 23
"""Of float32."""
