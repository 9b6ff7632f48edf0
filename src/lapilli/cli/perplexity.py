"""`lapilli perplexity`: how likely a language model finds a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lapilli.cli.common import json_option, print_json, working
from lapilli.cli.language_models import model_options, opened
from lapilli.runtime import notice


@click.command()
@model_options
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--window",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens that are read together; default: the whole context.",
)
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Read so many tokens of the file alone.")
@json_option
def perplexity(
    model: Path,
    file: Path,
    device: str | None,
    context: int | None,
    precision: Any,
    quantize: Any,
    sequences: int | None,
    cache: int | None,
    window: int | None,
    tokens: int | None,
    as_json: bool,
) -> None:
    """Prints the perplexity of the text in FILE: e to the power of minus the mean logarithm of a token's probability.

    Texts longer than the window are read in parts, whose first tokens are not counted. MODEL is a GGUF file, a Hugging Face folder,
    or a .lap file that was saved from one.
    """
    import numpy as np

    text = file.read_text(encoding="utf-8")
    with opened(model, device, context, precision, quantize, sequences, cache) as lm:
        with working(f"Reading {file.name}"), notice.silenced():
            scores = lm.score(lm.tokens(text)[:tokens], window=window)
        found = float(np.exp(-scores.mean()))
        if as_json:
            print_json({"perplexity": found, "tokens": len(scores), "model": lm.name, "device": lm.program.device.name})
        else:
            click.echo(f"{found:.6f}, the mean over {len(scores)} tokens")
