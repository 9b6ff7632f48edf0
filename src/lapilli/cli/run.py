"""`lapilli run`: runs a program on photos, arrays or random numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from lapilli.cli.common import (
    OUTPUT,
    PROGRAM,
    console,
    device_option,
    dims_option,
    duration,
    from_bits,
    json_option,
    load,
    output_file,
    print_json,
    random_inputs,
    to_bits,
    trust_options,
)
from lapilli.errors import InvalidFileError, InvalidInputError, LapilliError, ReadError
from lapilli.names import printable
from lapilli.runtime.limits import load_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lapilli.runtime.program import Program


@click.command()
@click.argument("program", type=PROGRAM)
@click.argument("inputs", nargs=-1)
@click.option("--top", "k", default=5, show_default=True, type=click.IntRange(min=1), help="Classes to print.")
@click.option("-o", "--output", type=OUTPUT, help="Write the outputs to .npy or .npz.")
@device_option
@trust_options
@dims_option
@json_option
def run(
    program: Path,
    inputs: tuple[str, ...],
    k: int,
    output: Path | None,
    device: str | None,
    key: Path | None,
    allow_host: tuple[str, ...],
    input_dims: str | None,
    input_type: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run PROGRAM on INPUTS: photos (preprocessed as specified by its metadata), .npy files or `random`.

    A program with one input runs once for each of INPUTS; others run once, with one of INPUTS for each input. bfloat16 is read and
    written as float32.
    """
    with load(program, device, key, allow_host) as loaded:
        runs = []
        for name, given in _calls(loaded, inputs):
            try:
                arrays = [_array(loaded, i, text, input_dims, input_type, seed) for i, text in enumerate(given)]
                start = time.perf_counter()
                outputs = loaded.run_flat(arrays, bits=True)
                seconds = time.perf_counter() - start
                shown = [from_bits(array, spec) for spec, array in zip(loaded.outputs, outputs, strict=True)]
                runs.append(Run(name, shown, seconds))
            except LapilliError as error:
                if len(inputs) < 2 or len(loaded.inputs) > 1:
                    raise
                runs.append(Run(name, [], 0.0, str(error)))  # continues with the others
        if output is not None:
            _write(output, loaded, runs)
        if as_json:
            nodes = [_node(loaded, r, k) for r in runs]
            print_json({"device": loaded.device.name, "plan": loaded.plan, "runs": nodes})
        else:
            _show(loaded, runs, k)
    failed = [r for r in runs if r.error]
    if failed:
        raise LapilliError(f"{len(failed)} of {len(runs)} inputs failed: {'; '.join(r.error for r in failed)}")


@dataclass(frozen=True)
class Run:
    """The run on one input: its outputs, or an error."""

    name: str
    outputs: list[NDArray[Any]]
    seconds: float
    error: str = ""


