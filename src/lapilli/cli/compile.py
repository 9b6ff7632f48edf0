"""`lapilli compile`: from an exported model to a program."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from lapilli.cli.common import console, duration, print_json, progress_console, size
from lapilli.errors import InvalidInputError


@click.command("compile")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: MODEL with .lap.")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@click.option("--target", metavar="INDEX|NAME", help="Compile for this device only. Default: plans for every kind.")
@click.option("--metadata", "pairs", metavar="KEY=VALUE", multiple=True, help="Kept in the file; VALUE may be @FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compile_(
    model: Path, output: Path | None, precision: str, target: str | None, pairs: tuple[str, ...], as_json: bool
) -> None:
    """Compile MODEL (a .pt2 file of torch.export) to a program. Needs `pip install lapilli[compile]`."""
    output = output or model.with_suffix(".lap")
    if output.resolve() == model.resolve():
        raise InvalidInputError(f"The output {output} would replace the model; name another file with -o.")
    metadata = dict(_pair(pair) for pair in pairs)
    import lapilli

    start = time.perf_counter()
    with progress_console().status(f"compiling {model.name}"):
        program = lapilli.compile(
            model, precision="fp16" if precision == "fp16" else "fp32", target=target, metadata=metadata
        )
        program.save(output)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"output": str(output), "bytes": output.stat().st_size, "seconds": seconds, "plan": program.plan})
        return
    console().print(f"{output}: {size(output.stat().st_size)} in {duration(seconds)}, plan {program.plan}")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInputError(f"--metadata {text!r} is not KEY=VALUE.")
    if value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"--metadata {key}: {value[1:]} cannot be read: {error}") from error
    if key in ("labels", "preprocess"):
        try:
            json.loads(value)
        except ValueError as error:
            raise InvalidInputError(f"--metadata {key} must be JSON: {error}.") from error
    return key, value
