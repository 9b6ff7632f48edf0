"""From a source to the bytes of a program: tokenizer and template go along in its metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError
from lapilli.llm.about import MOST_SEQUENCES, USUAL_CONTEXT, About
from lapilli.llm.blocks import BlockedMatrix, of_numbers
from lapilli.llm.cache_size import CacheSize
from lapilli.llm.decoder import Decoder
from lapilli.llm.folder_source import read_folder
from lapilli.llm.gguf_source import read_gguf
from lapilli.llm.source import Source
from lapilli.llm.token_methods import methods

Precision = Literal["fp32", "fp16"]
Quantize = Literal["int8", "int4"]


def read(path: Path) -> Source:
    """The model in a GGUF file or a Hugging Face folder; errors as those readers raise them."""
    return read_folder(path) if path.is_dir() else read_gguf(path)


def compile_source(path: str | os.PathLike[str], **options: Any) -> bytes:
    """The program of the model in a GGUF file or a Hugging Face folder; options: as for `build`."""
    return build(read(Path(path)), **options)


def build(
    source: Source,
    context: int | None = None,
    precision: Precision = "fp32",
    quantize: Quantize | None = None,
    sequences: int = 1,
    cache: int | None = None,
    target: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    say: Callable[[str], None] = print,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The program of a language model.

    Args:
        source: what it is made of.
        context: how many tokens a sequence has at most; None: as many as the model was made for, at most `USUAL_CONTEXT`.
        precision: as for `lapilli.compile`. In "fp32" weights of float16 or bfloat16 stay that.
        quantize: numbers become codes of so many bits, with a scale for 32 of a row.
        sequences: how many are written in one step.
        cache: how many tokens of all sequences together there is room for, at least context; None: for all.
        target: as for `lapilli.compile`.
        progress: as for `lapilli.compile`.
        say: is told what is converted.
        metadata: further strings to store.

    Raises:
        CompileError: an argument is not one of the choices.
    """
    most = source.shape.context
    context = min(most, USUAL_CONTEXT) if context is None else context
    if not 4 <= context <= most:
        raise CompileError(f"context is {context}: {source.name} was made for texts of 4 to {most} tokens")
    check_sequences(sequences)
    if not CacheSize(sequences, context, cache).is_enough:
        raise CompileError(
            f"cache is {cache}: choose {context} to {sequences * context} tokens, for {sequences} sequences"
        )
    weights, tensors = kept(source.tensors, precision, quantize, source.notes, say)
    cached = torch.float16 if precision == "fp16" else torch.float32
    model = Decoder(source.shape, tensors, context, cached, sequences, cache)
    about = About(source.name, context, source.shape.words, sequences, source.pooling, cache)
    metadata = {**(metadata or {}), **about.metadata(), **source.text.metadata()}
    return compile_to_bytes(
        methods(model), precision=precision, weights=weights, target=target, fallback="error", metadata=metadata,
        progress=progress,
    )  # fmt: skip


def check_sequences(sequences: int) -> None:
    """Raises CompileError if a program cannot have so many."""
    if not 1 <= sequences <= MOST_SEQUENCES:
        raise CompileError(f"sequences is {sequences}: choose 1 to {MOST_SEQUENCES}")


def kept(
    tensors: Mapping[str, Any],
    precision: Precision,
    quantize: Quantize | None,
    notes: Sequence[str],
    say: Callable[[str], None],
) -> tuple[str, dict[str, Any]]:
    """How a program keeps numbers that are weights, and a source's tensors as models take them; says what is converted.

    Raises:
        CompileError: quantize is not one of the choices.
    """
    if quantize not in (None, "int8", "int4"):
        raise CompileError(f'quantize is {quantize!r}: choose "int8", "int4" or None')
    made = {name: quantized(value, quantize) for name, value in tensors.items()}
    sizes = dict.fromkeys((torch.bfloat16, torch.float16), 0)
    for value in made.values():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.dtype in sizes:
            sizes[value.dtype] += value.numel()
    largest, other = sorted(sizes, key=lambda kind: -sizes[kind])
    said = list(notes)
    matrices = [value for value in tensors.values() if isinstance(value, BlockedMatrix) or value.dim() == 2]
    if quantize is not None and matrices and all(isinstance(value, BlockedMatrix) for value in matrices):
        said.append(f"quantize={quantize!r} changes nothing: all matrices are codes already, and stay as they are.")
    weights: str = precision
    if precision == "fp32" and sizes[largest]:
        weights = "bf16-exact" if largest is torch.bfloat16 else "fp16-exact"
        if sizes[other]:
            name = str(other).removeprefix("torch.")
            said.append(
                f"Weights of type {name} are kept as float32, beside more of the other type of 16 bits; "
                'precision="fp16" or quantize= makes them smaller.'
            )
    for note in said:
        say(note)
    return weights, {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in made.items()}


def quantized(value: Any, quantize: str | None) -> BlockedMatrix | torch.Tensor:
    """A tensor of a source, as `build` takes it: matrices of numbers as codes, if that is asked for."""
    if quantize is None or isinstance(value, BlockedMatrix) or value.dim() != 2:
        found: BlockedMatrix | torch.Tensor = value
        return found
    return of_numbers(value.float().numpy(), 8 if quantize == "int8" else 4)
