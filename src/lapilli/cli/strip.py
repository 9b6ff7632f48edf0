"""`lapilli strip`: a smaller file for known devices."""

from __future__ import annotations

from pathlib import Path

import click

from lapilli.cli.common import OUTPUT, PROGRAM, console, output_file, size
from lapilli.errors import InvalidInputError


@click.command()
@click.argument("program", type=PROGRAM)
@click.option("-o", "--output", type=OUTPUT, required=True, help="The smaller file.")
@click.option(
    "--plans",
    metavar="NAME",
    multiple=True,
    help="A plan to keep; once for each. Default: all. See `lapilli inspect --size`.",
)
@click.option(
    "--keep-metadata",
    metavar="NAME",
    multiple=True,
    help="Metadata to keep; once for each, `none`: no metadata. Default: all but the compiler's reasons.",
)
def strip(program: Path, output: Path, plans: tuple[str, ...], keep_metadata: tuple[str, ...]) -> None:
    """Drop plans of PROGRAM, and the kernels and constants that only they use. A signature is dropped, too.

    Without metadata, inputs and outputs are flat lists. Needs `pip install lapilli[compile]`, and no device."""
    from lapilli.format import signature
    from lapilli.runtime.compiler_packages import missing_packages
    from lapilli.runtime.description import Description
    from lapilli.runtime.files import named, read_file

    if "flatbuffers" in missing_packages():
        raise InvalidInputError("`lapilli strip` needs the package flatbuffers: pip install lapilli[compile].")
    from lapilli.program.strip import strip as stripped

    data = read_file(program)
    with named(program):
        Description.of(data)  # refuses what is no valid file
        small = stripped(data, plans or None, [n for n in keep_metadata if n != "none"] if keep_metadata else None)
    Description.of(small)
    with output_file(output) as file:
        file.write(small)
    console().print(f"{output}: {size(len(small))} of {size(len(data))}")
    if signature.of(data) is not None:
        console().print("The signature is gone, for it was one of another file: lapilli sign makes a new one.")
