"""`lapilli serve`: a language model over HTTP, as OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lapilli.cli.common import progress_console
from lapilli.cli.language_models import model_options, opened

_SEQUENCES = 4


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--api-key", envvar="LAPILLI_API_KEY", metavar="KEY", help="What clients must send; also LAPILLI_API_KEY."
)
@click.option(
    "--allow-name",
    multiple=True,
    metavar="HOST",
    help="Names under which the server may be reached, besides localhost; `*`: any.",
)
@click.option("--max-body", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="Bytes of a request.")
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=16, show_default=True, help="Requests that are answered or wait."
)
@click.option("--max-seconds", type=click.FloatRange(min=0.1), default=600.0, show_default=True, help="Of an answer.")
def serve(
    model: Path, device: str | None, context: int | None, precision: Any, quantize: Any,
    sequences: int | None, cache: int | None, host: str, port: int, api_key: str | None, allow_name: tuple[str, ...], max_body: int,
    max_queue: int, max_seconds: float,
) -> None:  # fmt: skip
    """Serves /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /metrics and /health.

    MODEL is a GGUF file, a Hugging Face folder, or a .lap file that was saved from one. The first two are compiled for 4 sequences,
    unless --sequences says otherwise. Nothing listens beyond this machine unless --host says so; then give an API key.
    """
    from lapilli.llm.packages import need

    uvicorn = need("uvicorn", "lapilli serve", "serve")
    need("starlette", "lapilli serve", "serve")
    from lapilli.llm.server import LOCAL, ServerLimits, application

    local = host in ("127.0.0.1", "localhost", "::1")
    hosts = (*LOCAL, *allow_name) if local or allow_name else ("*",)
    with opened(model, device, context, precision, quantize, sequences, cache, _SEQUENCES) as lm:
        out = progress_console()
        out.print(f"{lm.name} at http://{host}:{port}/v1", highlight=False, markup=False)
        if not local and not api_key:
            click.secho(
                "Anybody who reaches this address can use it: give --api-key.", err=True, fg="yellow", bold=True
            )
        app = application(lm, api_key=api_key, limits=ServerLimits(max_body, max_queue, max_seconds), hosts=hosts)
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_keep_alive=5)
