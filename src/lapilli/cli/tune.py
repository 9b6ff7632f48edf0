"""`lapilli tune`: compiles a model with the kernels that are fastest on a device, and keeps what was found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lapilli.cli.common import (
    OUTPUT,
    console,
    device_option,
    duration,
    json_option,
    output_file,
    print_json,
    print_table,
    progress_bar,
)
from lapilli.errors import InvalidInputError, LapilliError
from lapilli.runtime.compiler_packages import require_compiler

if TYPE_CHECKING:
    from lapilli.tuning import Choice, Tuned

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("model", required=False, type=_EXISTING)
@click.option("-o", "--output", type=OUTPUT, help="Default: MODEL with .lap.")
@click.option(
    "--input",
    "inputs",
    metavar="INPUT",
    multiple=True,
    help="For TorchScript, as for `lapilli compile`; open sizes are measured as in the example.",
)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@device_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="For measuring; a later run goes on where this one stops. Default: no limit.",
)
@click.option(
    "--export",
    "exported",
    type=OUTPUT,
    help="Write what is known of the device to a file, for machines like this.",
)
@click.option("--import", "imported", type=_EXISTING, help="Add what such a file knows to the cache.")
@json_option
def tune(
    model: Path | None,
    output: Path | None,
    inputs: tuple[str, ...],
    precision: str,
    device: str | None,
    seconds: float | None,
    exported: Path | None,
    imported: Path | None,
    as_json: bool,
) -> None:
    """Compile MODEL as `lapilli compile` does, with the kernels that are fastest on a device.

    The candidates for every matrix product, convolution and attention of the model are checked and timed there. What wins is kept
    in the cache, and used by later compiles. Needs `pip install lapilli[compile]`."""
    if model is None and exported is None and imported is None:
        raise click.UsageError("Name a model to tune, or --export or --import a file.")
    if model is None and output is not None:
        raise click.UsageError("-o names the program of a MODEL, and there is none.")
    said: dict[str, Any] = {}
    if imported is not None:
        said |= _import(imported, as_json)
    if model is not None:
        said |= _tune(model, output or model.with_suffix(".lap"), inputs, precision, device, seconds, as_json)
    if exported is not None:
        said |= _export(exported, device, as_json)
    if as_json:
        print_json(said)


def _tune(
    model: Path,
    output: Path,
    inputs: tuple[str, ...],
    precision: str,
    device: str | None,
    seconds: float | None,
    as_json: bool,
) -> dict[str, Any]:
    if output.resolve() == model.resolve():
        raise InvalidInputError(f"The output {output} would replace the model; name another file with -o.")
    require_compiler()
    from lapilli.capture.examples import example_inputs
    from lapilli.tuning import tune as tune_model

    with progress_bar() as bar:
        task = bar.add_task(f"reading {model.name}", total=None)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        examples, shapes = example_inputs(inputs)
        try:
            data, found = tune_model(
                model,
                examples,
                precision=precision,
                dynamic_shapes=shapes,
                device=device,
                seconds=seconds,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise LapilliError(
                f"Stopped, and {output} is not written. What was measured is kept: the same command goes on, and with --seconds "
                "it ends by itself."
            ) from None
    with output_file(output) as file:
        file.write(data)
    if not as_json:
        _print(found, output)
    return {
        "output": str(output), "device": found.device.name, "driver": found.device.driver, "plan": found.plan,
        "before_s": found.before, "after_s": found.after, "finished": found.finished,
        "choices": [asdict(c) for c in found.choices], "rejected": [asdict(r) for r in found.rejected],
    }  # fmt: skip


def _print(found: Tuned, output: Path) -> None:
    out = console()
    changed = [c for c in found.choices if c.best != c.default]
    if changed:
        print_table(
            out,
            ("task", "without tuning", "fastest", "time", "of it"),
            [(_title(c), c.default, c.best, duration(c.us * 1e-6), f"{c.ratio:.0%}") for c in changed],
            title=f"{found.device.name}, plan {found.plan}",
            numbers=("time", "of it"),
        )
    tried = sum(c.tried - 1 for c in found.choices)
    out.print(
        f"Different tasks: {len(found.choices)}; candidates beside those that are taken without tuning: {tried}; "
        f"tasks that have a faster one: {len(changed)}."
    )
    for r in found.rejected:
        out.print(f"Not used for {r.title}: {r.candidate}: {r.why}")
    if found.before:
        out.print(f"A run on the device: {duration(found.before)} without tuning, {duration(found.after)} now.")
    if not found.finished:
        out.print("There was no time for all candidates: run the same command again to go on.")
    out.print(f"{output}: written")


def _title(c: Choice) -> str:
    return c.title + (f", {c.count} times" if c.count > 1 else "")


def _export(path: Path, device: str | None, as_json: bool) -> dict[str, Any]:
    from lapilli.runtime.devices import device_named
    from lapilli.target.records import Measured
    from lapilli.target.tuned import records_of

    taken = device_named(device)
    records = tuple(records_of(taken))
    if not records:
        raise InvalidInputError(f"Nothing is known of {taken.name} with {taken.driver}: tune a model first.")
    with output_file(path) as file:
        file.write(Measured(taken.name, taken.driver, records).to_text().encode())
    if not as_json:
        console().print(f"{path}: what is known of {taken.name}, {taken.driver} (records: {len(records)})")
    return {"exported": str(path), "records": len(records)}


def _import(path: Path, as_json: bool) -> dict[str, Any]:
    from lapilli.target.tuned import bring

    found = bring(path)
    if not as_json:
        console().print(
            f"What is known of {found.device}, {found.driver} is used from now on (records: {len(found.records)})."
        )
    return {"imported": len(found.records), "device": found.device, "driver": found.driver}
