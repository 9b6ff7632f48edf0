"""Fourier transforms, windows and mel filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lapilli.capture.onnx.onnx_graph import FLOAT
from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor


def _complex(x: Tensor) -> Tensor:
    """Pairs of the last axis as complex numbers; a real signal as it is."""
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.complex(x[..., 0], x[..., 1])


@operator("DFT")
def dft(call: OnnxCall, x: Tensor, _: Tensor | None = None, axis: Any = None) -> Tensor:
    if call.version < 20:
        place = call.get("axis", 1)
    else:
        place = call.number(2, -2)
    place = axis_of(int(place), x.ndim)
    inverse, onesided = call.get("inverse", 0), call.get("onesided", 0)
    length = call.number(1)
    length = int(length) if isinstance(length, float) else length
    signal = _complex(x)
    if inverse and onesided:
        return torch.fft.irfft(signal, length, place).unsqueeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(signal, length, place))
    if onesided:
        if signal.is_complex():
            whole = torch.fft.fft(signal, length, place)
            return torch.view_as_real(whole.narrow(place, 0, whole.shape[place] // 2 + 1))
        return torch.view_as_real(torch.fft.rfft(signal, length, place))
    return torch.view_as_real(torch.fft.fft(signal, length, place))


@operator("STFT")
def stft(call: OnnxCall, x: Tensor, step: Any, window: Tensor | None = None, length: Any = None) -> Tensor:
    hop = call.number(1)
    size = window.shape[0] if window is not None else call.number(3)
    size = call.number(3, size)
    signal = _complex(x)
    frames = signal.unfold(1, size, hop)
    if window is not None:
        if window.shape[0] < size:
            raise CompileError("a window that is shorter than the frames is not supported")
        frames = frames * window
    if call.get("onesided", 1) and not frames.is_complex():
        return torch.view_as_real(torch.fft.rfft(frames, size, -1))
    made = torch.fft.fft(frames, size, -1)
    if call.get("onesided", 1):
        made = made[..., : size // 2 + 1]
    return torch.view_as_real(made)


def _window(call: OnnxCall, terms: list[float]) -> Tensor:
    size = call.number(0)
    dtype = call.dtype(call.get("output_datatype", FLOAT))
    steps = torch.arange(size, dtype=torch.float64)
    turns = size if call.get("periodic", 1) else size - 1
    angle = steps * (2 * np.pi) / turns if turns else steps
    value: Any = 0.0
    for k, term in enumerate(terms):
        value = value + term * torch.cos(k * angle)
    return value.to(dtype)


@operator("HannWindow")
def hann_window(call: OnnxCall, _: Any) -> Tensor:
    return _window(call, [0.5, -0.5])


@operator("HammingWindow")
def hamming_window(call: OnnxCall, _: Any) -> Tensor:
    return _window(call, [25 / 46, -21 / 46])


@operator("BlackmanWindow")
def blackman_window(call: OnnxCall, _: Any) -> Tensor:
    return _window(call, [0.42, -0.5, 0.08])


@operator("MelWeightMatrix")
def mel_weight_matrix(call: OnnxCall, *_: Any) -> Tensor:
    """Triangles between the edges of mel bands."""
    bins, length, rate, low, high = (call.number(k) for k in range(5))
    if any(not isinstance(n, int | float) for n in (bins, length, rate, low, high)):
        raise CompileError("its parameters must be known when the model is compiled")

    def mel(hertz: float) -> float:
        return float(2595 * np.log10(1 + hertz / 700))

    step = (mel(high) - mel(low)) / (bins + 2)
    edges = 700 * (10 ** ((np.arange(bins + 2) * step + mel(low)) / 2595) - 1)
    edges = ((length + 1) * edges // rate).astype(np.int64)
    result = np.zeros((length // 2 + 1, bins))
    for k in range(bins):
        left, middle, right = edges[k : k + 3]
        if left == middle:
            result[middle, k] = 1
        else:
            result[left : middle + 1, k] = (np.arange(left, middle + 1) - left) / (middle - left)
        if right > middle:
            result[middle:right, k] = (right - np.arange(middle, right)) / (right - middle)
    return torch.tensor(result.tolist(), dtype=call.dtype(call.get("output_datatype", FLOAT)))
