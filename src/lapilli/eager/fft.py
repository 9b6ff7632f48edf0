"""Fourier transforms of eager tensors; complex numbers are pairs of reals in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lapilli.eager.dispatch import composite, run
from lapilli.graph import fourier
from lapilli.graph.fourier import Key, Parts

aten = torch.ops.aten


@composite(aten._fft_r2c.default)
def real_to_complex(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """`aten._fft_r2c`: x float32; the last of the dimensions has n // 2 + 1 results if onesided."""
    if not _is_supported(x, torch.float32, dims):
        return run(aten._fft_r2c.default)(x, dims, normalization, onesided)  # type: ignore[no-any-return]
    return _joined(fourier.real_to_complex(x, dims, normalization, onesided, _tables(x.device)))


@composite(aten._fft_c2c.default)
def complex_to_complex(x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """`aten._fft_c2c`: x complex64."""
    if not _is_supported(x, torch.complex64, dims):
        return run(aten._fft_c2c.default)(x, dims, normalization, forward)  # type: ignore[no-any-return]
    return _joined(fourier.complex_to_complex(_parts(x), dims, normalization, forward, _tables(x.device)))


@composite(aten._fft_c2r.default)
def complex_to_real(x: Tensor, dims: Sequence[int], normalization: int, last: int) -> Tensor:
    """`aten._fft_c2r`: x complex64; reads the first last // 2 + 1 elements of the last dimension, the others are their
    conjugates.
    """
    if not _is_supported(x, torch.complex64, dims):
        return run(aten._fft_c2r.default)(x, dims, normalization, last)  # type: ignore[no-any-return]
    return fourier.complex_to_real(_parts(x), dims, normalization, last, _tables(x.device)).contiguous()


def _is_supported(x: Tensor, dtype: torch.dtype, dims: Sequence[int]) -> bool:
    return x.dtype is dtype and bool(dims) and x.numel() > 0 and not x.is_conj()


def _parts(x: Tensor) -> Parts:
    pairs = torch.view_as_real(x)
    return pairs[..., 0], pairs[..., 1]


def _joined(parts: Parts) -> Tensor:
    return torch.view_as_complex(torch.stack(parts, -1))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> Callable[[Key], Tensor]:
    @lru_cache(maxsize=64)
    def on_device(key: Key) -> Tensor:
        return fourier.table(key).to(device)

    return on_device
