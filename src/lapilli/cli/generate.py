"""`lapilli generate`: text that goes on with a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from lapilli.cli.common import OUTPUT, make_folder
from lapilli.cli.language_models import answer_options, model_options, opened, show

if TYPE_CHECKING:
    from lapilli.llm import Choices


@click.command()
@model_options
@click.argument("prompt")
@answer_options
@click.option("-o", "--output", type=OUTPUT, help="Save the compiled model as this file, too.")
def generate(
    model: Path,
    prompt: str,
    device: str | None,
    context: int | None,
    precision: Any,
    quantize: Any,
    sequences: int | None,
    cache: int | None,
    output: Path | None,
    **choices: Unpack[Choices],
) -> None:
    """Writes what follows PROMPT ("-": standard input).

    MODEL is a GGUF file, a Hugging Face folder, or a .lap file that was saved from one.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    with opened(model, device, context, precision, quantize, sequences, cache) as lm:
        if output is not None:
            make_folder(output)
            lm.save(output)
        show(lm.generate(prompt, stream=True, **choices))
