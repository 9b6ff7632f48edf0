"""Element types: how tensors are stored, and the types in which their elements are computed."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Storage types. Their values are the numbers in the file format (`native/schema/program.fbs`).

    `code`: small integers as floats, each in a byte, that kernels pass to each other; no file has a tensor of them. `Node.least`
    is what a byte of 0 stands for.
    """

    bool = 0
    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float16 = 6
    bfloat16 = 7
    float32 = 8
    float64 = 9
    code = 16

    __hash__ = object.__hash__
    """Members are one object each. (Enum's hash is Python, and types are a part of every expression's key.)"""

    @property
    def size(self) -> int:
        """Bytes per element in memory."""
        return _SIZES[self]

    @property
    def is_float(self) -> bool:  # type: ignore[valid-type]
        return self in _FLOATS

    @property
    def is_short_float(self) -> bool:  # type: ignore[valid-type]
        """Whether it is a float of 16 bits."""
        return self in (DType.float16, DType.bfloat16)

    @property
    def compute(self) -> DType:
        """The type in which kernels compute: float32 for floats, int32 for integers, bool."""
        if self.is_float:
            return DType.float32
        return DType.bool if self is DType.bool else DType.int32


_FLOATS = {DType.float16, DType.bfloat16, DType.float32, DType.float64, DType.code}
_SIZES = {
    DType.bool: 1,
    DType.uint8: 1,
    DType.int8: 1,
    DType.int16: 2,
    DType.int32: 4,
    DType.int64: 8,
    DType.float16: 2,
    DType.bfloat16: 2,
    DType.float32: 4,
    DType.float64: 8,
    DType.code: 1,
}
