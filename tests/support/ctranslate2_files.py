"""CTranslate2's model.bin, as its converter writes it, of a tiny Whisper."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.int32): 3,
          np.dtype(np.float16): 4}  # fmt: skip


def model_bin(variables: Mapping[str, NDArray[Any]]) -> bytes:
    """The file of such tensors."""

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    parts = [struct.pack("<I", 6), name("WhisperSpec"), struct.pack("<I", 3), struct.pack("<I", len(variables))]
    for key, value in variables.items():
        parts += [name(key), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        parts += [struct.pack("<BI", _TYPES[value.dtype], value.nbytes), value.tobytes()]
    return b"".join([*parts, struct.pack("<I", 0)])


def tiny_whisper(words: int, width: int = 8, inner: int = 16, bins: int = 4) -> dict[str, NDArray[Any]]:
    """Its tensors: one layer of each kind, 10 places, 12 tokens of an answer."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> NDArray[Any]:
        return rng.standard_normal(shape).astype(np.float16)

    def norm(prefix: str) -> dict[str, NDArray[Any]]:
        return {f"{prefix}/gamma": some(width), f"{prefix}/beta": some(width)}

    def linear(prefix: str, rows: int, columns: int) -> dict[str, NDArray[Any]]:
        return {f"{prefix}/weight": some(rows, columns), f"{prefix}/bias": some(rows)}

    found = {
        "encoder/conv1/weight": some(width, bins, 3), "encoder/conv1/bias": some(width),
        "encoder/conv2/weight": some(width, width, 3), "encoder/conv2/bias": some(width),
        "encoder/position_encodings/encodings": some(10, width), "decoder/position_encodings/encodings": some(12, width),
        "decoder/embeddings/weight": some(words, width),
    }  # fmt: skip
    for part in ("encoder", "decoder"):
        layer = f"{part}/layer_0"
        found |= norm(f"{part}/layer_norm") | norm(f"{layer}/self_attention/layer_norm")
        found |= norm(f"{layer}/ffn/layer_norm") | linear(f"{layer}/self_attention/linear_0", 3 * width, width)
        found |= linear(f"{layer}/self_attention/linear_1", width, width) | linear(
            f"{layer}/ffn/linear_0", inner, width
        )
        found |= linear(f"{layer}/ffn/linear_1", width, inner)
        found[f"{part}/num_heads"] = np.array(2, np.int16)
    cross = "decoder/layer_0/attention"
    found |= norm(f"{cross}/layer_norm") | linear(f"{cross}/linear_0", width, width)
    return found | linear(f"{cross}/linear_1", 2 * width, width) | linear(f"{cross}/linear_2", width, width)
