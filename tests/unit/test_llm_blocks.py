"""BlockedMatrix of GGUF in the quantized form mean the numbers that the gguf package computes, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from lapilli.llm.blocks import NAMES, of_gguf, of_numbers, pack
from lapilli.llm.decoder import Weight


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.filterwarnings("ignore:invalid value")  # scales of random bits that are no numbers
@pytest.mark.filterwarnings("ignore:overflow")
def test_blocks_mean_what_gguf_says(kind: str) -> None:
    """Random bytes: every code, and scales that are infinite, NaN or denormal."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(1).integers(0, 256, (37, 3 * size), dtype=np.uint8)
    found = of_gguf(raw, kind)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert found.rows == 37 and found.columns == 3 * elements
    np.testing.assert_array_equal(Weight.of(found)().numpy(), wanted)
    assert found.nbytes <= 1.04 * raw.nbytes
    rows = np.array([5, 0, 36])
    np.testing.assert_array_equal(Weight.of(found.take(rows))().numpy(), wanted[rows])
    np.testing.assert_array_equal(Weight.of(found.take(slice(2, 4)))().numpy(), wanted[2:4])


@pytest.mark.parametrize("bits, most", [(8, 1 / 127), (4, 1 / 7)])
def test_numbers_become_codes(bits: int, most: float) -> None:
    """Off by half a step of the group's scale, and by the scale's own rounding to a half."""
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    x[0] = 0
    found = Weight.of(of_numbers(x, bits))().numpy()
    step = np.abs(x.reshape(5, 3, 32)).max(-1, keepdims=True) * most
    assert (np.abs(found - x).reshape(5, 3, 32) <= step * (0.5 + 2**-11 / most) + 1e-7).all()
    assert not found[0].any()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_packing(bits: int) -> None:
    codes = np.random.default_rng(3).integers(0, 1 << bits, (3, 16))
    taken = torch.ops.lapilli.unpack(torch.from_numpy(pack(codes, bits)), -1, 16, bits)
    assert np.array_equal(taken.numpy(), codes - 1)
