"""CTranslate2's model.bin of a Whisper model, as faster-whisper has them: names, shapes and numbers one after the other."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapilli.errors import CompileError, InvalidFileError

_VERSION = 6
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_LAYER = {
    "self_attention/layer_norm": "attn_norm", "attention/layer_norm": "cross_attn_norm", "ffn/layer_norm": "ffn_norm",
    "self_attention/linear_1": "attn_o", "attention/linear_0": "cross_attn_q", "attention/linear_2": "cross_attn_o",
    "ffn/linear_0": "ffn_up", "ffn/linear_1": "ffn_down",
}  # fmt: skip
_JOINED = {"self_attention/linear_0": ("attn_", "qkv"), "attention/linear_1": ("cross_attn_", "kv")}
_WHOLE = {
    "decoder/embeddings/weight": "token_embd.weight", "encoder/position_encodings/encodings": "enc.positions",
    "decoder/position_encodings/encodings": "dec.positions", "encoder/layer_norm/gamma": "enc.output_norm.weight",
    "encoder/layer_norm/beta": "enc.output_norm.bias", "decoder/layer_norm/gamma": "dec.output_norm.weight",
    "decoder/layer_norm/beta": "dec.output_norm.bias",
    **{f"encoder/conv{n}/{part}": f"conv{n}.{part}" for n in (1, 2) for part in ("weight", "bias")},
}  # fmt: skip
_PARTS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


class _Bytes:
    """Reads numbers and names one after the other. Raises InvalidFileError at an early end."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.at = path, np.memmap(path, np.uint8, "r"), 0

    def take(self, count: int) -> bytes:
        return bytes(self.part(count))

    def part(self, count: int) -> Any:
        if count > len(self.data) - self.at:
            raise InvalidFileError(f"{self.path} ends in the middle of a tensor.")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        found: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return found

    def name(self) -> str:
        return self.take(self.number("H")).rstrip(b"\0").decode()


def whisper_tensors(path: Path) -> tuple[int, dict[str, Any]]:
    """How many heads attention has, and the tensors as `EncoderDecoder` takes them.

    Raises:
        InvalidFileError: the file is damaged.
        CompileError: it is of another version or model, or its numbers are of a type that is not taken.
        OSError: it cannot be read.
    """
    found: dict[str, Any] = {}
    heads = 0
    for name, value in _variables(path):
        part, _, rest = name.partition("/")
        stem, _, kind = rest.rpartition("/")
        if name in _WHOLE:
            found[_WHOLE[name]] = _numbers(name, value)
        elif rest == "num_heads":
            heads = int(value)
        elif rest == "alignment_heads" or value.ndim == 0:
            continue  # settings
        elif part in ("encoder", "decoder") and rest.startswith("layer_") and kind in _PARTS:
            layer, _, inner = stem.removeprefix("layer_").partition("/")
            prefix, numbers = f"{part[:3]}.blk.{int(layer)}.", _numbers(name, value)
            if inner in _LAYER:
                found[f"{prefix}{_LAYER[inner]}.{_PARTS[kind]}"] = numbers
            elif inner in _JOINED:
                to, letters = _JOINED[inner]
                for letter, piece in zip(letters, numbers.chunk(len(letters)), strict=True):
                    if kind == "bias" and letter == "k" and not piece.any():
                        continue  # keys have none
                    found[f"{prefix}{to}{letter}.{kind}"] = piece
            else:
                raise CompileError(f"{path} has a tensor {name}, which Whisper models do not have.")
        else:
            raise CompileError(f"{path} has a tensor {name}, which Whisper models without codes do not have.")
    if heads < 1:
        raise InvalidFileError(f"{path} does not say how many heads attention has.")
    return heads, found


def _numbers(name: str, value: Any) -> Any:
    if value.dtype not in (np.float32, np.float16):
        raise CompileError(
            f"{name} is of {value.dtype}; taken are float32 and float16: convert the model with quantization='float16'."
        )
    return torch.from_numpy(value)


def _variables(path: Path) -> Iterator[tuple[str, Any]]:
    read = _Bytes(path)
    version = read.number("I")
    kind = read.name() if version == _VERSION else ""
    if version != _VERSION or kind != "WhisperSpec":
        raise CompileError(f"{path} is of version {version}, {kind!r}; taken is {_VERSION}, 'WhisperSpec'.")
    read.number("I")  # revision
    for _ in range(read.number("I")):
        name, rank = read.name(), read.number("B")
        shape = [read.number("I") for _ in range(rank)]
        code, size = read.number("B"), read.number("I")
        if code not in _TYPES:
            raise CompileError(f"{name} is of the type number {code}; taken are {sorted(_TYPES)}.")
        value = np.frombuffer(bytearray(read.part(size)), _TYPES[code])  # which may be written to
        if value.size != int(np.prod(shape, dtype=object)):
            raise InvalidFileError(f"{path} is damaged: {name} has {value.size} numbers, and its shape is {shape}.")
        yield name, value.reshape(shape)
