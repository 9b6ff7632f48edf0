"""Conversions between ONNX's element types, with those of fewer bits computed in wider dtypes."""

from __future__ import annotations

import torch

from lapilli.capture.onnx.onnx_graph import (
    BITS,
    BOOL,
    DTYPES,
    FLOAT4E2M1,
    FLOAT8E4M3FN,
    FLOAT8E4M3FNUZ,
    FLOAT8E5M2,
    FLOAT8E5M2FNUZ,
    FLOAT8E8M0,
    FLOATS_OF_8_BITS,
    INT64,
    UINT64,
)  # fmt: skip

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""What lies in the middle of two neighbours of `_FLOAT4`."""


def wrapped(x: torch.Tensor, kind: int) -> torch.Tensor:
    """The low bits of integers, as an integer type has them."""
    if kind not in BITS or kind in (INT64, UINT64) or x.dtype == torch.bool or x.is_floating_point():
        return x
    bits, signed = BITS[kind]
    if x.dtype.itemsize * 8 == bits:
        return x
    low = x & ((1 << bits) - 1)
    return ((low ^ (1 << (bits - 1))) - (1 << (bits - 1))) if signed else low


def cast(x: torch.Tensor, source: int, kind: int, saturate: bool = True, round_mode: str = "up") -> torch.Tensor:
    """A tensor of one element type as another, by ONNX's rules for Cast.

    saturate: whether what an 8-bit float has no value for becomes its largest one. round_mode: of FLOAT8E8M0.
    """
    dtype = DTYPES[kind]
    if kind == source:
        return x
    if kind == FLOAT4E2M1:
        return _float4(x.float())
    if kind in FLOATS_OF_8_BITS:
        return _float8(x.float(), kind, saturate, round_mode)
    if kind == BOOL:
        return x != 0
    if kind not in BITS:
        if source == UINT64:  # two's complement
            wide = x.to(torch.float64)
            return torch.where(x < 0, wide + 2.0**64, wide).to(dtype)
        return x.to(dtype)
    if x.is_floating_point() and kind == UINT64:
        big = x >= 2.0**63
        return torch.where(big, x - 2.0**63, x).to(torch.int64) ^ torch.where(big, -(2**63), 0)
    if x.is_floating_point():
        bits, signed = BITS[kind]
        whole = x.to(torch.int64 if bits > 32 or (bits == 32 and not signed) else torch.int32)
        return wrapped(whole, kind).to(dtype)
    return wrapped(x, kind).to(dtype)


def _float4(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest value, to even where two are as near; beyond the largest it is that one. NaN becomes -0."""
    size = torch.where(torch.isnan(x), 0.0, x.abs())
    place = torch.zeros_like(size)
    for k, middle in enumerate(_BETWEEN):
        place = place + ((size > middle) if k % 2 == 0 else (size >= middle)).to(size.dtype)
    value = torch.zeros_like(size)
    for k, level in enumerate(_FLOAT4):
        value = torch.where(place == k, level, value)
    return torch.copysign(value, torch.where(torch.isnan(x), -1.0, x))


_FORMS = {  # bits of the mantissa, least exponent of normal numbers, largest value, whether there are infinities
    FLOAT8E4M3FN: (3, -6, 448.0, False), FLOAT8E4M3FNUZ: (3, -7, 240.0, False), FLOAT8E5M2: (2, -14, 57344.0, True),
    FLOAT8E5M2FNUZ: (2, -15, 57344.0, False),
}  # fmt: skip


def _float8(x: torch.Tensor, kind: int, saturate: bool, round_mode: str) -> torch.Tensor:
    """Rounded to the nearest value of an 8-bit float type, to even where two are as near, in float32."""
    if kind == FLOAT8E8M0:
        return _power_of_two(x, saturate, round_mode)
    mantissa, least, largest, infinities = _FORMS[kind]
    size = torch.clamp(x.abs(), max=2 * largest)
    exponent = _exponent(size)
    step = torch.exp2(torch.clamp(exponent, min=least) - mantissa)
    rounded = torch.round(size / step) * step
    beyond = largest if saturate else torch.inf if infinities else torch.nan
    rounded = torch.where(rounded > largest, beyond, rounded)
    result = torch.where(torch.isnan(x), torch.nan, torch.copysign(rounded, x))
    return result if kind in (FLOAT8E4M3FN, FLOAT8E5M2) else result + 0.0  # the others have one zero


def _exponent(size: torch.Tensor) -> torch.Tensor:
    """The exponent of numbers that are not negative; that of the least ones that a type here can tell from 0 for 0."""
    exponent = torch.floor(torch.log2(torch.clamp(size, min=2.0**-126)))
    return torch.where(torch.exp2(exponent) > size, exponent - 1, exponent)  # log2 may be rounded up


def _power_of_two(x: torch.Tensor, saturate: bool, round_mode: str) -> torch.Tensor:
    size = x.abs()
    exponent = _exponent(size)
    low = torch.exp2(exponent)
    if round_mode == "up":
        exponent = torch.where(size > low, exponent + 1, exponent)
    elif round_mode == "nearest":
        exponent = torch.where(size >= 1.5 * low, exponent + 1, exponent)
    if saturate:
        exponent = torch.clamp(exponent, -127, 127)
    value = torch.exp2(exponent)
    if not saturate:
        value = torch.where(exponent > 127, torch.nan, value)
    return torch.where(torch.isnan(x), torch.nan, value)
