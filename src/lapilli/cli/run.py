"""`lapilli run`: photos, arrays or random numbers through a program."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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
    print_json,
    random_inputs,
)
from lapilli.errors import InvalidInputError, ReadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lapilli.runtime.program import Program


@click.command()
@click.argument("program", type=PROGRAM)
@click.argument("inputs", nargs=-1, required=True)
@click.option("--top", "k", default=5, show_default=True, type=click.IntRange(min=1), help="Classes to print.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the outputs to .npy or .npz."
)
@device_option
@dims_option
@json_option
def run(
    program: Path,
    inputs: tuple[str, ...],
    k: int,
    output: Path | None,
    device: str | None,
    input_dims: str | None,
    input_type: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run PROGRAM on INPUTS: photos (prepared as the program's metadata says), .npy files or `random`.

    A program with one input runs once for each of INPUTS, another takes one of INPUTS for each of its inputs.
    """
    import lapilli

    with lapilli.load(program, device=device) as loaded:
        arrays = [
            _array(loaded, i if len(loaded.inputs) > 1 else 0, text, input_dims, input_type, seed)
            for i, text in enumerate(_check_count(loaded, inputs))
        ]
        calls = [[array] for array in arrays] if len(loaded.inputs) == 1 else [arrays]
        names = list(inputs) if len(loaded.inputs) == 1 else [", ".join(inputs)]
        results = []
        for call in calls:
            start = time.perf_counter()
            outputs = loaded.run_flat(call)
            results.append((outputs, time.perf_counter() - start))
        if output is not None:
            _write(output, loaded, [outputs for outputs, _ in results])
        if as_json:
            runs = [
                {"input": name, "seconds": seconds, "outputs": [_describe(loaded, out, k) for out in outputs]}
                for name, (outputs, seconds) in zip(names, results, strict=True)
            ]
            print_json({"device": loaded.device.name, "plan": loaded.plan, "runs": runs})
            return
        from rich.text import Text

        out = console()
        out.print(Text.assemble((loaded.device.name, "bold"), f", plan {loaded.plan}"))
        for name, (outputs, seconds) in zip(names, results, strict=True):
            out.print(Text.assemble("\n", (name, "bold"), f"  {duration(seconds)}"))
            for spec, array in zip(loaded.outputs, outputs, strict=True):
                _print(out, loaded, spec.name, array, k)


def _check_count(program: Program, inputs: Sequence[str]) -> Sequence[str]:
    wanted = len(program.inputs)
    if wanted != 1 and len(inputs) != wanted:
        specs = "; ".join(str(spec) for spec in program.inputs)
        raise InvalidInputError(f"{len(inputs)} inputs were given; the program takes {wanted}: {specs}.")
    return inputs


def _array(program: Program, index: int, text: str, dims: str | None, types: str | None, seed: int) -> NDArray[Any]:
    """The array that an input on the command line stands for."""
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
        return array
    prepare = program.metadata.get(preprocess.METADATA_KEY)
    if prepare is None:
        raise InvalidInputError(
            f"The program does not say how a photo becomes its input {spec}: its metadata has no "
            f"{preprocess.METADATA_KEY!r}. Give a .npy file, or compile it with metadata."
        )
    return preprocess.Preprocess.loads(prepare)(preprocess.open_photo(path)).astype(spec.numpy_dtype())


def _labels(program: Program) -> list[str] | None:
    from lapilli.runtime.preprocess import LABELS_KEY

    try:
        labels = json.loads(program.metadata.get(LABELS_KEY, "null"))
    except ValueError:
        return None
    return [str(label) for label in labels] if isinstance(labels, list) else None


def _classes(program: Program, array: NDArray[Any], k: int) -> list[tuple[str, float]] | None:
    """Top k, where the output is one row of scores for the program's labels."""
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
    for label, probability in classes:
        table.add_row(f"{probability:6.1%}", "█" * round(30 * probability), label)
    out.print(table)


def _write(path: Path, program: Program, results: list[list[NDArray[Any]]]) -> None:
    """One output of one run as .npy, several as .npz named after the outputs."""
    import numpy as np

    from lapilli.runtime.files import replace

    if path.suffix not in (".npy", ".npz"):
        raise InvalidInputError(f"Outputs are written to .npy or .npz, not to {path.name}.")
    named = {
        spec.name if len(results) == 1 else f"{i}.{spec.name}": array
        for i, outputs in enumerate(results)
        for spec, array in zip(program.outputs, outputs, strict=True)
    }
    if path.suffix == ".npy" and len(named) != 1:
        raise InvalidInputError(f"There are {len(named)} outputs; write them to a .npz file.")
    with replace(path) as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(named.values())))
        else:
            np.savez(file, **named)  # type: ignore[arg-type]
