"""Sound as speech models read it, beside transformers' extractor and waves that are known."""

from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision_without_ops
from numpy.typing import NDArray

import lapilli
from lapilli.llm.sound import RATE, checked, log_mel, read_wav, resampled, windows


def tone(frequency: float, rate: int, seconds: float = 1.0) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def spectrum(sound: NDArray[np.float32], filters: NDArray[np.float64]) -> NDArray[np.float64]:
    """transformers' formula in float64."""
    waves = torch.stft(
        torch.from_numpy(sound.astype(np.float64)),
        400,
        160,
        window=torch.hann_window(400, dtype=torch.float64),
        return_complex=True,
    )
    power = torch.from_numpy(filters).T.double() @ waves[:, :-1].abs() ** 2
    logs = power.clamp(min=1e-10).log10()
    return ((logs.maximum(logs.max() - 8) + 4) / 4).numpy()


@pytest.mark.parametrize("bins", [80, 128])
def test_the_spectrum_is_that_of_transformers(bins: int) -> None:
    """Theirs is float32, whose Fourier transform loses weak bins beside strong ones: 2.4e-5 on some processors."""
    torchvision_without_ops.allow()
    from transformers import WhisperFeatureExtractor

    noise = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    extractor = WhisperFeatureExtractor(bins)
    for sound in (noise * 0.1 * tone(3, RATE, 100_000 / RATE), tone(440, RATE, 30), np.zeros(5, np.float32)):
        theirs = extractor(sound, sampling_rate=RATE, return_tensors="np").input_features
        found = log_mel(sound, 3000, bins)
        assert found.shape == theirs.shape and found.dtype == np.float32
        assert np.abs(found - theirs).max() < 1e-4
        exact = spectrum(np.pad(sound, (0, 30 * RATE - len(sound))), extractor.mel_filters)
        assert np.abs(found - exact).max() < 1e-6


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_keep_what_both_can_hold(rate: int) -> None:
    """A wave that both rates hold stays; one that 16 kHz cannot hold goes."""
    found = resampled(tone(1000, rate), rate)
    assert abs(len(found) - RATE) <= 1
    inside = slice(500, -500)
    assert np.abs(found - tone(1000, RATE)[: len(found)])[inside].max() < 1e-3
    if rate > 24000:
        assert np.abs(resampled(tone(11000, rate), rate)[inside]).max() < 1e-3


def test_wav_files_of_all_widths_are_read(tmp_path: Path) -> None:
    left, right = tone(100, 8000), tone(300, 8000)
    mean, stereo = (left + right) / 2, np.stack([left, right], 1)
    for width, bound in ((1, 2**-6), (2, 2**-14), (3, 2**-22), (4, 2**-23)):
        high = 2 ** (8 * width - 1) - 1
        codes = np.round(stereo.astype(np.float64) * high).astype(np.int64)
        data = (
            (codes + 128).astype(np.uint8).tobytes()
            if width == 1
            else b"".join(int(c).to_bytes(width, "little", signed=True) for c in codes.flat)
        )
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(width)
            file.setframerate(8000)
            file.writeframes(data)
        found, rate = read_wav(tmp_path / "a.wav")
        assert rate == 8000 and found.dtype == np.float32 and np.abs(found - mean).max() < bound
    for code, extra in ((3, b""), (0xFFFE, struct.pack("<HHIH", 22, 32, 0, 3) + bytes(14))):
        form = struct.pack("<HHIIHH", code, 1, 8000, 32000, 4, 32) + extra
        data = left.astype("<f4").tobytes()
        odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # parts begin at even places
        parts = (
            b"WAVE"
            + odd
            + b"fmt "
            + struct.pack("<I", len(form))
            + form
            + b"data"
            + struct.pack("<I", len(data))
            + data
        )
        (tmp_path / "b.wav").write_bytes(b"RIFF" + struct.pack("<I", len(parts)) + parts)
        found, rate = read_wav(tmp_path / "b.wav")
        assert rate == 8000 and np.array_equal(found, left)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    good = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    for data, said in (
        (b"ID3", "is no WAV file: convert it"),
        (good[:20], "does not say what its numbers are"),
        (good.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 2, 1)), "has the format 2, 16 bits"),
        (good.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 0)), "0 channels"),
        (good.replace(struct.pack("<I", 8000), struct.pack("<I", 0)), "0 Hz"),
    ):
        file.write_bytes(data)
        with pytest.raises(lapilli.InvalidFileError, match=said):
            read_wav(file)
    file.write_bytes(good)
    assert len(read_wav(file)[0]) == 0


def test_arrays_are_checked() -> None:
    good = np.zeros(4, np.float32)
    for sound, rate, said in (
        (good[None], RATE, r"an array \(1, 4\) of float32"),
        (good.astype(np.int16), RATE, "of int16"),
        (good * np.nan, RATE, "finite floats"),
        (good, None, "rate is None"),
        (good, 10, "rate is 10"),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=said):
            checked(sound, rate)


def test_long_sounds_are_cut_where_it_is_quiet() -> None:
    sound = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    quiet = (27_000, 55_000, 81_000)
    for place in quiet:
        sound[place - 400 : place + 400] = 0
    found = windows(sound, 30_000)
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]] and found[0][0] == 0 and found[-1][1] == len(sound)
    assert all(b - a <= 30_000 for a, b in found)
    assert all(abs(cut - place) < 600 for (_, cut), place in zip(found, quiet, strict=False))
    assert windows(sound[:30_000], 30_000) == [(0, 30_000)]
