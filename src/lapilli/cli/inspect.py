"""`lapilli inspect`: the contents of a program."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lapilli.cli.common import (
    OUTPUT,
    PROGRAM,
    about_generic,
    console,
    json_option,
    name_of,
    output_file,
    parse_sizes,
    print_json,
    print_table,
    rows,
    size,
)
from lapilli.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from lapilli.runtime.description import Description, MemoryPlan, Plan


@click.command()
@click.argument("program", type=PROGRAM)
@click.option("--html", type=OUTPUT, help="Write a self-contained HTML page.")
@click.option(
    "--profile",
    "trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Times for the page: a trace of this program that `lapilli profile` wrote.",
)
@click.option(
    "--set", "sizes", metavar="NAME=SIZE", multiple=True, help="Value of a dynamic size. Default: its minimum."
)
@click.option("--all", "everything", is_flag=True, help="Show all dispatches and constants.")
@click.option(
    "--size", "bytes_only", is_flag=True, help="Show where the bytes of the file are, and what each plan takes."
)
@json_option
def inspect(
    program: Path, html: Path | None, trace: Path | None, sizes: tuple[str, ...], everything: bool, bytes_only: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the plans, kernels, memory plan and constants of PROGRAM. Needs no device.

    The page of --html has the graph of the kernels: zoom, search, and what is known of each.
    """
    if trace is not None and html is None:
        raise click.UsageError("--profile gives times to the page: add --html FILE.")
    if bytes_only:
        return _print_sizes(program, as_json)
    from lapilli.cli.describe import shown_metadata
    from lapilli.cli.page import page
    from lapilli.runtime.description import Description
    from lapilli.runtime.interface import interfaces

    description = Description.of(program)
    method = description.methods[0]
    values = parse_sizes(sizes, {symbol.name: max(1, symbol.min) for symbol in method.symbols})
    memory = [description.memory(plan, list(values.values())) for plan in method.plans]
    if html is not None:
        times = None if trace is None else _times(trace, method.plans)
        with output_file(html) as file:
            file.write(page(program, description, memory, values, times).encode())
    if as_json:
        node = asdict(description) | {"source": str(program), "bytes": program.stat().st_size, "sizes": values}
        node["metadata"] = shown_metadata(description)
        node["report"] = {i.name: asdict(i.report()) for i in interfaces(description)}
        print_json(node | {"memory": [asdict(plan) for plan in memory]})
    elif html is None:
        _print(console(), program, description, memory, values, everything)
    else:
        console().print(f"Wrote {html}")


def _times(trace: Path, plans: Sequence[Plan]) -> dict[str, list[float]]:
    """Seconds of the dispatches of the plan that a trace is of. Raises InvalidInputError if there is none."""
    from lapilli.runtime.files import read_file

    try:
        node = json.loads(read_file(trace))
        events, name = [e for e in node["traceEvents"] if e["ph"] == "X"], node["otherData"]["plan"]
        kernels = [str(event["args"]["kernel"]) for event in events]
        seconds = [float(event["dur"]) * 1e-6 for event in events]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInputError(f"{trace} is no trace that `lapilli profile` wrote: {error!r}.") from None
    found = {plan.name: seconds for plan in plans if plan.name == name and [d.kernel for d in plan.run] == kernels}
    if not found or not all(0 <= t < math.inf for t in seconds):
        raise InvalidInputError(
            f"{trace} has the times of {len(kernels)} dispatches, which are not those of its plan in this program; make it anew: "
            "lapilli profile PROGRAM."
        )
    return found


def _print(
    out: Console,
    program: Path,
    description: Description,
    memory: list[MemoryPlan],
    values: dict[str, int],
    everything: bool,
) -> None:
    from rich.text import Text

    from lapilli.cli.describe import arena, operators, overview, requirements

    rows(overview(program, description, values))
    for plan, plan_memory in zip(description.methods[0].plans, memory, strict=True):
        barriers = sum(dispatch.barrier for dispatch in plan.run)
        out.print(Text.assemble("\n", (f"plan {plan.name}", "bold"), f": needs {requirements(plan)}"))
        out.print(f"{len(plan.run)} dispatches, {barriers} barriers; {len(plan.load)} dispatches at load")
        out.print(arena(plan_memory))
        dispatches = []
        reasons = description.reasons(plan)
        for i, (dispatch, cost, why) in enumerate(zip(plan.run, plan_memory.commands, reasons, strict=True)):
            if everything or i < 30:
                mark = "●" if dispatch.barrier else ""
                dispatches.append((str(i), operators(dispatch), name_of(dispatch.kernel), *_cost(cost), mark, why))
        names = ("#", "operators", "kernel", "work groups", "MFLOP", "MB", "barrier", "why realised")
        print_table(out, names, dispatches)
        if slow := about_generic(dispatch.kernel for dispatch in plan.run):
            out.print(slow)
        if not everything and len(plan.run) > 30:
            out.print(f"… {len(plan.run) - 30} more: --all")
    kernels = []
    for kernel in description.kernels:
        local = "×".join(map(str, kernel.local))
        subgroup = str(kernel.subgroup_size or "any")
        kernels.append((kernel.name, size(kernel.code_size), local, subgroup, size(kernel.shared_size)))
    print_table(out, ("kernel", "code", "work group", "subgroup", "shared memory"), kernels, title="kernels")
    constants = sorted(description.constants, key=lambda constant: -constant.size)
    largest = [
        (constant.name, constant.dtype, "×".join(map(str, constant.shape)), size(constant.size))
        for constant in (constants if everything else constants[:10])
    ]
    print_table(out, ("constant", "dtype", "shape", "size"), largest, title="constants, largest first")
    if not everything and len(constants) > 10:
        out.print(f"… {len(constants) - 10} more: --all")


def _print_sizes(program: Path, as_json: bool) -> None:
    from lapilli import player
    from lapilli.format.container import read_header
    from lapilli.runtime.file_sizes import FileSizes
    from lapilli.runtime.files import named, read_file

    data = read_file(program)
    with named(program):
        node = player.describe(data)
        sizes = FileSizes.of(node, len(data), read_header(data).structure_size)
    if as_json:
        return print_json(asdict(sizes))
    parts = [
        ("constants", sizes.constants),
        ("kernels", sizes.kernels),
        ("tables", sizes.tables),
        ("metadata", sizes.metadata),
        ("rest", sizes.rest),
    ]
    rows([("file", size(sizes.total)), *((name, size(count)) for name, count in parts)])
    plans = [
        (plan.name, *map(size, (plan.kernels, plan.constants, plan.only_kernels, plan.only_constants)))
        for plan in sizes.plans
    ]
    names = ("plan", "kernels", "constants", "kernels of it alone", "constants of it alone")
    print_table(console(), names, plans)


def _cost(cost: Any) -> tuple[str, str, str]:
    groups = "×".join(map(str, cost.groups))
    return groups, f"{cost.flops * 1e-6:.1f}" if cost.flops else "", f"{cost.bytes * 1e-6:.2f}" if cost.bytes else ""
