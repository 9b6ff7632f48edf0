"""Values in narrower types: integers wrap around; floats are rounded to nearest even, and overflow to infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.ir.dtype import DType

OPERATIONS = {d: f"to_{d.name}" for d in (DType.uint8, DType.int8, DType.int16, DType.float16, DType.bfloat16)}
"""The operation that converts int32 or float32 to the value in a narrower type, kept in the compute type."""
LIMITS = {d: (int(np.iinfo(d.name).min), int(np.iinfo(d.name).max)) for d in (
    DType.uint8, DType.int8, DType.int16, DType.int32, DType.int64,
)}  # fmt: skip
"""The smallest and the largest number of an integer type."""


def narrowed(values: Any, dtype: DType) -> NDArray[Any]:
    """int32 or float32 numbers converted to a type in `OPERATIONS`, kept in its compute type."""
    if not dtype.is_float:
        return np.asarray(values).astype(np.int64).astype(dtype.name).astype(np.int32)
    with np.errstate(all="ignore"):
        floats = np.asarray(values).astype(np.float32)
        if dtype is DType.float16:
            return floats.astype(np.float16).astype(np.float32)
        words = floats.view(np.uint32)
        rounded = ((words + 0x7FFF + ((words >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32)
        return np.where(np.isnan(floats), np.float32(np.nan), rounded.view(np.float32))


def as_numbers(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """An array of a type as numbers: bfloat16, given as its bits in integers of 16 bits, as float32; others unchanged."""
    if dtype is not DType.bfloat16:
        return values
    return (np.asarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def wrapped(value: int, dtype: DType) -> int:
    """An integer of any size wrapped to an integer type; unchanged for other types."""
    if dtype not in LIMITS:
        return value
    low, high = LIMITS[dtype]
    return (value - low) % (high - low + 1) + low
