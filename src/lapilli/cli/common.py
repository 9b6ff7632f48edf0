"""Shared by the subcommands: errors and exit codes, consoles, options, inputs from the command line, units."""

from __future__ import annotations

import difflib
import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from lapilli.errors import InvalidInputError, LapilliError
from lapilli.names import printable
from lapilli.runtime import notice
from lapilli.runtime.description import GENERIC, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from lapilli.runtime.program import Program

F = TypeVar("F", bound=Callable[..., Any])

PROGRAM = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Output(click.Path):
    """Where a command will write. Folders that are missing are made then; that they can be is known before its work begins."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        folder = Path(path).absolute().parent
        there = next(f for f in (folder, *folder.parents) if f.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "it is read-only" if there.is_dir() else "it is a file"
            raise InvalidInputError(
                f"{path} cannot be written, because nothing can be put into {there}: {why}. Name another place."
            )
        return path


OUTPUT = _Output(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = _Output(file_okay=False, path_type=Path)


def printable_lines(text: str) -> str:
    """A traceback, whose lines stay."""
    return printable(text, keep="\n")


@contextmanager
def _plain_warnings(context: click.Context) -> Iterator[None]:
    """Shows warnings as sentences: their place in our code tells a user of commands nothing, except with --verbose."""
    before = warnings.formatwarning

    def text(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        if context.meta.get(VERBOSE):
            return before(message, category, filename, lineno, line)
        return f"Warning: {printable(str(message))}\n"

    warnings.formatwarning = text
    try:
        yield
    finally:
        warnings.formatwarning = before


class Group(click.Group):
    """Reports errors as a message on stderr and exit code 1 (wrong usage: 2), and warnings as a line there; suggests similar
    command names.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _plain_warnings(ctx):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read the results has enough of them: click ends without a word
        except (LapilliError, OSError) as error:
            if ctx.meta.get(VERBOSE):
                click.echo("".join(map(printable_lines, traceback.format_exception(error))), err=True, nl=False)
            raise click.ClickException(printable(str(error))) from error

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
    """A console for results. It prints text as is, because shapes also have brackets, except for control characters, which
    names in a file may contain."""
    from rich.console import Console
    from rich.segment import Segment

    class Safe(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Safe(highlight=False, markup=False)


def rows(named: Sequence[tuple[str, str]]) -> None:
    """Names and values side by side."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in named:
        grid.add_row(Text(name, "bold"), value)
    console().print(grid)


QUIET, VERBOSE = "lapilli.quiet", "lapilli.verbose"
"""In the context's `meta`."""


def said(option: str) -> bool:
    """Whether the command was called with --quiet or --verbose."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(option))


def with_words(command: click.Command) -> click.Command:
    """Gives a command, and those below it, --quiet and --verbose."""

    def note(context: click.Context, option: click.Parameter, value: bool) -> None:
        if value:
            context.meta[QUIET if option.name == "quiet" else VERBOSE] = True
            if option.name == "quiet":
                context.find_root().with_resource(notice.silenced())
        if context.meta.get(QUIET) and context.meta.get(VERBOSE):
            raise click.UsageError("--quiet and --verbose exclude each other.", context)

    texts = {
        "quiet": "No progress and no remarks: results, warnings and errors alone.",
        "verbose": "Progress as lines with times where stderr is no terminal; errors and warnings with their place in the code.",
    }
    for name, text in texts.items():
        command.params.append(
            click.Option([f"-{name[0]}", f"--{name}"], is_flag=True, expose_value=False, callback=note, help=text)
        )
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_words(inner)
    return command


def progress_console() -> Console:
    """A console for progress and remarks, on stderr, so that results can be piped. Silent with --quiet."""
    from rich.console import Console

    return Console(stderr=True, quiet=said(QUIET))


def progress_bar() -> Progress:
    """A progress bar on stderr that disappears when done; nothing if stderr is not a terminal, or lines with --verbose."""
    import time

    from rich.progress import Progress

    console = progress_console()
    lines = said(VERBOSE) and not console.is_terminal

    class Told(Progress):
        """Says each new description with the seconds since the beginning."""

        begun, last = time.perf_counter(), ""

        def say(self, description: str | None) -> None:
            if lines and description and description != self.last:
                self.last = description
                text = f"{time.perf_counter() - self.begun:8.2f} s  {printable(description)}"
                console.print(text, highlight=False, markup=False)

        def add_task(self, description: str, *arguments: Any, **options: Any) -> Any:
            self.say(description)
            return super().add_task(description, *arguments, **options)

        def update(self, task_id: Any, *, description: str | None = None, **options: Any) -> None:
            self.say(description)
            super().update(task_id, description=description, **options)

    return Told(console=console, transient=True, disable=not console.is_terminal or said(QUIET))


@contextmanager
def working(description: str) -> Iterator[None]:
    """Says what a command is at, without knowing how far."""
    with progress_bar() as bar:
        bar.add_task(description, total=None)
        yield


def print_json(value: object) -> None:
    """Prints a result as JSON."""
    click.echo(json.dumps(value, indent=2))


def device_option(command: F) -> F:
    """`--device`."""
    return click.option(
        "--device",
        metavar="INDEX|NAME|UUID",
        help="Index, part of a name, or UUID; see `lapilli devices`. Default: the best.",
    )(command)


def trust_options(command: F) -> F:
    """`--key` and `--allow-host`: conditions for loading a file."""
    for option in (
        click.option("--key", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                     help="Public key with which the program must be signed."),
        click.option("--allow-host", "allow_host", metavar="NAME", multiple=True,
                     help="Operator or namespace of torch that the program may call in addition to the built-in list; `none`: no "
                     "operators at all."),
    ):  # fmt: skip
        command = option(command)
    return command


def load(path: Path, device: str | None, key: Path | None, allow_host: Sequence[str]) -> Program:
    """The program named on a command line."""
    import lapilli

    allowed = True if not allow_host else False if "none" in allow_host else list(allow_host)
    return lapilli.load(path, device, allow_host=allowed, public_key=key)


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
"""Names of dtypes in other benchmark tools."""


def random_inputs(specs: Sequence[TensorSpec], dims: str | None, types: str | None, seed: int) -> list[NDArray[Any]]:
    """Random inputs: floats uniform in [0, 1), integers 0 or 1; bfloat16 as its bits. Without `dims`, dynamic sizes have
    their smallest value.

    Raises InvalidInputError if dims or types do not fit the program.
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
        if spec.dtype == "bfloat16":
            inputs.append(to_bits(rng.random(shape, dtype=np.float32)))
            continue
        dtype = spec.numpy_dtype()
        if dtype.kind == "f":
            inputs.append(rng.random(shape, dtype=np.float32).astype(dtype))
        else:
            inputs.append(rng.integers(0, 2, shape).astype(dtype))
    return inputs


def to_bits(array: NDArray[Any]) -> NDArray[Any]:
    """float32 rounded to bfloat16, as its bits in uint16; NumPy has no bfloat16."""
    import numpy as np

    words = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).reshape(np.shape(array))