def _calls(program: Program, inputs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The runs: a name and a list of inputs for each."""
    wanted = len(program.inputs)
    if not inputs and wanted:
        specs = "; ".join(str(spec) for spec in program.inputs)
        raise click.UsageError(f"Missing argument 'INPUTS...': the program takes {specs}.")
    if wanted == 1:
        return [(text, [text]) for text in inputs]
    if wanted == 0 and tuple(inputs) in ((), ("random",)):
        return [("no inputs", [])]
    return [(", ".join(inputs), list(_check_count(program, inputs)))]


def _node(program: Program, run: Run, k: int) -> dict[str, object]:
    if run.error:
        return {"input": run.name, "error": run.error}
    return {"input": run.name, "seconds": run.seconds, "outputs": [_describe(program, out, k) for out in run.outputs]}


def _show(program: Program, runs: Sequence[Run], k: int) -> None:
    from rich.text import Text

    out = console()
    out.print(Text.assemble((program.device.name, "bold"), f", plan {program.plan}"))
    for run in runs:
        if run.error:
            out.print(Text.assemble("\n", (run.name, "bold"), f"  failed: {run.error}"))
            continue
        out.print(Text.assemble("\n", (run.name, "bold"), f"  {duration(run.seconds)}"))
        for spec, array in zip(program.outputs, run.outputs, strict=True):
            _print(out, program, spec.name, array, k)


def _check_count(program: Program, inputs: Sequence[str]) -> Sequence[str]:
    wanted = len(program.inputs)
    if wanted != 1 and len(inputs) != wanted:
        specs = "; ".join(str(spec) for spec in program.inputs)
        raise InvalidInputError(f"{len(inputs)} inputs were given; the program takes {wanted}: {specs}.")
    return inputs


def _array(program: Program, index: int, text: str, dims: str | None, types: str | None, seed: int) -> NDArray[Any]:
    """The array for an input on the command line."""
    import numpy as np

    from lapilli.runtime import preprocess

    spec = program.inputs[index]
    if text == "random":
        return random_inputs(program.inputs, dims, types, seed)[index]
    path = Path(text)
    if not path.is_file():
        raise ReadError(f"There is no file {text}; give a photo, a .npy file or the word random.")
    if path.suffix == ".npy":
        try:
            array: NDArray[Any] = np.load(path, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidInputError(f"{text} cannot be read as an array: {error}") from error
        return to_bits(array) if spec.dtype == "bfloat16" and array.dtype == np.float32 else array
    prepare = program.metadata.get(preprocess.METADATA_KEY)
    if prepare is None:
        raise InvalidInputError(
            f"The program does not say how a photo becomes its input {spec}: its metadata has no "
            f"{preprocess.METADATA_KEY!r}. Give a .npy file, or compile it with metadata."
        )
    pixels = preprocess.Preprocess.loads(prepare)(preprocess.open_photo(path))
    return to_bits(pixels) if spec.dtype == "bfloat16" else pixels.astype(spec.numpy_dtype())


def _labels(program: Program) -> list[str] | None:
    from lapilli.runtime.preprocess import LABELS_KEY

    try:
        labels = load_json(program.metadata.get(LABELS_KEY, "null"), "The metadata 'labels'")
    except InvalidFileError:
        return None
    good = isinstance(labels, list) and all(isinstance(label, str | int | float) for label in labels)
    return [str(label)[:200] for label in labels] if good else None


def _classes(program: Program, array: NDArray[Any], k: int) -> list[tuple[str, float]] | None:
    """The top k classes, if the output is one row of scores for the program's labels."""
    from lapilli.runtime.preprocess import top

    labels = _labels(program)
    if labels is None or array.size != len(labels) or array.dtype.kind != "f":
        return None
    return top(array, k, labels)


def _describe(program: Program, array: NDArray[Any], k: int) -> dict[str, object]:
    described: dict[str, object] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    classes = _classes(program, array, k)
    if classes is not None:
        described["top"] = [{"label": label, "probability": p} for label, p in classes]
    return described


def _print(out: Any, program: Program, name: str, array: NDArray[Any], k: int) -> None:
    import numpy as np
    from rich.table import Table

    classes = _classes(program, array, k)
    if classes is None:
        shape = "×".join(map(str, array.shape)) or "scalar"
        stats = ""
        if array.size and array.dtype.kind in "fiu":
            stats = f"  min {array.min():.6g}  mean {array.astype(np.float64).mean():.6g}  max {array.max():.6g}"
        out.print(f"{name}: {array.dtype} {shape}{stats}")
        return
    table = Table.grid(padding=(0, 2))
    for options in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
        table.add_column(**options)
    longest = min(30, out.width * 3 // 8)  # of a bar, beside which a label has room
    for label, probability in classes:
        table.add_row(f"{probability:6.1%}", "█" * round(longest * probability), label)
    out.print(table)


def _write(path: Path, program: Program, runs: Sequence[Run]) -> None:
    """One output of one run as .npy, several as .npz named after the outputs."""
    import numpy as np

    if path.suffix not in (".npy", ".npz"):
        raise InvalidInputError(f"Outputs are written to .npy or .npz, not to {path.name}.")
    named = {
        spec.name if len(runs) == 1 else f"{i}.{spec.name}": array
        for i, run in enumerate(runs)
        if not run.error
        for spec, array in zip(program.outputs, run.outputs, strict=True)
    }
    if path.suffix == ".npy" and len(named) != 1:
        raise InvalidInputError(f"There are {len(named)} outputs; write them to a .npz file.")
    with output_file(path) as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(named.values())))
        else:
            _write_archive(file, named)


def _write_archive(file: IO[bytes], named: Mapping[str, NDArray[Any]]) -> None:
    """As numpy.savez, but outputs may have any name, such as `file`, or a path, which becomes a single name."""
    import zipfile

    import numpy as np

    with zipfile.ZipFile(file, "w") as archive:
        for name, array in named.items():
            safe = printable(name, keep="").replace("/", "_").replace("\\", "_")[:200]
            with archive.open(f"{safe}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array)
