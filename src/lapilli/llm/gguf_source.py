"""GGUF files: blocks stay as they are, numbers are mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapilli.errors import CompileError, InvalidFileError
from lapilli.llm import blocks
from lapilli.llm.blocks import BlockedMatrix
from lapilli.llm.decoder import Shape
from lapilli.llm.gguf_tokenizer import text_of
from lapilli.llm.packages import need
from lapilli.llm.source import ARCHITECTURES, Source, check_layers, reading

_CENTRED, _UNGATED, _TANH = ("phi2", "starcoder2", "stablelm"), ("phi2", "starcoder2"), ("gemma", "phi2", "starcoder2")
_INTERLEAVED = ("llama", "granite")
"""Their files have the two halves of each head's queries and keys interleaved."""
_MEAN = 1
"""llama.cpp's number of the mean over tokens."""


def read_gguf(path: Path) -> Source:
    """The model in a GGUF file.

    Raises:
        InvalidFileError: it is no GGUF file, or damaged.
        CompileError: its architecture, its tokenizer or the type of a tensor is not one of those that are taken.
        LapilliError: the package gguf or tokenizers is missing.
        OSError: it cannot be read.
    """
    package = need("gguf", "A GGUF file")
    with reading(path):
        try:
            reader = package.GGUFReader(os.fspath(path))
        except OSError:
            raise
        except Exception as error:  # of what it stumbles over
            raise InvalidFileError(
                f"{path} is no whole GGUF file: it ends too early or is damaged ({str(error)[:100]}). It has {path.stat().st_size} "
                "bytes; compare that, and get it again."
            ) from error
        fields = {name: field.contents() for name, field in reader.fields.items()}
        kind = fields.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise CompileError(f"The architecture of {path} is {kind!r}; taken are {', '.join(ARCHITECTURES)}.")
        tensors: dict[str, Any] = {t.name: _tensor(t) for t in reader.tensors}
        shape = _shape(kind, fields, tensors)
        check_layers(path, f"{kind}.block_count", shape.layers, tensors)
        if scale := fields.get(f"{kind}.logit_scale"):  # what logits are divided by
            tensors["output_norm.weight"] = tensors["output_norm.weight"].float() / float(scale)
        name = str(fields.get("general.name") or path.stem)
        source = Source(name, shape, arranged(kind, shape, tensors), text_of(fields))
        if fields.get(f"{kind}.pooling_type") == _MEAN:
            source.pooling = "mean"
    source.check()
    return source


def _tensor(given: Any) -> BlockedMatrix | torch.Tensor:
    kind = given.tensor_type.name
    if kind in ("F32", "F16", "F64"):
        return torch.from_numpy(_writeable(given.data))
    if kind == "BF16":
        bits = torch.from_numpy(_writeable(given.data).view(np.int16))
        return bits.view(torch.bfloat16).reshape(*given.shape[::-1].tolist())
    if kind not in blocks.NAMES:
        raise CompileError(
            f"Tensor {given.name} is of type {kind}; taken are F32, F16, BF16, {', '.join(blocks.NAMES)}. Quantize the model to "
            "one of these."
        )
    return blocks.of_gguf(np.asarray(given.data).reshape(-1, given.data.shape[-1]), kind)


def _writeable(data: Any) -> Any:
    """The file's bytes for torch, which has no tensors that cannot be written: nobody writes."""
    array = np.asarray(data)
    array = array.view()
    try:
        array.flags.writeable = True
    except ValueError:
        array = array.copy()
    return array


