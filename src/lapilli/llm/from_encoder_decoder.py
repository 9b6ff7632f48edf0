"""From a source with an encoder and a decoder to the bytes of a program, as `from_source` does it for language models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError
from lapilli.llm.about import About
from lapilli.llm.about_encoder import MOST_PLACES, AboutEncoder
from lapilli.llm.encoder_decoder import EncoderDecoder
from lapilli.llm.encoder_decoder_source import EncoderDecoderSource, read_speech_folder, read_text_folder
from lapilli.llm.from_source import Precision, Quantize, check_sequences, kept
from lapilli.llm.token_methods import encoder_decoder_methods

_USUAL = 512
"""Tokens that the decoder, and the encoder, have room for, where the model has no number of its own."""


def compile_text_folder(path: Path, **options: Any) -> bytes:
    """The program of the text-to-text model in a folder; options: as for `build_encoder_decoder`."""
    return build_encoder_decoder(read_text_folder(path), **options)


def compile_speech_folder(path: Path, **options: Any) -> bytes:
    """The program of the Whisper model in a folder; options: as for `build_encoder_decoder`."""
    return build_encoder_decoder(read_speech_folder(path), **options)


def build_encoder_decoder(
    source: EncoderDecoderSource,
    context: int | None = None,
    places: int | None = None,
    precision: Precision = "fp32",
    quantize: Quantize | None = None,
    sequences: int = 1,
    target: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> bytes:
    """The program of a model with an encoder and a decoder.

    Args:
        source: what it is made of.
        context: how many tokens of an answer there is room for; None: as many as the model was made for, or 512.
        places: how many tokens of what is given there is room for; None: as many as the model was made for, or 512.
        precision: as for `lapilli.compile`. In "fp32" weights of float16 stay float16.
        quantize: numbers become codes of so many bits, with a scale for 32 of a row.
        sequences: how many answers are written in one step.
        target: as for `lapilli.compile`.
        progress: as for `lapilli.compile`.
        say: is told what is converted.

    Raises:
        CompileError: an argument is not one of the choices.
    """
    shape = source.shape
    context, places = (_room(n, given, most) for n, given, most in (
        ("context", context, shape.context), ("places", places, shape.places)
    ))  # fmt: skip
    tables = {name: value for name, value in source.tensors.items() if name.endswith(("positions", "rel_b.weight"))}
    weights, tensors = kept({k: v for k, v in source.tensors.items() if k not in tables}, precision, quantize, (), say)
    tensors |= {name: value.float() for name, value in tables.items()}
    cached = torch.float16 if precision == "fp16" else torch.float32
    check_sequences(sequences)
    model = EncoderDecoder(shape, tensors, context, places, cached, sequences)
    about = About(source.name, context, shape.words, sequences)
    encoder = AboutEncoder(
        places, source.start, shape.bins, source.languages, source.tasks, source.untimed, source.latest
    )
    metadata = {**about.metadata(), **encoder.metadata(), **source.text.metadata()}
    return compile_to_bytes(
        encoder_decoder_methods(model, source.untimed), precision=precision, weights=weights, target=target, fallback="error",
        metadata=metadata, progress=progress,
    )  # fmt: skip


def _room(name: str, given: int | None, most: int | None) -> int:
    chosen = (most or _USUAL) if given is None else given
    if not 4 <= chosen <= (most or MOST_PLACES - 1):
        raise CompileError(f"{name} is {given}: choose 4 to {most or MOST_PLACES - 1}")
    return chosen
