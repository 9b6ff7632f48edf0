"""`lapilli compile`: from an exported, TorchScript, ONNX or language model to a program."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Literal

import click

from lapilli.cli.common import (
    OUTPUT,
    OUTPUT_FOLDER,
    console,
    duration,
    output_file,
    print_json,
    progress_bar,
    progress_console,
    size,
)
from lapilli.cli.language_models import source_options
from lapilli.errors import InvalidInputError
from lapilli.runtime.compiler_packages import require_compiler

APPLE = ("metal", "apple-m")
"""Targets whose kernels can be written in Metal's language."""


@click.command("compile")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=OUTPUT, help="Default: MODEL with .lap.")
@click.option(
    "--input",
    "inputs",
    metavar="INPUT",
    multiple=True,
    help="For TorchScript, and for ONNX instead of the shapes that the file declares, one for each argument: sizes of a "
    'tensor, "1,3,224,224", with its type unless it is float, '
    '"1,128:int64"; a dynamic size, "batch=2..16,3,224,224" (example and maximum); or a number, "int=16000", '
    '"float=0.5", "bool=true".',
)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), help="Default: fp32; with --target metal fp16.")
@click.option(
    "--target",
    metavar="PLAN|DEVICE",
    help="The only plan to compile, or the device to compile for, such as rtx-4090, or metal for all of Apple's. Default: "
    "plans for every kind of device.",
)
@click.option(
    "--fallback",
    type=click.Choice(["cpu", "error"]),
    default="cpu",
    show_default=True,
    help="What to do with operators that cannot run on the GPU.",
)
@click.option(
    "--msl",
    metavar="FOLDER",
    type=OUTPUT_FOLDER,
    help="With --target metal: write each kernel in Metal's language, and its SPIR-V beside it, to FOLDER.",
)
@source_options
@click.option("--metadata", "pairs", metavar="KEY=VALUE", multiple=True, help="Stored in the file; VALUE may be @FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compile_(
    model: Path,
    output: Path | None,
    inputs: tuple[str, ...],
    precision: Literal["fp32", "fp16"] | None,
    target: str | None,
    fallback: str,
    msl: Path | None,
    context: int | None,
    quantize: str | None,
    sequences: int | None,
    cache: int | None,
    pairs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compile MODEL (.pt2 of torch.export, TorchScript of torch.jit.save, ONNX, GGUF, or a Hugging Face folder) to a program.

    Needs `pip install lapilli[compile]`, and `lapilli[onnx]` for ONNX, `lapilli[llm]` for a language model, to which --context,
    --quantize, --sequences and --cache apply."""
    output = output or model.with_suffix(".lap")
    if output.resolve() == model.resolve():
        raise InvalidInputError(f"The output {output} would replace the model; name another file with -o.")
    if msl is not None and target not in APPLE:
        raise click.UsageError(f"--msl is for kernels of Apple's GPUs: add --target {' or '.join(APPLE)}.")
    metadata = dict(_pair(pair) for pair in pairs)
    require_compiler()
    from lapilli.llm.source_path import is_source

    of_model = {"context": context, "quantize": quantize, "sequences": sequences, "cache": cache}
    language = is_source(model)
    if model.is_dir() and not language:
        raise InvalidInputError(f"{model} is a folder without config.json; give a file, or a Hugging Face folder.")
    if language and inputs:
        raise InvalidInputError("--input does not apply to a language model, which takes any text.")
    if language and msl is not None:
        raise InvalidInputError("--msl does not apply to a language model.")
    if not language and any(value is not None for value in of_model.values()):
        raise InvalidInputError(
            f"--context, --quantize, --sequences and --cache are for language models; {model} is none."
        )
    start = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task(f"reading {model.name}", total=None)
        # torch takes seconds to import: what is said comes first
        from lapilli.capture.examples import example_inputs
        from lapilli.compiler import compile_to_bytes
        from lapilli.target import usual_precision

        precision = precision or usual_precision(target)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        if language:
            from lapilli.llm.from_source import compile_source

            data = compile_source(
                model, **{k: v for k, v in of_model.items() if v is not None}, precision=precision, target=target,
                metadata=metadata, progress=progress, say=progress_console().print,
            )  # fmt: skip
        else:
            examples, shapes = example_inputs(inputs)
            data = compile_to_bytes(
                model, examples, precision=precision, dynamic_shapes=shapes, target=target, fallback=fallback,
                metadata=metadata, progress=progress, each_kernel=None if msl is None else _written_to(msl),
            )  # fmt: skip
    from lapilli.runtime.description import Description
    from lapilli.runtime.host import unlisted
    from lapilli.runtime.interface import interfaces

    with output_file(output) as file:
        file.write(data)
    seconds = time.perf_counter() - start
    description = Description.of(data)
    plans = [plan.name for plan in description.methods[0].plans]
    reports = {i.name: i.report() for i in interfaces(description)}
    on_cpu = [asdict(o) | {"method": name} for name, r in reports.items() for o in r.on_cpu]
    if as_json:
        print_json({"output": str(output), "bytes": len(data), "seconds": seconds, "plans": plans, "on_cpu": on_cpu})
    else:
        console().print(f"{output}: {size(len(data))} in {duration(seconds)}, plans {', '.join(plans)}")
        for name, report in reports.items():
            if report.on_cpu:
                console().print(f"{name}: {report}")
        others = unlisted(description.host_operators)
        if others:
            console().print(
                f"{', '.join(others)}: not in the list of operators that any file may call. Load the program with "
                f"allow_host={others}, or --allow-host."
            )


def _written_to(folder: Path) -> Callable[[str, str, bytes], None]:
    """Writes each kernel to a folder, numbered as in the program."""
    from lapilli.codegen.slang import to_metal

    numbers = count()

    def write(name: str, source: str, spirv: bytes) -> None:
        stem = f"{next(numbers):03}-{re.sub(r'[^A-Za-z0-9_]+', '_', name).strip('_')}"
        for suffix, content in ((".metal", to_metal(source).encode()), (".spv", spirv)):
            with output_file(folder / (stem + suffix)) as file:
                file.write(content)

    return write


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
