"""What the subcommands share: errors and exit codes, consoles, options, inputs from the command line, units."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lapilli.errors import InvalidInputError, LapilliError
from lapilli.runtime.description import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])

PROGRAM = click.Path(exists=True, dir_okay=False, path_type=Path)


class Group(click.Group):
    """Turns errors into a sentence on stderr and exit code 1 (wrong usage: 2); suggests close command names."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (LapilliError, OSError) as error:
            raise click.ClickException(str(error)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"{error.message}{hint}", ctx) from error


def console() -> Console:
    """For results: text as it is, for shapes have brackets too."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def progress_console() -> Console:
    """For progress: stderr, so that results can be piped."""
    from rich.console import Console

    return Console(stderr=True)


def progress_bar() -> Progress:
    """A bar on stderr that goes away when it is done; nothing where stderr is no terminal."""
    from rich.progress import Progress

    console = progress_console()
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def print_json(value: object) -> None:
    """A result for a script."""
    click.echo(json.dumps(value, indent=2))


def device_option(command: F) -> F:
    """`--device`."""
    return click.option(
        "--device", metavar="INDEX|NAME", help="Index or part of a name; see `lapilli devices`. Default: the best."
    )(command)


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def dims_option(command: F) -> F:
    """`--input_dims`, `--input_type` and `--seed` of random inputs."""
    for option in (
        click.option("--input_dims", metavar="DIMS", help='Sizes of random inputs: "1,3,224,224", ";" between inputs.'),
        click.option(
            "--input_type", metavar="TYPES", help='Their types, ";" between inputs: float, half, int64, uint8 …'
        ),
        click.option("--seed", default=0, show_default=True, help="Seed of random inputs."),
    ):
        command = option(command)
    return command


TYPE_NAMES: Mapping[str, str] = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "long": "int64",
}
"""What other benchmark tools call a dtype."""


def random_inputs(specs: Sequence[TensorSpec], dims: str | None, types: str | None, seed: int) -> list[NDArray[Any]]:
    """Random inputs: floats uniform in [0, 1), integers 0 or 1. Without `dims` dynamic sizes take their least value.

    Raises InvalidInputError where dims or types do not fit the program.
    """
    import numpy as np

    def split(text: str | None, option: str) -> list[str | None]:
        parts: list[str | None] = [part.strip() for part in text.split(";")] if text else [None] * len(specs)
        if len(parts) != len(specs):
            wanted = "; ".join(str(spec) for spec in specs)
            raise InvalidInputError(
                f"{option} has {len(parts)} entries; the program has {len(specs)} inputs: {wanted}."
            )
        return parts

    rng = np.random.default_rng(seed)
    inputs: list[NDArray[Any]] = []
    for spec, sizes, type_ in zip(specs, split(dims, "--input_dims"), split(types, "--input_type"), strict=True):
        if type_ is not None and TYPE_NAMES.get(type_, type_) != spec.dtype:
            raise InvalidInputError(f"--input_type {type_} does not fit: the program takes {spec}.")
        try:
            shape = spec.least_shape() if sizes is None else tuple(int(n) for n in sizes.split(",") if n.strip())
        except ValueError:
            raise InvalidInputError(f"--input_dims {sizes!r} is not a list of sizes like 1,3,224,224.") from None
        if any(n < 0 for n in shape):
            raise InvalidInputError(f"--input_dims {sizes!r} has a negative size.")
        dtype = spec.numpy_dtype()
        if dtype.kind == "f":
            inputs.append(rng.random(shape, dtype=np.float32).astype(dtype))
        else:
            inputs.append(rng.integers(0, 2, shape).astype(dtype))
    return inputs


def shapes(inputs: Sequence[NDArray[Any]]) -> str:
    """The sizes of inputs as people write them."""
    return ", ".join("×".join(map(str, array.shape)) or "scalar" for array in inputs)


def parse_sizes(pairs: Sequence[str], names: Mapping[str, int]) -> dict[str, int]:
    """`batch=4` pairs as values of dynamic sizes, on top of the defaults in `names`."""
    values = dict(names)
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in names or not value.isdigit():
            have = ", ".join(names) or "none"
            raise InvalidInputError(f"--set {pair!r} is not NAME=SIZE of a dynamic size; the program has: {have}.")
        values[name] = int(value)
    return values


def size(n: float) -> str:
    """Bytes for people: 1.5 MB. Powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def duration(seconds: float) -> str:
    """Seconds for people: 12.3 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def peak_memory() -> int:
    """Peak resident memory of this process in bytes; 0 where it cannot be known.

    Linux: VmHWM, because ru_maxrss also counts the process that started this one.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    except ImportError:
        return 0
