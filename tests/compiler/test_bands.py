"""Bands of depthwise convolutions that take in the 1x1 convolution before them: what the kernel relies on, for many sizes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lapilli.codegen.expanded import _MOST_SUMS, bands
from lapilli.ir.dtype import DType
from lapilli.ir.integer import as_int
from lapilli.ir.node import Input
from lapilli.schedule.contraction import ConvolutionView, Operand
from lapilli.target import TARGETS

TARGET = TARGETS["gpu-fp16-matrix"]


def view(
    n: int, c: int, h: int, w: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> ConvolutionView:
    sizes = zip((h, w), padding, kernel, stride, strict=True)
    out_h, out_w = ((size + 2 * p - k) // s + 1 for size, p, k, s in sizes)
    node = Input(tuple(map(as_int, (n, c, h, w))), DType.float16, "x")
    x = Operand(node, as_int(0), tuple(map(as_int, (h * w * c, 1, w * c, c))))
    images, rows, columns, channels = map(as_int, (n, h, w, c))
    out = as_int(out_h), as_int(out_w)
    return ConvolutionView(
        images, channels, rows, columns, channels, *out, kernel, stride, padding, (1, 1), c, x, node
    )  # fmt: skip


def cases() -> list[tuple[ConvolutionView, int, int]]:
    r = random.Random(5)
    made: list[tuple[ConvolutionView, int, int]] = []
    while len(made) < 400:
        kernel = r.choice(((3, 3), (5, 5), (1, 3), (3, 1)))
        h, w = r.randint(1, 120), r.randint(1, 120)
        padding = kernel[0] // 2, kernel[1] // 2
        stride = r.choice((1, 2)), r.choice((1, 2))
        v = view(r.choice((1, 1, 2, 8)), 16 * r.randint(1, 64), h, w, kernel, stride, padding)
        made.append((v, 8 * r.randint(1, 40), r.choice((32768, 49152))))
    return made


def test_bands_cover_the_image_and_fit() -> None:
    found_any = 0
    for v, read, shared in cases():
        target = replace(TARGET, shared_memory=shared)
        found = bands(v, read, target, 9.0)
        found_any += bool(found)
        n, c, h, w, out_h = (i.value or 0 for i in (v.n, v.channels, v.h, v.w, v.out_h))
        for band in found:
            assert band.shared <= shared and c % band.channels == 0 and 1 <= band.depth <= band.steps
            assert 16 * band.steps >= read > 16 * (band.steps - 1)
            assert band.sums <= _MOST_SUMS
            count = -(-out_h // band.rows)
            assert n * (c // band.channels) * count <= target.compute_units
            for k in range(count):  # the pixels that a band reads have room
                top = k * band.rows * v.stride[0] - v.padding[0]
                rows = min(top + (band.rows - 1) * v.stride[0] + v.kernel[0], h) - max(top, 0)
                assert rows * w <= 16 * band.fragments
    assert found_any > 50


def test_what_is_too_long_or_too_large_is_left_alone() -> None:
    v = view(1, 96, 14, 14, (3, 3), (1, 1), (1, 1))
    assert bands(v, 64, TARGET, 9.0)
    assert not bands(v, 4096, TARGET, 9.0), "all steps of the sum are written out"
    assert not bands(v, 64, replace(TARGET, invocations=128), 9.0)
    assert not bands(v, 64, TARGET, 4.0), "two kernels are faster"
    assert not bands(view(0, 96, 14, 14, (3, 3), (1, 1), (1, 1)), 64, replace(TARGET, compute_units=0), 4.0)


@pytest.mark.parametrize("units", [16, 60, 132])
def test_no_cliff_between_neighbours(units: int) -> None:
    """One more row and column changes the expected time by a little, wherever there are bands at all."""
    target = replace(TARGET, compute_units=units)
    v = [view(1, 96, side, side, (3, 3), (1, 1), (1, 1)) for side in range(4, 41)]
    times = [found[0].time(i.out_w.value or 0) if (found := bands(i, 24, target, 100.0)) else None for i in v]
    known = [t for t in times if t is not None]
    assert known and times[: len(known)] == known, "one size has bands, and the next one has none"
    assert all(abs(a - b) < 1.5 for a, b in itertools.pairwise(known)), known
