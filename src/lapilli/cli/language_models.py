"""What `lapilli generate`, `chat`, `serve`, `perplexity` and `transcribe` have in common: their options, and loading a model with
a word on progress.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from lapilli.cli.common import device_option, progress_bar, progress_console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lapilli.llm import LLM, AnswerStream

F = TypeVar("F", bound=Callable[..., Any])


QUANTIZE = click.option(
    "--quantize", type=click.Choice(["int8", "int4"]), help="Weights that are numbers become codes."
)


def source_options(command: F) -> F:
    """How a language model is compiled, besides the precision."""
    for option in (
        click.option("--context", type=int, metavar="N", help="Room for so many tokens; default: the model's own, at most 4096."),
        QUANTIZE,
        click.option("--sequences", type=int, metavar="N", help="Answers that are written in one step."),
        click.option("--cache", type=int, metavar="N", help="Room for so many tokens of all sequences; default: for all."),
    ):  # fmt: skip
        command = option(command)
    return command


MODEL = click.argument("model", type=click.Path(exists=True, path_type=Path))
PRECISION = click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)


def model_options(command: F) -> F:
    """MODEL, and how it is compiled."""
    return device_option(source_options(PRECISION(MODEL(command))))


def answer_options(command: F) -> F:
    """How answers are written."""
    for option in (
        click.option("--max-tokens", type=int, metavar="N", help="Default: until the model ends, or the context is full."),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token each time."),
        click.option("--top-k", type=int, default=0, help="Draw from so many of the likeliest tokens; 0: all."),
        click.option("--top-p", type=float, default=1.0, help="Draw from those that have this probability together."),
        click.option("--min-p", type=float, default=0.0, help="Draw from those at least this much as likely as the likeliest."),
        click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: tokens that were there are less likely."),
        click.option("--stop", multiple=True, metavar="TEXT", help="The answer ends before this text; may be given several times."),
        click.option("--seed", type=int, help="Of the draws; default: another one each time."),
    ):  # fmt: skip
        command = option(command)
    return command


@contextmanager
def opened(
    model: Path,
    device: str | None,
    context: int | None,
    precision: Literal["fp32", "fp16"],
    quantize: Literal["int8", "int4"] | None,
    sequences: int | None,
    cache: int | None,
    usual: int = 1,
) -> Iterator[LLM]:
    """The model named on a command line. usual: how many sequences it is compiled for, if that is not said."""
    from lapilli.llm import LLM

    if sequences is None:
        sequences = 1 if model.suffix == ".lap" else usual
    with talking(model) as talk:
        loaded = LLM(
            model,
            device=device,
            context=context,
            precision=precision,
            quantize=quantize,
            sequences=sequences,
            cache=cache,
            **talk,
        )
    with loaded:
        yield loaded


@contextmanager
def talking(model: Path) -> Iterator[dict[str, Any]]:
    """How a model that is loaded inside tells what it does: its arguments `progress` and `say`."""
    out = progress_console()
    with progress_bar() as bar:
        task = bar.add_task(f"Loading {model.name}", total=None)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"Compiling {stage}", completed=done, total=total)

        def say(sentence: str) -> None:
            out.print(sentence, highlight=False, markup=False)

        yield {"progress": progress, "say": say}


def show(stream: AnswerStream) -> str:
    """Prints an answer while it is written, and then how fast that was (on stderr). Ctrl+C ends it. Returns its text."""
    import time

    from lapilli.names import printable

    start, first = time.perf_counter(), 0.0
    try:
        for piece in stream:
            first = first or time.perf_counter()
            click.echo(printable(piece, keep="\n\t"), nl=False)
    except KeyboardInterrupt:
        stream.cancel()
    end, count = time.perf_counter(), len(stream.answer.tokens)
    click.echo()
    if count > 1 and first:
        rate = (count - 1) / max(end - first, 1e-9)
        note = (
            f"{stream.answer.prompt_tokens} tokens read in {first - start:.2f} s, {count} written, {rate:.1f} tokens/s"
        )
        progress_console().print(note, style="dim", highlight=False)
    return stream.answer.text
