"""Fourier transforms and complex numbers in programs: on the GPU, for every size, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.graph import fourier


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def check(f: Callable[..., Any], *args: torch.Tensor, cpu: tuple[str, ...] = (), **options: Any) -> Any:
    """The program is within 2e-6 of float64 in norm: eight times the 2.5e-7 that torch's own transforms reach, since short
    transforms are sums of as many products as the size."""
    program = lapilli.compile(Function(f), args, **options)
    assert {o.operator for o in program.report().on_cpu} <= set(cpu)
    compare(program, f, *args)
    return program


def compare(program: Any, f: Callable[..., Any], *args: torch.Tensor) -> None:
    wide = [a.to(torch.complex128 if a.is_complex() else torch.float64) for a in args]
    got, expected = program(*args), f(*wide)
    for g, e in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        assert g.shape == e.shape and g.dtype.is_complex == e.dtype.is_complex
        assert relative(g, e) < 2e-6


@pytest.mark.parametrize("n", [1, 2, 3, 8, 37, 400, 512, 513, 600, 1009, 2018, 2048, 4099, 5000])
def test_transforms_of_any_size(n: int) -> None:
    """Products, two stages, and the convolution for large primes: forward, back, and real."""
    torch.manual_seed(n)
    x, z = torch.randn(2, n), torch.randn(2, n, dtype=torch.complex64)
    half = torch.randn(2, n // 2 + 1, dtype=torch.complex64)
    made = torch.complex(*fourier.real_to_complex(x, [1], 0, True, fourier.table))
    assert relative(made, torch.fft.rfft(x.double())) < 2e-6
    made = torch.complex(*fourier.complex_to_complex((z.real, z.imag), [1], 2, False, fourier.table))
    assert relative(made, torch.fft.ifft(z.to(torch.complex128))) < 2e-6
    made = fourier.complex_to_real((half.real, half.imag), [1], 1, n, fourier.table)
    assert relative(made, torch.fft.irfft(half.to(torch.complex128), n=n, norm="ortho")) < 2e-6


def test_transforms_in_a_program() -> None:
    def f(x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(x)
        return (
            spectrum.real,
            torch.fft.irfft(spectrum * (1 + 2j), n=600),
            torch.fft.fft2(x).abs(),
            torch.fft.ifft(torch.fft.fft(x, dim=-2), dim=0, norm="ortho").imag,
            torch.fft.fftshift(torch.fft.fftn(x)).angle().cos(),
            torch.fft.hfft(spectrum[..., :9]),
        )

    check(f, torch.randn(3, 5, 600))


def test_arithmetic_of_complex_numbers() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b = torch.complex(x, y), torch.polar(y.abs(), x)
        c = a @ b.transpose(-1, -2)
        d = torch.cat([a * b, a / b, a - 2j * b, a.conj() + 1.5, 3 - b], -1)
        return (
            c.real,
            torch.view_as_real(d),
            a.abs(),
            d.angle(),
            a.exp().imag,
            (a**2).real,
            a.sgn().imag,
            d.sum(-1).imag,
        )

    check(f, torch.randn(2, 7, 5), torch.randn(2, 7, 5))


def test_complex_results_are_given_as_such() -> None:
    views = ("aten.view_as_complex.default", "aten.view_as_real.default")
    check(lambda x: torch.fft.rfft(x), torch.randn(4, 64), cpu=views)
    check(lambda z: (torch.fft.ifft(z), z.abs()), torch.randn(4, 64, dtype=torch.complex64), cpu=views)


def test_what_has_no_form_stays_in_torch() -> None:
    """Between the parts that are split; and double precision as a whole."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).acos().abs() * 2

    program = lapilli.compile(Function(f), (torch.randn(4, 64),))
    assert "aten.acos.default" in {o.operator for o in program.report().on_cpu}
    x = torch.randn(4, 64)
    torch.testing.assert_close(program(x), f(x), rtol=1e-4, atol=1e-4)
    double = lapilli.compile(Function(lambda x: torch.fft.rfft(x.double()).abs()), (x,))
    torch.testing.assert_close(double(x), torch.fft.rfft(x.double()).abs())


def test_sizes_that_vary() -> None:
    """Beside the transformed dimension, and the transformed one itself."""

    def f(x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(x)
        return spectrum.abs(), torch.fft.fft(x, dim=1).real, torch.fft.irfft(spectrum, n=64)

    program = check(f, torch.randn(2, 30, 64), dynamic_shapes={"args": ({1: Dim("rows", min=2, max=256)},)})
    for n in (2, 101):
        compare(program, f, torch.randn(2, n, 64))


class Features(nn.Module):
    """A speech front end: log mel spectrogram."""

    def __init__(self, own_window: bool) -> None:
        super().__init__()
        self.own_window = own_window
        self.register_buffer("window", torch.hann_window(400))
        self.register_buffer("mel", torch.rand(201, 80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(400) if self.own_window else self.window.to(x.dtype)
        power = torch.stft(x, 400, 160, window=window.to(x.dtype), return_complex=True).abs() ** 2  # type: ignore[arg-type]
        return (power.transpose(-1, -2) @ self.mel.to(x.dtype)).clamp(min=1e-10).log10()


@pytest.mark.parametrize("own_window", [False, True])
def test_speech_features(own_window: bool) -> None:
    """A window that forward makes is a constant of the program."""
    model, x = Features(own_window), torch.randn(2, 4000)
    program = lapilli.compile(model, (x,))
    assert program.report().segments == ("gpu",)
    assert relative(program(x), model(x.double())) < 1e-5  # beside float32 rounding, that of small powers' logarithms


def test_recordings_of_any_length() -> None:
    """torch.export cannot prove that there are never zero frames; all lengths are tried. Below one frame, it refuses as before."""
    model = Features(False)
    program = lapilli.compile(model, (torch.randn(2, 4000),), dynamic_shapes=({1: Dim("samples", min=800, max=16000)},))
    assert program.report().segments == ("gpu",)
    for samples in (800, 8117):
        x = torch.randn(2, samples)
        assert relative(program(x), model(x.double())) < 1e-5

    def frames(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x.unfold(-1, 400, 160)).abs()

    with pytest.raises(lapilli.CompileError, match="generated guard"):
        lapilli.compile(
            Function(frames), (torch.randn(2, 800),), dynamic_shapes={"args": ({1: Dim("s", min=400, max=900)},)}
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"win_length": 320, "normalized": True}, {"center": False, "onesided": False}, {"length": 3000}],
    ids=str,
)
def test_signals_come_back(options: dict[str, Any]) -> None:
    forward = {k: v for k, v in options.items() if k != "length"}
    width = options.get("win_length", 400)

    def f(x: torch.Tensor) -> torch.Tensor:
        window = torch.hamming_window(width, dtype=x.dtype)
        spectrum = torch.stft(x, 400, 100, window=window, return_complex=True, **forward)
        return torch.istft(spectrum * 0.5, 400, 100, window=window, **options)

    check(f, torch.randn(2, 4000))


def test_gradients_of_transforms() -> None:
    @torch.compile(backend="vulkan")
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 0.5).square().sum() + torch.fft.rfft(x).abs().sum()

    x = torch.randn(4, 64, requires_grad=True)
    f(x).backward()
    assert x.grad is not None
    got, x.grad = x.grad, None
    (torch.fft.irfft(torch.fft.rfft(x) * 0.5).square().sum() + torch.fft.rfft(x).abs().sum()).backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-4)