def _shape(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Shape:
    def of(name: str, otherwise: Any = None) -> Any:
        found = fields.get(f"{kind}.{name}", otherwise)
        if found is None:
            raise KeyError(f"{kind}.{name}")
        return found

    width, heads = int(of("embedding_length")), int(of("attention.head_count"))
    size = int(of("attention.key_length", width // heads))
    context = int(of("context_length"))
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    factors, attention = None, 1.0
    if scaling == "linear":
        factors = (float(of("rope.scaling.factor")),) * (int(of("rope.dimension_count", size)) // 2)
    elif scaling == "longrope" or (scaling == "none" and "rope_factors_short.weight" in tensors):
        # Factors for short texts: the context is that of the original model.
        factors = tuple(tensors["rope_factors_short.weight"].tolist())
        attention = float(of("rope.scaling.attn_factor", 1.0))
        context = int(of("rope.scaling.original_context_length", context))
    elif scaling != "none":
        raise CompileError(
            f"Positions are scaled as {scaling!r}; taken are 'linear', Llama 3's, and 'longrope' (for short texts)."
        )
    if "rope_freqs.weight" in tensors:
        factors = tuple(tensors["rope_freqs.weight"].tolist())
    embedding, centred = tensors["token_embd.weight"], kind in _CENTRED
    # Files of StableLM say use_parallel_residual of models that have a norm for it, too.
    parallel = kind == "phi2" or (kind == "stablelm" and "blk.0.ffn_norm.weight" not in tensors)
    return Shape(
        words=embedding.rows if isinstance(embedding, BlockedMatrix) else int(embedding.shape[0]), width=width,
        layers=int(of("block_count")),
        heads=heads, groups=int(of("attention.head_count_kv", heads)), size=size, inner=int(of("feed_forward_length")),
        eps=float(of(f"attention.layer_norm_{'' if centred else 'rms_'}epsilon")), base=float(of("rope.freq_base", 10000.0)),
        context=context,
        rotated=int(of("rope.dimension_count", size)), activation="gelu_tanh" if kind in _TANH else "silu",
        embedding_scale=width**0.5 if kind == "gemma" else float(of("embedding_scale", 0.0)) or 1.0,
        score_scale=float(of("attention.scale", 0.0)) or None, residual_scale=float(of("residual_scale", 0.0)) or 1.0,
        factors=factors, attention_factor=attention,
        window=int(fields[f"{kind}.attention.sliding_window"]) if fields.get(f"{kind}.attention.sliding_window") else None,
        centred=centred, gated=kind not in _UNGATED, parallel=parallel,
    )  # fmt: skip


def arranged(kind: str, shape: Shape, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors as `Decoder` takes them: rows that are rotated together half a head apart, and products that are stored as one taken
    apart.
    """
    found = dict(tensors)
    for k in range(shape.layers):
        of = f"blk.{k}."
        if kind in _INTERLEAVED:
            for name, heads in (("attn_q", shape.heads), ("attn_k", shape.groups)):
                rows = np.arange(heads * shape.size).reshape(heads, shape.size // 2, 2).swapaxes(1, 2).reshape(-1)
                for part in ("weight", "bias"):
                    if f"{of}{name}.{part}" in found:
                        found[f"{of}{name}.{part}"] = take(found[f"{of}{name}.{part}"], rows)
        if f"{of}attn_qkv.weight" in found:
            q, kv = shape.heads * shape.size, shape.groups * shape.size
            for part in ("weight", "bias"):
                whole = found.pop(f"{of}attn_qkv.{part}", None)
                if whole is None:
                    continue
                for name, start, count in (("attn_q", 0, q), ("attn_k", q, kv), ("attn_v", q + kv, kv)):
                    found[f"{of}{name}.{part}"] = take(whole, slice(start, start + count))
        if shape.gated and f"{of}ffn_gate.weight" not in found:
            whole = found[f"{of}ffn_up.weight"]
            found[f"{of}ffn_gate.weight"] = take(whole, slice(0, shape.inner))
            found[f"{of}ffn_up.weight"] = take(whole, slice(shape.inner, 2 * shape.inner))
    return found


def take(value: Any, rows: Any) -> Any:
    """Some rows of a weight."""
    return value.take(rows) if isinstance(value, BlockedMatrix) else value[rows]
