"""`lapilli profile`: the time of every kernel, measured by the device's clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lapilli.cli.common import (
    OUTPUT,
    PROGRAM,
    about_generic,
    console,
    device_option,
    dims_option,
    duration,
    json_option,
    load,
    name_of,
    output_file,
    print_json,
    print_table,
    random_inputs,
    shapes,
    trust_options,
    working,
)
from lapilli.cli.flame import bars
from lapilli.errors import LapilliError

if TYPE_CHECKING:
    from rich.text import Text

    from lapilli.runtime.program import KernelTime, Profile
    from lapilli.speed import Speed


@click.command()
@click.argument("program", type=PROGRAM)
@click.option(
    "--repeat", default=10, show_default=True, type=click.IntRange(min=1), help="Runs, of which the median is reported."
)
@click.option(
    "--trace",
    type=OUTPUT,
    help="Trace file for chrome://tracing or ui.perfetto.dev. Default: PROGRAM with .trace.json.",
)
@click.option(
    "--limits/--no-limits",
    default=True,
    help="Measure what the device can do, and say which part of it each kernel reaches. Needs the compiler.",
)
@click.option("--sort", type=click.Choice(["time", "order"]), default="order", show_default=True)
@device_option
@trust_options
@dims_option
@json_option
def profile(
    program: Path,
    repeat: int,
    trace: Path | None,
    limits: bool,
    sort: str,
    device: str | None,
    key: Path | None,
    allow_host: tuple[str, ...],
    input_dims: str | None,
    input_type: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Time each kernel of PROGRAM separately with GPU timestamps; writes a picture of where the time goes, a table and a trace
    file (for `lapilli inspect --html FILE --profile`, too).

    Times of kernels, each alone between barriers, mostly add up to more than a run, in which they overlap: in JSON,
    kernel_seconds is their sum, and seconds the time of a run.
    """
    with load(program, device, key, allow_host) as loaded:
        inputs = random_inputs(loaded.inputs, input_dims, input_type, seed)
        with working("profiling"):
            times = loaded.profile(inputs, repeat)
        where = f"{loaded.device.name}, plan {loaded.plan}"
        plan = loaded.plan
    trace = trace or program.with_suffix(".trace.json")
    with output_file(trace) as file:
        file.write(json.dumps(_trace(times.kernels, program.name, where, plan)).encode())
    speed = _measured(plan, device) if limits else None
    if as_json:
        known = {} if speed is None else {"limits": asdict(speed)}
        print_json(
            {
                "program": str(program),
                "device": where,
                "trace": str(trace),
                **known,
                **asdict(times),
                "kernel_seconds": _sum(times),
            }
        )
    else:
        _print(times, f"{program.name}, {shapes(inputs)}, {where}", sort == "time", speed)
        console().print(f"Trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)")


def _measured(plan: str, device: str | None) -> Speed | None:
    """None without the compiler, or if the device has no room for it."""
    try:
        from lapilli import speed

        with working("measuring what the device can do"):
            return speed.measure(plan, device)
    except (ImportError, LapilliError):
        return None


def _sum(times: Profile) -> float:
    return sum(kernel.seconds for kernel in times.kernels)


def _print(times: Profile, title: str, by_time: bool, speed: Speed | None) -> None:
    total = _sum(times) or 1.0
    of_device = ["of device"] if speed is not None else []
    numbers = ("time", "share", *of_device, "GFLOP/s", "GB/s", "work groups")
    numbered = list(enumerate(times.kernels))
    if by_time:
        numbered.sort(key=lambda row: -row[1].seconds)
    rows: list[list[str | Text]] = [
        [
            str(i),
            kernel.label,
            name_of(kernel.kernel),
            duration(kernel.seconds),
            f"{kernel.seconds / total:.1%}",
            *([_reached(kernel, speed)] if speed is not None else []),
            _rate(kernel.flops, kernel.seconds),
            _rate(kernel.bytes, kernel.seconds),
            "×".join(map(str, kernel.groups)),
        ]
        for i, kernel in numbered
    ]
    out = console()
    for bar in bars(times.kernels, f"a run: {duration(times.seconds)}", out.width):
        out.print(bar)
    print_table(out, ("#", "operators", "kernel", *numbers), rows, title=title, numbers=numbers)
    out.print(
        f"{len(times.kernels)} dispatches: {duration(total)} in total when timed separately, {duration(times.seconds)} in a run"
    )
    if speed is not None:
        out.print(
            f"The device copies {speed.bytes * 1e-9:.0f} GB/s and multiplies {speed.flops * 1e-9:.0f} GFLOP/s by this plan; "
            f"a kernel takes {duration(speed.floor)} at least."
        )
    if slow := about_generic(kernel.kernel for kernel in times.kernels):
        out.print(slow)


def _reached(kernel: KernelTime, speed: Speed) -> str:
    """Of what the device can do for a kernel's bytes or operations, whichever takes longer."""
    return f"{min(speed.seconds(kernel.bytes, kernel.flops) / kernel.seconds, 1):.0%}" if kernel.seconds else ""


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds * 1e-9:.1f}" if amount and seconds else ""


def _trace(kernels: Sequence[KernelTime], name: str, device: str, plan: str) -> dict[str, object]:
    """Chrome's trace event format: a complete event per kernel, in microseconds, one after the other, because kernels are timed
    separately."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{name} on {device}"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "device"}},
    ]
    now = 0.0
    for kernel in kernels:
        args = {"kernel": kernel.kernel, "groups": list(kernel.groups), "flops": kernel.flops, "bytes": kernel.bytes}
        event = {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": now,
            "dur": kernel.seconds * 1e6,
            "name": kernel.label,
            "args": args,
        }
        events.append(event)
        now += kernel.seconds * 1e6
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"plan": plan}}