def from_bits(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """An output as shown to users: bits of bfloat16 as float32."""
    import numpy as np

    if spec.dtype != "bfloat16" or array.dtype != np.uint16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


_WIDE = 72
"""Columns of a terminal from which on tables of many columns can be read."""


def print_table(
    out: Console,
    names: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    numbers: Sequence[str] = (),
) -> None:
    """Rows under names; those in `numbers` on the right. Cells are wrapped, and never truncated.

    Where a terminal is too narrow for the columns, each row is a few lines of names and values instead."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title or None, title_justify="left")
    for name in names:
        shown.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    given = list(rows)
    for row in given:
        shown.add_row(*row)
    unwrapped = out.measure(shown, options=out.options.update(max_width=1 << 16)).maximum
    if out.width >= _WIDE or unwrapped <= out.width:
        out.print(shown)
        return
    if title:
        out.print(Text(title, "italic", overflow="fold"))
    for row in given:
        for k, (name, value) in enumerate(zip(names, row, strict=True)):
            if len(value):
                line = Text.assemble((name, "" if k else "bold"), ": ", value, overflow="fold")
                out.print(Padding(line, (0, 0, 0, 2 if k else 0), expand=False))


def make_folder(path: Path) -> None:
    """Makes the folder of an output, and those around it, if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """An output file of a command. Its folder is created, and it is written whole or not at all."""
    from lapilli.runtime.files import replace

    make_folder(path)
    with replace(path) as file:
        yield file


def shapes(inputs: Sequence[NDArray[Any]]) -> str:
    """The shapes of inputs, as text."""
    return ", ".join("×".join(map(str, array.shape)) or "scalar" for array in inputs)


def parse_sizes(pairs: Sequence[str], names: Mapping[str, int]) -> dict[str, int]:
    """Values of dynamic sizes from pairs such as `batch=4`, with the defaults in `names`."""
    values = dict(names)
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in names or not value.isdigit():
            have = ", ".join(names) or "none"
            raise InvalidInputError(f"--set {pair!r} is not NAME=SIZE of a dynamic size; the program has: {have}.")
        values[name] = int(value)
    return values


def size(n: float) -> str:
    """Bytes as text: 1.5 MB. Powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def name_of(kernel: str) -> Text:
    """A kernel's name as tables show it: those of contractions without a kernel of their own stand out."""
    from rich.text import Text

    return Text(kernel, "bold yellow" if kernel.startswith(GENERIC) else "")


def about_generic(kernels: Iterable[str]) -> str | None:
    """What to say below a table that has such names."""
    count = sum(kernel.startswith(GENERIC) for kernel in kernels)
    if not count:
        return None
    what = "product or convolution is" if count == 1 else "products and convolutions are"
    return f"{count} {what} computed element by element ({GENERIC}…), which suits small ones only; larger ones may be slow by that."


def duration(seconds: float) -> str:
    """Seconds as text: 12.3 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def peak_memory() -> int:
    """Peak resident memory of this process in bytes; 0 if unknown.

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
