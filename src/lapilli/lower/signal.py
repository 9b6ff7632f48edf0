"""The inverse short-time Fourier transform."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapilli.ir.expr import Expr, const, load, select
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, decomposition, lowering

aten = torch.ops.aten


@lowering(aten.unfold_backward.default)
def unfold_backward(call: Call, grad: Node, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Node:
    """grad [*, windows, *, size] -> [*, n, *]: every element is the sum of its copies in all windows. Element p is number p
    - f * step of window f.
    """
    rank = len(call.shape)
    if not rank:
        return call.map(lambda *at: load(grad, [as_int(0)]))
    d = dim % rank

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        window = at[d] // step - r[0]
        place = at[d] - window * step
        guards = [window, grad.shape[d] - 1 - window, size - 1 - place]
        return select(guards, load(grad, [*at[:d], window, *at[d + 1 :], place]), const(0, grad.dtype.compute))

    return call.reduce("sum", body, call.shape, [as_int(-(-size // step))])


@decomposition(aten.istft.default)
def istft(
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Inverse transforms of all frames, times the window, overlapped and added, divided by the sum of squared windows
    (Griffin and Lim 1984).

    spectrum: complex [batch, frequencies, frames] or [frequencies, frames] -> [batch, length] or [length]. torch checks
    that the sum of squared windows is nowhere zero; here the result is infinite or NaN where it is.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    weights = torch.ones(width, device=spectrum.device) if window is None else window
    if width != n_fft:
        before = (n_fft - width) // 2
        weights = torch.constant_pad_nd(weights, [before, n_fft - width - before])
    frames = (spectrum if spectrum.dim() == 3 else spectrum.unsqueeze(0)).transpose(-1, -2)
    scale = 1 if normalized else 2
    if onesided is None:
        onesided = not return_complex
    if onesided:
        frames = aten._fft_c2r(frames.narrow(-1, 0, n_fft // 2 + 1), [-1], scale, n_fft)
    else:
        frames = aten._fft_c2c(frames, [-1], scale, False)
        frames = frames if return_complex else torch.real(frames)
    if frames.is_complex():
        made = torch.complex(*(_overlapped(p * weights, hop) for p in (torch.real(frames), torch.imag(frames))))
    else:
        made = _overlapped(frames * weights, hop)
    squares = (weights * weights).expand(1, frames.shape[1], n_fft)
    start = n_fft // 2 if center else 0
    there = made.shape[-1]
    end = start + length if length is not None else there - start
    stop = min(end, there) if length is not None else end
    made = made[:, start:stop] / _overlapped(squares, hop)[:, start:stop]
    if length is not None and end > there:
        made = torch.constant_pad_nd(made, [0, end - there])
    return made if spectrum.dim() == 3 else made.squeeze(0)


def _overlapped(frames: Tensor, hop: int) -> Tensor:
    """Overlaps and adds frames [batch, frames, size], `hop` apart: [batch, samples]."""
    batch, count, size = frames.shape
    made: Tensor = aten.unfold_backward(frames, [batch, size + hop * (count - 1)], 1, size, hop)
    return made
