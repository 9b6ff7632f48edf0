"""BlockedMatrix of GGUF as codes, scales and offsets: the quantized form of `code_operators.py`, taken apart bit for bit.

A weight [rows, columns] is code * scale + offset, where `block` neighbours of a row (its last ones may be fewer) share a scale and
an offset. Codes of K-quants lie in blocks of 256, whose scales are codes themselves: their scale is the second of a pair. Nothing
is rounded; bits move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.code_operators import E2M1, NONLINEAR, pack, pack_by_fours

Array = NDArray[Any]


@dataclass(frozen=True)
class Parameter:
    """Scales or offsets [rows, columns / block]: numbers, or codes that `values` [rows, groups] multiply; codes of 4 bits lie two
    in a byte. bias: of numbers that are powers of two, and of which `values` are the exponents, uint8.
    """

    values: Array
    codes: Array | None = None
    bits: int = 8
    bias: int | None = None


@dataclass(frozen=True)
class BlockedMatrix:
    """codes: int8 [rows, columns], or uint8 with several codes of `bits` bits in a byte: 4 bits alone the lowest one first, others
    by fours (`pack_by_fours`). upper: the same for `above` further bits. low: what is added to the codes. numbers: the table of 8
    bits each that codes are looked up in, None: they are the numbers.
    """

    columns: int
    block: int
    codes: Array
    scale: Parameter
    offset: Parameter | None = None
    bits: int = 8
    upper: Array | None = None
    above: int = 0
    low: int = 0
    numbers: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def by_fours(self) -> bool:
        """Whether codes lie by fours."""
        return self.bits not in (4, 8) or self.upper is not None

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays() if a is not None)

    def _arrays(self) -> list[Array | None]:
        offset = (self.offset.values, self.offset.codes) if self.offset else ()
        return [self.codes, self.upper, self.scale.values, self.scale.codes, *offset]

    def take(self, rows: Array | slice) -> BlockedMatrix:
        """Some rows, in an order."""

        def of(p: Parameter | None) -> Parameter | None:
            return p and replace(p, values=p.values[rows], codes=None if p.codes is None else p.codes[rows])

        scale = of(self.scale)
        assert scale is not None
        upper = None if self.upper is None else self.upper[rows]
        return replace(self, codes=self.codes[rows], upper=upper, scale=scale, offset=of(self.offset))


def _half(raw: Array) -> Array:
    """Two bytes at the end of a shape as a float16."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _split(raw: Array, *sizes: int) -> list[Array]:
    ends = np.cumsum(sizes)
    return [raw[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _rows(x: Array) -> Array:
    """[rows, blocks, *] -> [rows, all of a row]."""
    return np.ascontiguousarray(x.reshape(x.shape[0], -1))


def _nibbles(raw: Array) -> Array:
    """Lower halves of bytes, then upper halves."""
    return np.concatenate([raw & 15, raw >> 4], -1)


def _fifth(raw: Array) -> Array:
    """32 bits, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little")


def _q4_0(b: Array) -> dict[str, Any]:
    d, q = _split(b, 2, 16)
    return dict(block=32, bits=4, low=-8, codes=pack(_nibbles(q), 4), scale=Parameter(_half(d)))


def _q4_1(b: Array) -> dict[str, Any]:
    d, m, q = _split(b, 2, 2, 16)
    return dict(block=32, bits=4, codes=pack(_nibbles(q), 4), scale=Parameter(_half(d)), offset=Parameter(_half(m)))


def _q5_0(b: Array) -> dict[str, Any]:
    d, h, q = _split(b, 2, 4, 16)
    return dict(
        block=32,
        bits=4,
        low=-16,
        codes=pack_by_fours(_nibbles(q), 4),
        upper=pack_by_fours(_fifth(h), 1),
        above=1,
        scale=Parameter(_half(d)),
    )


def _q5_1(b: Array) -> dict[str, Any]:
    d, m, h, q = _split(b, 2, 2, 4, 16)
    return dict(
        block=32, bits=4, codes=pack_by_fours(_nibbles(q), 4), upper=pack_by_fours(_fifth(h), 1), above=1,
        scale=Parameter(_half(d)), offset=Parameter(_half(m)),
    )  # fmt: skip


def _q8_0(b: Array) -> dict[str, Any]:
    d, q = _split(b, 2, 32)
    return dict(block=32, codes=q.view(np.int8), scale=Parameter(_half(d)))


def _twos(raw: Array) -> Array:
    """[*, 64] bytes with four codes of two bits each -> [*, 256]: byte j of 32 has codes j, j + 32, j + 64, j + 96."""
    halves = raw.reshape(*raw.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    found: Array = (halves >> shifts & 3).reshape(*raw.shape[:-1], 256)
    return found


def _q2_k(b: Array) -> dict[str, Any]:
    s, q, d, m = _split(b, 16, 64, 2, 2)
    scale, minimum = pack(s & 15, 4), pack(s >> 4, 4)
    return dict(
        block=16,
        bits=2,
        codes=pack_by_fours(_twos(q), 2),
        scale=Parameter(_half(d), scale, 4),
        offset=Parameter(-_half(m), minimum, 4),
    )


def _q3_k(b: Array) -> dict[str, Any]:
    h, q, s, d = _split(b, 32, 64, 12, 2)
    low, high = s[..., :8], s[..., 8:]
    scales = np.concatenate([low & 15, low >> 4], -1)
    upper = (high[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(*s.shape[:-1], 16)
    scales = (scales | upper << 4).astype(np.int8) - 32
    bit = (h[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(*h.shape[:-1], 256)
    return dict(
        block=16,
        bits=2,
        low=-4,
        codes=pack_by_fours(_twos(q), 2),
        upper=pack_by_fours(bit, 1),
        above=1,
        scale=Parameter(_half(d), scales),
    )


def _six_bits(s: Array) -> tuple[Array, Array]:
    """12 bytes with eight scales and eight minima of six bits."""
    d, m, md = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = np.concatenate([d & 0x3F, (md & 0x0F) | (d >> 2 & 0x30)], -1)
    minimum = np.concatenate([m & 0x3F, (md >> 4) | (m >> 2 & 0x30)], -1)
    return scale, minimum


def _halves(q: Array) -> Array:
    """[*, 128] bytes -> [*, 256]: of every 32 bytes, the lower halves, then the upper ones."""
    return _nibbles(q.reshape(*q.shape[:-1], 4, 32)).reshape(*q.shape[:-1], 256)


def _q4_k(b: Array) -> dict[str, Any]:
    d, m, s, q = _split(b, 2, 2, 12, 128)
    scale, minimum = _six_bits(s)
    return dict(
        block=32,
        bits=4,
        codes=pack(_halves(q), 4),
        scale=Parameter(_half(d), scale),
        offset=Parameter(-_half(m), minimum),
    )


def _q5_k(b: Array) -> dict[str, Any]:
    d, m, s, h, q = _split(b, 2, 2, 12, 32, 128)
    scale, minimum = _six_bits(s)
    bit = (h[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(*h.shape[:-1], 256)
    return dict(
        block=32, bits=4, codes=pack_by_fours(_halves(q), 4), upper=pack_by_fours(bit, 1), above=1,
        scale=Parameter(_half(d), scale), offset=Parameter(-_half(m), minimum),
    )  # fmt: skip


def _q6_k(b: Array) -> dict[str, Any]:
    q, h, s, d = _split(b, 128, 64, 16, 2)
    low = _nibbles(q.reshape(*q.shape[:-1], 2, 64)).reshape(*q.shape[:-1], 256)
    return dict(
        block=16, bits=4, low=-32, codes=pack_by_fours(low, 4), upper=pack_by_fours(_twos(h), 2), above=2,
        scale=Parameter(_half(d), s.view(np.int8)),
    )  # fmt: skip


def _iq4_nl(b: Array) -> dict[str, Any]:
    d, q = _split(b, 2, 16)
    return dict(block=32, bits=4, codes=pack(_nibbles(q), 4), numbers=NONLINEAR, scale=Parameter(_half(d)))


def _iq4_xs(b: Array) -> dict[str, Any]:
    d, h, low, q = _split(b, 2, 2, 4, 128)
    upper = np.ascontiguousarray(h).view(np.uint16) >> (2 * np.arange(8, dtype=np.uint16)) & 3
    lower = np.stack([low & 15, low >> 4], -1).reshape(*low.shape[:-1], 8)
    scale = (lower | upper.astype(np.uint8) << 4).astype(np.int8) - 32
    codes = _nibbles(q.reshape(*q.shape[:-1], 8, 16)).reshape(*q.shape[:-1], 256)
    return dict(block=32, bits=4, codes=pack(codes, 4), numbers=NONLINEAR, scale=Parameter(_half(d), scale))


def _mxfp4(b: Array) -> dict[str, Any]:
    e, q = _split(b, 1, 16)
    # A bias of 127 and one: the numbers are twice those of the format.
    return dict(block=32, bits=4, codes=pack(_nibbles(q), 4), numbers=E2M1, scale=Parameter(e[..., 0], bias=128))


_FORMATS: dict[str, tuple[int, int, Callable[[Array], dict[str, Any]]]] = {  # elements and bytes of a block
    "Q4_0": (32, 18, _q4_0), "Q4_1": (32, 20, _q4_1), "Q5_0": (32, 22, _q5_0), "Q5_1": (32, 24, _q5_1), "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k), "Q3_K": (256, 110, _q3_k), "Q4_K": (256, 144, _q4_k), "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k), "IQ4_NL": (32, 18, _iq4_nl), "IQ4_XS": (256, 136, _iq4_xs), "MXFP4": (32, 17, _mxfp4),
}  # fmt: skip

NAMES = tuple(_FORMATS)
"""The block formats that are taken."""


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of so many elements, a multiple of those of a block."""
    elements, size, _ = _FORMATS[kind]
    return columns // elements * size


def of_gguf(raw: Array, kind: str) -> BlockedMatrix:
    """A weight of GGUF. raw: uint8 [rows, bytes of a row]; kind: one of `NAMES`."""
    elements, size, take = _FORMATS[kind]
    made = take(raw.reshape(raw.shape[0], -1, size))

    def parameter(p: Parameter | None) -> Parameter | None:
        if p is None or p.codes is None:
            return p
        return replace(p, codes=_rows(p.codes))

    made["codes"] = _rows(made["codes"])
    made["upper"] = _rows(made["upper"]) if "upper" in made else None
    made["scale"], made["offset"] = parameter(made["scale"]), parameter(made.get("offset"))
    return BlockedMatrix(columns=raw.shape[1] // size * elements, **made)


def of_numbers(x: Array, bits: int, group: int = 32) -> BlockedMatrix:
    """float32 [rows, columns], rounded to codes of 8 or 4 bits with a float16 scale for `group` neighbours; the last group of a row
    may be shorter.
    """
    columns = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -columns % group))) if columns % group else x
    grouped = padded.reshape(len(x), padded.shape[1] // group, group)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1, keepdims=True), -1)
    scale = (largest / _LARGEST[bits]).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    codes = np.clip(np.rint(grouped / divisor), -(1 << bits - 1), (1 << bits - 1) - 1).astype(np.int8)
    codes = codes.reshape(padded.shape)[:, : columns + columns % (8 // bits)]  # whole bytes
    if bits == 4:
        return BlockedMatrix(columns, group, pack(codes + 8, 4), Parameter(scale[..., 0]), bits=4, low=-8)
    return BlockedMatrix(columns, group, np.ascontiguousarray(codes), Parameter(scale[..., 0]))


_LARGEST = {8: -127, 4: -8}
"""What code the largest number of a group becomes. Codes of 4 bits have one more below zero, so that one is it. Smaller scales
have smaller squared errors (the best of -8, -7.3 and -8.7: 0.73 of what 7 gives, for 0.78), and worse models: they cut the
largest numbers off.
"""
