"""`lapilli transcribe`: what is said in a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lapilli.cli.common import OUTPUT, device_option, json_option, make_folder, print_json
from lapilli.cli.language_models import MODEL, PRECISION, QUANTIZE, talking
from lapilli.names import printable


@click.command()
@MODEL
@click.argument("audio", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@device_option
@PRECISION
@QUANTIZE
@click.option("--language", metavar="CODE", help="Such as en; default: the likeliest one.")
@click.option(
    "--task", type=click.Choice(["transcribe", "translate"]), default="transcribe", help="translate: to English."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token each time.")
@click.option("--times", is_flag=True, help="A line for each part, with its beginning and end.")
@click.option("--phrases", is_flag=True, help="The same for each phrase of a part, as the model cuts them.")
@click.option("--words", is_flag=True, help="The same for each word.")
@click.option("-o", "--output", type=OUTPUT, help="Save the compiled model as this file, too.")
@json_option
def transcribe(
    model: Path,
    audio: Path,
    device: str | None,
    precision: Any,
    quantize: Any,
    language: str | None,
    task: str,
    temperature: float,
    times: bool,
    phrases: bool,
    words: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Writes what is said in AUDIO, a WAV file, a part of at most 30 seconds at a time.

    MODEL is a Whisper model: a folder of Hugging Face's or CTranslate2's, or a .lap file that was saved from one.
    """
    from lapilli.llm import Transcriber

    with talking(model) as talk:
        loaded = Transcriber(model, device=device, precision=precision, quantize=quantize, **talk)
    with loaded as listener:
        if output is not None:
            make_folder(output)
            listener.save(output)
        parts = listener.passages(
            audio, language=language, task=task, temperature=temperature, times=phrases, words=words
        )
        pieces = (
            (part, piece) for part in parts for piece in (part.words if words else part.phrases if phrases else (part,))
        )
        if as_json:
            print_json(
                [{"start": p.start, "end": p.end, "language": part.language, "text": p.text} for part, p in pieces]
            )
            return
        for _, piece in pieces:
            line = printable(piece.text, keep="\n\t")
            click.echo(f"[{piece.start:.2f} - {piece.end:.2f}] {line}" if times or phrases or words else line)
