"""Sound as speech models read it: from WAV files and arrays to 16,000 numbers a second, and to the spectrum of a window."""

from __future__ import annotations

import math
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidFileError, InvalidInputError

RATE, WINDOW, HOP = 16000, 400, 160
"""Numbers in a second, in a window of the spectrum, and from one window to the next."""
_LOWEST, _HIGHEST = 1000, 768000
Sound = NDArray[np.float32]


def read_wav(path: str | os.PathLike[str]) -> tuple[Sound, int]:
    """The mean of a WAV file's channels, -1 to 1, float32 [n], and how many numbers a second there are. They are integers of 8, 16,
    24 or 32 bits, or floats. Raises InvalidFileError if it is another file; OSError if it cannot be read.
    """
    data = Path(path).read_bytes()
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InvalidFileError(
            f"{path} is no WAV file: convert it, for example by `ffmpeg -i {Path(path).name} sound.wav`."
        )
    at, form, samples = 12, b"", b""
    while at + 8 <= len(data) and not samples:
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        content = data[at + 8 : at + 8 + size]
        form, samples = (content, samples) if kind == b"fmt " else (form, content if kind == b"data" else samples)
        at += 8 + size + size % 2
    if len(form) < 16:
        raise InvalidFileError(f"{path} does not say what its numbers are: the part 'fmt ' is missing or damaged.")
    code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if code == 0xFFFE and len(form) >= 26:  # the format is said further on
        code = int.from_bytes(form[24:26], "little")
    values = _values(code, bits, samples)
    if values is None or channels < 1 or not _LOWEST <= rate <= _HIGHEST:
        raise InvalidFileError(
            f"{path} has the format {code}, {bits} bits, {channels} channels, {rate} Hz; taken are 1 (integers of 8, 16, 24, 32 "
            f"bits) and 3 (floats of 32, 64), of {_LOWEST} to {_HIGHEST} Hz."
        )
    whole = values[: len(values) // channels * channels].reshape(-1, channels)
    return whole.mean(1, dtype=np.float64).astype(np.float32), rate


def _values(code: int, bits: int, data: bytes) -> NDArray[Any] | None:
    size = bits // 8
    data = data[: len(data) // size * size] if size else b""
    if code == 3 and bits in (32, 64):
        return np.frombuffer(data, f"<f{size}")
    if code != 1 or bits not in (8, 16, 24, 32):
        return None
    if bits == 8:
        return (np.frombuffer(data, np.uint8) - 128.0) / 128
    if bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(data, f"<i{size}") / 2.0 ** (bits - 1)


def resampled(sound: Sound, rate: int, wanted: int = RATE) -> Sound:
    """With another number of samples a second: what both rates can hold, by a windowed sine of 32 waves."""
    if rate == wanted or not len(sound):
        return sound
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cut = min(1.0, up / down)  # of the frequencies
    half = math.ceil(16 / cut)
    count = -(-len(sound) * up // down)
    padded = np.pad(sound.astype(np.float64), (half, half + 1))
    found, taps = np.empty(count), np.arange(1 - half, half + 1)
    for phase in range(min(up, count)):  # all samples at the same distance from one of the given
        places, rest = np.divmod(np.arange(phase, count, up) * down, up)
        distance = taps - rest[0] / up
        kernel = cut * np.sinc(cut * distance) * np.cos(np.pi / 2 * np.clip(distance / half, -1, 1)) ** 2
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
        found[phase::up] = windows[places + 1] @ kernel
    return found.astype(np.float32)


def checked(sound: Any, rate: int | None) -> Sound:
    """Numbers of a caller as `RATE` a second. Raises InvalidInputError if they are none."""
    given = np.asarray(sound)
    if given.ndim != 1 or given.dtype.kind != "f" or not np.isfinite(given).all():
        raise InvalidInputError(
            f"The sound is an array {given.shape} of {given.dtype}; it can be the path of a WAV file, or finite floats [n] from "
            "-1 to 1."
        )
    if rate is None or isinstance(rate, bool) or not isinstance(rate, int) or not _LOWEST <= rate <= _HIGHEST:
        raise InvalidInputError(f"rate is {rate!r}: how many numbers a second an array has, {_LOWEST} to {_HIGHEST}.")
    return resampled(given.astype(np.float32), rate)


@cache
def mel_filters(bins: int) -> NDArray[np.float64]:
    """Triangles over the frequencies 0 to 8000 Hz, [bins, WINDOW / 2 + 1], each of area 1, whose tops are evenly spaced on Slaney's
    mel scale: straight up to 1000 Hz, logarithmic above.
    """
    step, top = math.log(6.4) / 27, 15 + 27 * math.log(8) / math.log(6.4)
    mels = np.linspace(0, top, bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * step))[:, None]
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    sides = np.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle))
    filters: NDArray[np.float64] = np.maximum(sides, 0) * 2 / (high - low)
    return filters


def log_mel(sound: Sound, frames: int, bins: int) -> Sound:
    """Whisper's spectrum of a window of at most frames * HOP numbers, silence after them: float32 [1, bins, frames]."""
    whole = np.pad(sound.astype(np.float64), (0, frames * HOP - len(sound)))
    whole = np.pad(whole, WINDOW // 2, mode="reflect")
    parts = np.lib.stride_tricks.sliding_window_view(whole, WINDOW)[::HOP][:frames]
    waves = np.fft.rfft(parts * np.hanning(WINDOW + 1)[:-1])
    power = mel_filters(bins) @ (np.abs(waves) ** 2).T
    logs = np.log10(np.maximum(power, 1e-10))
    found: Sound = ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)[None]
    return found


def windows(sound: Sound, length: int) -> list[tuple[int, int]]:
    """Where windows of at most `length` numbers begin and end: each is cut where the last sixth of it is quietest, so in no word if
    it can be helped.
    """
    found, begin, smooth = [], 0, RATE // 50
    while len(sound) - begin > length:
        low = begin + length - length // 6
        energy = np.convolve(sound[low : begin + length].astype(np.float64) ** 2, np.ones(smooth), "same")
        end = low + int(energy.argmin())
        found.append((begin, end))
        begin = end
    return [*found, (begin, len(sound))]
