"""Fourier transforms of short dimensions, as products with the matrix of the transform; complex numbers are pairs of reals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lapilli.eager.call import run

aten = torch.ops.aten

LONGEST = 2048
"""Size from which PyTorch's own transform on the CPU is taken: its work grows as n log n, ours as n * n."""


def real_to_complex(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """`aten._fft_r2c`: x float32; the last of the dimensions has n/2 + 1 results if onesided."""
    if not _is_supported(x, torch.float32, dims, [x.shape[d] for d in dims]):
        return run(aten._fft_r2c.default)(x, dims, normalization, onesided)  # type: ignore[no-any-return]
    d = dims[-1] % x.dim()
    n = x.shape[d]
    real, imaginary = _parts(n, True, x.device)
    kept = n // 2 + 1 if onesided else n
    rows = x.movedim(d, -1)
    pair = torch.stack([(rows @ m[:, :kept]).movedim(-1, d) for m in (real, imaginary)], -1)
    for other in dims[:-1]:
        pair = _along(pair, other % x.dim(), True)
    return torch.view_as_complex(_scaled(pair, normalization, [x.shape[d] for d in dims]))


def complex_to_complex(x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """`aten._fft_c2c`: x complex64."""
    if not _is_supported(x, torch.complex64, dims, [x.shape[d] for d in dims]):
        return run(aten._fft_c2c.default)(x, dims, normalization, forward)  # type: ignore[no-any-return]
    pair = torch.view_as_real(x)
    for d in dims:
        pair = _along(pair, d % x.dim(), forward)
    return torch.view_as_complex(_scaled(pair, normalization, [x.shape[d] for d in dims]))


def complex_to_real(x: Tensor, dims: Sequence[int], normalization: int, last: int) -> Tensor:
    """`aten._fft_c2r`: x complex64, of the last dimension the first n/2 + 1 elements; the others are their conjugates."""
    sizes = [*(x.shape[d] for d in dims[:-1]), last]
    if not _is_supported(x, torch.complex64, dims, sizes):
        return run(aten._fft_c2r.default)(x, dims, normalization, last)  # type: ignore[no-any-return]
    pair = torch.view_as_real(x)
    for other in dims[:-1]:
        pair = _along(pair, other % x.dim(), False)
    d = dims[-1] % x.dim()
    kept = last // 2 + 1
    # What is not given counts as the conjugate of what is: both together, twice the real part.
    twice = torch.full((kept, 1), 2.0, device="cpu")
    twice[0] = 1.0
    if last % 2 == 0:
        twice[-1] = 1.0
    real, imaginary = _parts(last, False, x.device)
    weights = twice.to(x.device)
    rows = pair.narrow(d, 0, kept).movedim(d, -2)
    found = rows[..., 0] @ (real[:kept] * weights) - rows[..., 1] @ (imaginary[:kept] * weights)
    return _scaled(found.movedim(-1, d), normalization, sizes)


def _is_supported(x: Tensor, dtype: torch.dtype, dims: Sequence[int], sizes: Sequence[int]) -> bool:
    return x.dtype is dtype and bool(dims) and x.numel() > 0 and max(sizes) <= LONGEST and not x.is_conj()


def _scaled(x: Tensor, normalization: int, sizes: Sequence[int]) -> Tensor:
    """normalization: 0: none, 1: by the root of the number of elements, 2: by that number. Dense."""
    count = math.prod(sizes)
    factor = {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization]
    return (x if factor == 1 else x * factor).contiguous()


def _along(pair: Tensor, d: int, forward: bool) -> Tensor:
    """The transform of pairs [..., 2] along a dimension."""
    real, imaginary = _parts(pair.shape[d], forward, pair.device)
    rows = pair.movedim(d, -2)
    a, b = rows[..., 0], rows[..., 1]
    made = torch.stack([a @ real - b @ imaginary, a @ imaginary + b @ real], -1)
    return made.movedim(-2, d)


@lru_cache(maxsize=32)
def _parts(n: int, forward: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of the matrix [n, n]."""
    k = torch.arange(n, dtype=torch.int64, device="cpu")
    angle = (k[:, None] * k % n).double() * ((-2 if forward else 2) * math.pi / n)
    return angle.cos().float().to(device), angle.sin().float().to(device)
