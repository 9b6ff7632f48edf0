"""`lapilli chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from lapilli.cli.common import progress_console
from lapilli.cli.language_models import answer_options, model_options, opened, show

if TYPE_CHECKING:
    from lapilli.llm import Choices


@click.command()
@model_options
@answer_options
@click.option("--system", metavar="TEXT", help="What the model is told first.")
def chat(
    model: Path,
    device: str | None,
    context: int | None,
    precision: Any,
    quantize: Any,
    sequences: int | None,
    cache: int | None,
    system: str | None,
    **choices: Unpack[Choices],
) -> None:
    """Answers what is typed, line by line, until the end of the input or an empty line. Ctrl+C ends an answer.

    MODEL is a GGUF file, a Hugging Face folder, or a .lap file that was saved from one.
    """
    messages = [{"role": "system", "content": system}] if system else []
    with opened(model, device, context, precision, quantize, sequences, cache) as lm:
        progress_console().print(f"{lm.name} on {lm.program.device.name}", style="dim", highlight=False, markup=False)
        while (line := _line()) is not None:
            messages.append({"role": "user", "content": line})
            answer = show(lm.generate(messages, stream=True, **choices))
            messages.append({"role": "assistant", "content": answer})


def _line() -> str | None:
    """What is typed; None at the end."""
    try:
        line = click.prompt("", prompt_suffix="> ", default="", show_default=False, err=True)
    except click.Abort:
        return None
    return str(line).strip() or None
