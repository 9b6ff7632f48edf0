"""Discrete Fourier transforms as matrix products over real and imaginary parts, composed of torch operators.

Short transforms are one product with the transform's matrix. Longer ones are two stages of short ones with twiddle factors
in between (Cooley and Tukey 1965); those of a large prime size are a convolution with a chirp, of a size that has factors
(Bluestein 1970). The work is O(n log n) for every size.

Eager tensors and graphs use the same functions. Their tables (matrices, twiddle factors) are provided by a callback,
`Tables`: the eager device keeps them on the device, a graph makes them constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Parts: TypeAlias = tuple[Tensor, Tensor]
"""Real and imaginary parts: float32, of the same shape."""
Key: TypeAlias = tuple[Any, ...]
Tables: TypeAlias = Callable[[Key], Tensor]
"""Returns the table of a key (see `table`) on the device on which the transform runs."""

_LONGEST_PRODUCT = 512
"""The largest size for which a real transform is one product: its table takes at most 1 MiB."""
_LONGEST_PRIME = 1024
"""The largest prime size for which a transform is one product; for larger ones a convolution is cheaper."""
LONGEST_OPEN = 4096
"""The largest bound of a dynamic size. For those, every run computes the table, and the work is O(n^2)."""


def real_to_complex(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool, tables: Tables) -> Parts:
    """`aten._fft_r2c` of x, float32 [*]; the last of the dimensions has n // 2 + 1 results if onesided."""
    n = x.shape[dims[-1]]
    parts = _along(x, None, dims[-1], -1, n // 2 + 1 if onesided else n, tables)
    for d in dims[:-1]:
        parts = _along(*parts, d, -1, x.shape[d], tables)
    scale = _scale(normalization, [x.shape[d] for d in dims])
    return parts if scale is None else (parts[0] * scale, parts[1] * scale)


def complex_to_complex(parts: Parts, dims: Sequence[int], normalization: int, forward: bool, tables: Tables) -> Parts:
    """`aten._fft_c2c`."""
    sizes = [parts[0].shape[d] for d in dims]
    for d, n in zip(dims, sizes, strict=True):
        parts = _along(*parts, d, -1 if forward else 1, n, tables)
    scale = _scale(normalization, sizes)
    return parts if scale is None else (parts[0] * scale, parts[1] * scale)


def complex_to_real(parts: Parts, dims: Sequence[int], normalization: int, last: int, tables: Tables) -> Tensor:
    """`aten._fft_c2r`: reads the first last // 2 + 1 elements of the last dimension; the others are their conjugates."""
    sizes = [*(parts[0].shape[d] for d in dims[:-1]), last]
    for d, n in zip(dims[:-1], sizes[:-1], strict=True):
        parts = _along(*parts, d, 1, n, tables)
    kept = last // 2 + 1
    re, im = (p.narrow(dims[-1], 0, kept).movedim(dims[-1], -1) for p in parts)
    if not isinstance(last, int):
        made = torch.cat([re, im], -1) @ _open_inverse(last, kept, re)
    elif last <= _LONGEST_PRODUCT:
        made = torch.cat([re, im], -1) @ tables(("inverse", last))
    else:
        between = kept - 1 - (last % 2 == 0)  # elements with a conjugate partner
        whole = [torch.cat([p, s * p.narrow(-1, 1, between).flip(-1)], -1) for p, s in ((re, 1), (im, -1))]
        made = _transform(whole[0], whole[1], last, 1, last, tables)[0]
    made, scale = made.movedim(-1, dims[-1]), _scale(normalization, sizes)
    return made if scale is None else made * scale


def _scale(normalization: int, sizes: Sequence[Any]) -> Any:
    """normalization: 0: none, 1: by the square root of the number of elements, 2: by that number."""
    if not normalization:
        return None
    count = math.prod(sizes)
    return 1 / count if normalization == 2 else 1 / count**0.5


def _along(re: Tensor, im: Tensor | None, d: int, sign: int, kept: int, tables: Tables) -> Parts:
    """The first `kept` results of the transform along a dimension. sign: that of the exponent, -1 for the forward
    transform.
    """
    n = re.shape[d]
    rows = re.movedim(d, -1), None if im is None else im.movedim(d, -1)
    made = _transform(*rows, n, sign, kept, tables)
    return made[0].movedim(-1, d), made[1].movedim(-1, d)


def _transform(re: Tensor, im: Tensor | None, n: int, sign: int, kept: int, tables: Tables) -> Parts:
    """The transform of rows [*, n]. im: None if all numbers are real."""
    if not isinstance(n, int):
        return _split(_joined(re, im) @ _open_matrix(n, sign, kept, im is not None, re), kept)
    if n == 1:
        return re, torch.zeros_like(re) if im is None else im
    first = _factor(n)
    if n <= (_LONGEST_PRODUCT if im is None else _LONGEST_PRODUCT // 2) or (first == 1 and n <= _LONGEST_PRIME):
        return _split(_joined(re, im) @ tables(("matrix", n, sign, kept, im is not None)), kept)
    if first == 1:
        made = _chirp(re, im, n, sign, tables)
    else:
        made = _two_stages(re, im, first, n // first, sign, tables)
    return made if isinstance(kept, int) and kept == n else (made[0].narrow(-1, 0, kept), made[1].narrow(-1, 0, kept))


def _two_stages(re: Tensor, im: Tensor | None, n1: int, n2: int, sign: int, tables: Tables) -> Parts:
    """n = n1 * n2: element j1 * n2 + j2 is read, and result k1 + n1 * k2 is written."""

    def columns(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], n1, n2).transpose(-1, -2)

    a = _transform(columns(re), None if im is None else columns(im), n1, sign, n1, tables)  # [..., j2, k1]
    a = _times(a, tables(("twiddle", n1, n2, sign, 0)), tables(("twiddle", n1, n2, sign, 1)))
    b = _transform(a[0].transpose(-1, -2), a[1].transpose(-1, -2), n2, sign, n2, tables)  # [..., k1, k2]
    return b[0].transpose(-1, -2).flatten(-2), b[1].transpose(-1, -2).flatten(-2)


def _chirp(re: Tensor, im: Tensor | None, n: int, sign: int, tables: Tables) -> Parts:
    """2 j k = j^2 + k^2 - (k - j)^2: a chirp times the convolution with its conjugate."""
    c = tables(("chirp", n, sign, 0)), tables(("chirp", n, sign, 1))
    m = _padded(n)
    a = (re * c[0], re * c[1]) if im is None else _times((re, im), *c)
    padded = [torch.constant_pad_nd(p, [0, m - n]) for p in a]
    a = _transform(padded[0], padded[1], m, -1, m, tables)
    a = _times(a, tables(("chirp filter", n, sign, 0)), tables(("chirp filter", n, sign, 1)))
    a = _transform(a[0], a[1], m, 1, m, tables)
    return _times((a[0].narrow(-1, 0, n), a[1].narrow(-1, 0, n)), *c)


def _times(a: Parts, re: Tensor, im: Tensor) -> Parts:
    return a[0] * re - a[1] * im, a[0] * im + a[1] * re


def _joined(re: Tensor, im: Tensor | None) -> Tensor:
    return re if im is None else torch.cat([re, im], -1)


def _split(x: Tensor, size: int) -> Parts:
    """[*, 2 * size] as real and imaginary parts."""
    return x.narrow(-1, 0, size), x.narrow(-1, size, size)


def _factor(n: int) -> int:
    """The largest divisor up to the square root; 1 for a prime."""
    return next(f for f in range(math.isqrt(n), 0, -1) if n % f == 0)


def _padded(n: int) -> int:
    """The size of the convolution with a chirp: a power of two."""
    return 1 << (2 * n - 2).bit_length()


# --- tables


@lru_cache(maxsize=64)
def table(key: Key) -> Tensor:
    """The table of a key: float32, on the CPU. Angles are multiples of 2 pi / n, reduced in integers, and computed in
    float64.
    """
    kind, *numbers = key
    made: Tensor = _TABLES[kind](*numbers)
    return made.float().contiguous()


def _angles(rows: int, columns: int, n: int, sign: int) -> Tensor:
    """sign * 2 pi * j * k / n, [rows, columns]."""
    j, k = torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu")
    return (j[:, None] * k % n).double() * (sign * 2 * math.pi / n)


def _matrix(n: int, sign: int, kept: int, is_complex: bool) -> Tensor:
    """The matrix of a product [real parts, imaginary parts] times [n or 2 n, 2 kept]."""
    angles = _angles(n, kept, n, sign)
    return _blocks(angles.cos(), angles.sin(), is_complex)


def _blocks(c: Tensor, s: Tensor, is_complex: bool) -> Tensor:
    upper = torch.cat([c, s], -1)
    return torch.cat([upper, torch.cat([-s, c], -1)]) if is_complex else upper


def _inverse(last: int) -> Tensor:
    """[2 * (last // 2 + 1), last]: an element and its conjugate contribute twice the real part."""
    kept = last // 2 + 1
    angles = _angles(kept, last, last, 1)
    weights = torch.full((kept, 1), 2.0, dtype=torch.float64, device="cpu")
    weights[0] = 1.0
    if last % 2 == 0:
        weights[-1] = 1.0
    sines = angles.sin() * weights
    sines[0] = 0.0
    if last % 2 == 0:
        sines[-1] = 0.0
    return torch.cat([angles.cos() * weights, -sines])


def _twiddle(n1: int, n2: int, sign: int, part: int) -> Tensor:
    """Twiddle factors [n2, n1]."""
    angles = _angles(n2, n1, n1 * n2, sign)
    return angles.sin() if part else angles.cos()


def _chirp_angles(n: int, sign: int) -> Tensor:
    k = torch.arange(n, device="cpu")
    return (k * k % (2 * n)).double() * (sign * math.pi / n)


def _chirp_table(n: int, sign: int, part: int) -> Tensor:
    angles = _chirp_angles(n, sign)
    return angles.sin() if part else angles.cos()


def _chirp_filter(n: int, sign: int, part: int) -> Tensor:
    """The transform of the conjugate chirp, divided by its size."""
    m = _padded(n)
    angles = _chirp_angles(n, -sign)
    wave = torch.zeros(m, dtype=torch.complex128, device="cpu")
    wave[:n] = torch.polar(torch.ones_like(angles), angles)
    wave[m - n + 1 :] = wave[1:n].flip(0)
    made: Tensor = torch.fft.fft(wave) / m
    return made.imag if part else made.real


_TABLES: dict[str, Callable[..., Tensor]] = {
    "matrix": _matrix,
    "inverse": _inverse,
    "twiddle": _twiddle,
    "chirp": _chirp_table,
    "chirp filter": _chirp_filter,
}


# --- dynamic sizes: tables are part of the graph


def _open_angles(rows: Any, columns: Any, n: Any, sign: int, like: Tensor) -> Tensor:
    j, k = (torch.arange(size, device=like.device, dtype=torch.int32) for size in (rows, columns))
    made: Tensor = (j.unsqueeze(-1) * k % n).float() * (sign * 2 * math.pi) / n
    return made


def _open_matrix(n: Any, sign: int, kept: Any, is_complex: bool, like: Tensor) -> Tensor:
    angles = _open_angles(n, kept, n, sign, like)
    return _blocks(angles.cos(), angles.sin(), is_complex)


def _open_inverse(last: Any, kept: Any, like: Tensor) -> Tensor:
    angles = _open_angles(kept, last, last, 1, like)
    k = torch.arange(kept, device=like.device, dtype=torch.int32).unsqueeze(-1)
    alone = (k == 0) | (k * 2 == last)
    weights = torch.where(alone, 1.0, 2.0)
    return torch.cat([angles.cos() * weights, torch.where(alone, 0.0, -2.0) * angles.sin()])
