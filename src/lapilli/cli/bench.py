"""`lapilli bench`: times of runs and of loading, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lapilli.cli.common import (
    PROGRAM,
    console,
    device_option,
    dims_option,
    duration,
    json_option,
    load,
    peak_memory,
    print_json,
    progress_bar,
    random_inputs,
    rows,
    shapes,
    size,
    trust_options,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lapilli.runtime.program import Program


@dataclass(frozen=True)
class Measurement:
    """The results, in seconds and bytes."""

    program: str
    device: str
    plan: str
    inputs: list[list[int]]
    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    mean_s: float
    microseconds_per_iter: float
    iters_per_second: float
    load_s: float
    load_parts_s: dict[str, float]
    first_run_s: float
    device_memory: dict[str, int]
    peak_rss: int
    peak_rss_before_load: int


@click.command()
@click.argument("program", type=PROGRAM)
@click.option("--warmup", default=10, show_default=True, type=click.IntRange(min=0), help="Runs before timing starts.")
@click.option("--iter", "iterations", default=50, show_default=True, type=click.IntRange(min=1), help="Runs to time.")
@device_option
@trust_options
@dims_option
@json_option
def bench(
    program: Path,
    warmup: int,
    iterations: int,
    device: str | None,
    key: Path | None,
    allow_host: tuple[str, ...],
    input_dims: str | None,
    input_type: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Time PROGRAM on random inputs: wall-clock time from NumPy arrays to NumPy arrays, including upload and download."""
    before = peak_memory()
    start = time.perf_counter()
    with load(program, device, key, allow_host) as loaded:
        load_s = time.perf_counter() - start
        inputs = random_inputs(loaded.inputs, input_dims, input_type, seed)
        start = time.perf_counter()
        loaded.run_flat(inputs, bits=True)
        first_run_s = time.perf_counter() - start
        say: Callable[[str], object] = (lambda line: None) if as_json else click.echo
        say("Starting benchmark.")
        times = sorted(_times(loaded, inputs, warmup, iterations, say))
        mean = statistics.fmean(times)
        result = Measurement(
            program=str(program),
            device=loaded.device.name,
            plan=loaded.plan,
            inputs=[list(array.shape) for array in inputs],
            iterations=iterations,
            median_s=statistics.median(times),
            p95_s=times[round(0.95 * (len(times) - 1))],
            min_s=times[0],
            mean_s=mean,
            microseconds_per_iter=mean * 1e6,
            iters_per_second=1 / mean,
            load_s=load_s,
            load_parts_s={part: ns * 1e-9 for part, ns in asdict(loaded.load_times()).items()},
            first_run_s=first_run_s,
            device_memory=asdict(loaded.memory()),
            peak_rss=peak_memory(),
            peak_rss_before_load=before,
        )
    if as_json:
        print_json(asdict(result))
    else:
        _print(result, shapes(inputs))


def _times(
    program: Program, inputs: list[NDArray[Any]], warmup: int, iterations: int, say: Callable[[str], object]
) -> list[float]:
    """Seconds of every run after the warm-up; the progress bar moves between runs, outside the measured time. say: prints the lines
    of PyTorch's own benchmark tool."""
    times = []
    say("Running warmup runs.")
    with progress_bar() as progress:
        task = progress.add_task("warming up", total=warmup + iterations)
        for i in range(warmup + iterations):
            if i == warmup:
                say("Main runs.")
            start = time.perf_counter()
            program.run_flat(inputs, bits=True)
            times.append(time.perf_counter() - start)
            progress.update(task, advance=1, description="running" if i >= warmup else "warming up")
    return times[warmup:]


def _print(result: Measurement, inputs: str) -> None:
    memory = result.device_memory
    parts = ", ".join(f"{part} {duration(s)}" for part, s in result.load_parts_s.items() if part != "total")
    shares = (
        f"constants {size(memory['constants'])}, arena {size(memory['arena'])}, without sharing "
        f"{size(memory['arena_sum'])}, inputs and outputs {size(memory['io'])}"
    )
    grown = result.peak_rss - result.peak_rss_before_load
    rows(
        [
            ("program", f"{result.program}, input {inputs}"),
            ("device", f"{result.device}, plan {result.plan}"),
            ("median", duration(result.median_s)),
            ("p95", duration(result.p95_s)),
            ("min", duration(result.min_s)),
            ("load", f"{duration(result.load_s)}  ({parts})"),
            ("first run", duration(result.first_run_s)),
            ("device memory", f"{size(memory['device_total'])}  ({shares})"),
            ("peak RSS", f"{size(result.peak_rss)}  (+{size(grown)} for loading and runs)"),
        ]
    )
    out = console()
    out.print(
        f"\nMain run finished. Microseconds per iter: {result.microseconds_per_iter:.1f}. "
        f"Iters per second: {result.iters_per_second:.2f}"
    )
