"""Operators of quantized tensors: one pair for all formats, and sums of products of integers.

`lapilli::dequantize` computes numbers from codes, small integers, and parameters that blocks of elements share:
(code - zero point) * scale. `lapilli::quantize` is its inverse, rounded half to even and clamped: it multiplies by the scale's
inverse, or divides by the scale, which is not always the same code. A block has `block[d]` elements along dimension d, or all (-1).
So a scale for a tensor, a channel, a token or a group are the same operator. `lapilli::unpack` reads codes of four bits (or 1 or
2), several in a byte, the lowest one first; codes of other widths have their upper bits in a tensor of their own. By fours, four
neighbours lie in four bytes, and the next four above them: so kernels get four bytes of codes by one shift and one mask.
`lapilli::look_up` is for codes that stand for the numbers of a table, and `lapilli::power_of_two` for scales that are exponents.

`lapilli::integer_product` and `lapilli::integer_convolution` are sums of products of 8-bit integers less their zero points, exact
and in int32. What they become depends on how large the sums may be (`graph/integers.py`).

Sources of models write them, graph passes replace them, and kernels are made of what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lapilli.custom_operators import define


def _spread(parameter: Tensor, x: Tensor, block: Sequence[int]) -> Tensor:
    """A parameter for every element of x."""
    kept = [d for d, b in enumerate(block) if b != -1]
    grid = [-(-x.shape[d] // block[d]) if d in kept else 1 for d in range(x.dim())]
    parameter = parameter.reshape(grid)
    for d in kept:
        parameter = parameter.repeat_interleave(block[d], d).narrow(d, 0, x.shape[d])
    return parameter


def _dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    value = codes.to(dtype)
    if zero is not None:
        value = value - _spread(zero, codes, block).to(dtype)
    return (value * _spread(scale, codes, block)).to(dtype)


def _quantize(
    x: Tensor, inverse: Tensor, zero: Tensor | None, block: Sequence[int], low: int, high: int, dtype: torch.dtype,
    divides: bool = False,
) -> Tensor:  # fmt: skip
    factor = _spread(inverse, x, block)
    value = torch.round(x / factor if divides else x * factor)
    if zero is not None:
        value = value + _spread(zero, x, block)
    return value.clamp(low, high).to(dtype)


def _taken(packed: Tensor, size: int, bits: int, by_fours: bool) -> Tensor:
    parts = [packed >> at & (1 << bits) - 1 for at in range(0, 8, bits)]
    if by_fours:
        fours = torch.stack([p.reshape(*p.shape[:-1], -1, 4) for p in parts], -2)
        return fours.flatten(-3)[..., :size].to(torch.int16)
    return torch.stack(parts, -1).flatten(-2)[..., :size].to(torch.int16)


def pack(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """Codes [*, n] of a few bits, several in a byte, the lowest one first. n is a multiple of their number."""
    count = 8 // bits
    parts = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, count) << (np.arange(count, dtype=np.uint8) * bits)
    packed: NDArray[Any] = np.bitwise_or.reduce(parts, -1)
    return packed


def pack_by_fours(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """Codes [*, n] of 1, 2 or 4 bits: four neighbours in four bytes, the next four above them. n is a multiple of how many 32 bits
    have.
    """
    count = 8 // bits
    fours = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, count, 4)
    parts = fours << (np.arange(count, dtype=np.uint8) * bits)[:, None]
    packed: NDArray[Any] = np.bitwise_or.reduce(parts, -2)
    return packed.reshape(*codes.shape[:-1], -1)


def widths_of(bits: int) -> tuple[int, ...]:
    """The bits of each tensor that codes of so many bits are packed in, by fours unless there is one of 4 or 8. Two tensors at
    most: kernels have no room for more.
    """
    found = tuple(b for b in (4, 2, 1) if max(bits, 1) & b)
    return found if bits < 7 else (8,)


def type_of_codes(low: int, bits: int) -> torch.dtype:
    """The type that holds codes of some bits from the lowest one on."""
    return torch.int8 if low + (1 << bits) - 1 <= torch.iinfo(torch.int8).max else torch.uint8


def _unpack(
    packed: Tensor,
    low: int,
    size: int,
    bits: int = 4,
    upper: Tensor | None = None,
    above: int = 0,
    by_fours: bool = False,
) -> Tensor:
    codes = _taken(packed, size, bits, by_fours)
    if upper is not None:
        codes = codes + (_taken(upper, size, above, by_fours) << bits)
    return (codes + low).to(type_of_codes(low, bits + above))


def _unpacked(
    packed: Tensor,
    low: int,
    size: int,
    bits: int = 4,
    upper: Tensor | None = None,
    above: int = 0,
    by_fours: bool = False,
) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], size), dtype=type_of_codes(low, bits + above))


def _look_up(codes: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=codes.device)[codes.long()]


def _power_of_two(exponents: Tensor, bias: int) -> Tensor:
    ones = torch.ones_like(exponents, dtype=torch.float64)
    return torch.ldexp(ones, exponents.to(torch.int32) - bias).float()


def _less(x: Tensor, zero: Tensor | None) -> Tensor:
    return x.to(torch.int32) if zero is None else x.to(torch.int32) - zero.to(torch.int32)


def _product(a: Tensor, a_zero: Tensor | None, b: Tensor, b_zero: Tensor | None) -> Tensor:
    return torch.matmul(_less(a, a_zero), _less(b, b_zero))


def _convolution(
    x: Tensor, x_zero: Tensor | None, w: Tensor, w_zero: Tensor | None, stride: list[int], pads: list[int],
    dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """In float64, since torch has no convolution of integers on the CPU; sums of 2^37 products are exact."""
    rank = w.dim() - 2
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    padded = F.pad(_less(x, x_zero).double(), [pads[d + side] for d in range(rank - 1, -1, -1) for side in (0, rank)])
    result: Tensor = convolve(padded, _less(w, w_zero).double(), None, stride, 0, dilation, groups)
    return result.to(torch.int64).to(torch.int32)


def _of_convolution(
    x: Tensor, _x: Any, w: Tensor, _w: Any, stride: list[int], pads: list[Any], dilation: list[int], groups: int
) -> Tensor:
    rank = w.dim() - 2
    sizes = [
        (x.shape[d + 2] + pads[d] + pads[d + rank] - (w.shape[d + 2] - 1) * dilation[d] - 1) // stride[d] + 1
        for d in range(rank)
    ]
    return x.new_empty((x.shape[0], w.shape[0], *sizes), dtype=torch.int32)


define(
    "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, int[] block, ScalarType dtype) -> Tensor",
    _dequantize, lambda codes, scale, zero, block, dtype: torch.empty_like(codes, dtype=dtype),
)  # fmt: skip
define(
    "quantize(Tensor x, Tensor inverse, Tensor? zero_point, int[] block, int low, int high, ScalarType dtype, "
    "bool divides=False) -> Tensor",
    _quantize, lambda x, inverse, zero, block, low, high, dtype, divides=False: torch.empty_like(x, dtype=dtype),
)  # fmt: skip
define(
    "unpack(Tensor packed, int low, int size, int bits=4, Tensor? upper=None, int above=0, bool by_fours=False) -> Tensor",
    _unpack, _unpacked,
)  # fmt: skip
define(
    "look_up(Tensor codes, int[] numbers) -> Tensor",
    _look_up, lambda codes, numbers: torch.empty_like(codes, dtype=torch.float32),
)  # fmt: skip
define(
    "power_of_two(Tensor exponents, int bias) -> Tensor",
    _power_of_two, lambda exponents, bias: torch.empty_like(exponents, dtype=torch.float32),
)  # fmt: skip
define(
    "integer_product(Tensor a, Tensor? a_zero, Tensor b, Tensor? b_zero) -> Tensor",
    _product, lambda a, a_zero, b, b_zero: torch.matmul(a.to(torch.int32), b.to(torch.int32)),
)  # fmt: skip
define(
    "integer_convolution(Tensor x, Tensor? x_zero, Tensor w, Tensor? w_zero, int[] stride, SymInt[] pads, int[] dilation, "
    "int groups) -> Tensor",
    _convolution, _of_convolution,
)  # fmt: skip
DEQUANTIZE: Any = torch.ops.lapilli.dequantize.default
QUANTIZE: Any = torch.ops.lapilli.quantize.default
UNPACK: Any = torch.ops.lapilli.unpack.default
LOOK_UP: Any = torch.ops.lapilli.look_up.default
"""codes from 0 to 15, which of 16 numbers of 8 bits each stands for -> float32."""
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Tables for which kernels have a formula: GGUF's of its formats IQ4, and twice the floats of 4 bits of MXFP4 and NVFP4."""
POWER_OF_TWO: Any = torch.ops.lapilli.power_of_two.default
"""uint8 exponents and what they are too large by, 127 to 149 -> float32."""
DECODERS = (DEQUANTIZE, UNPACK, LOOK_UP, POWER_OF_TWO)
"""What makes larger elements of small ones: constants stay as they are before it."""
INTEGER_PRODUCT: Any = torch.ops.lapilli.integer_product.default
"""a [*, m, k], b [*, k, n] -> [*, m, n], as torch.matmul. Zero points are broadcast to their operands."""
INTEGER_CONVOLUTION: Any = torch.ops.lapilli.integer_convolution.default
"""x [N, C, *], w [O, C / groups, *]; pads: elements before all axes, and after them, which are the zero point of x."""
