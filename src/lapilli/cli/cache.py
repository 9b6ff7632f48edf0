"""`lapilli cache`: the cache on disk of compiled programs and kernels."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from lapilli.cli.common import PROGRAM, console, device_option, json_option, print_json, print_table, size
from lapilli.errors import InvalidInputError
from lapilli.runtime.cache import base, files

KINDS = {
    "kernels": "kernels of compiled models, as SPIR-V",
    "eager": "programs of operators on the device vulkan",
    "mobile": "programs of modules optimized by optimize_for_mobile",
    "pipelines": "pipelines compiled by drivers",
    "tuned": "which kernels `lapilli tune` found fastest",
}


@click.group()
def cache() -> None:
    """Show, clear or fill the cache of compiled programs and kernels on disk."""


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Show the location and the contents of the cache."""
    found = [usage(name) for name in KINDS]
    if as_json:
        return print_json({"folder": str(base()), "parts": found})
    rows = [(f["name"], f"{f['files']:,}", size(f["bytes"]), KINDS[f["name"]]) for f in found]
    print_table(console(), ("part", "files", "size", "contents"), rows)
    console().print(f"{base()}; set LAPILLI_CACHE_DIR to use another folder", soft_wrap=True)


@cache.command()
@click.argument("parts", nargs=-1)
@json_option
def clear(parts: tuple[str, ...], as_json: bool) -> None:
    """Remove PARTS of the cache (kernels, eager, mobile, pipelines, tuned), or all of it but what was tuned."""
    unknown = [p for p in parts if p not in KINDS]
    if unknown:
        raise InvalidInputError(f"There is no part {unknown[0]!r} of the cache; there are {', '.join(KINDS)}.")
    removed = {"files": 0, "bytes": 0}
    for name in parts or [k for k in KINDS if k != "tuned"]:
        for file, count in _files(name):
            file.unlink(missing_ok=True)
            removed["files"] += 1
            removed["bytes"] += count
    if as_json:
        return print_json(removed)
    console().print(f"{removed['files']:,} files removed, {size(removed['bytes'])}")


@cache.command()
@click.argument("programs", nargs=-1, type=PROGRAM)
@device_option
def warm(programs: tuple[Path, ...], device: str | None) -> None:
    """Compile in advance: the pipelines of PROGRAMS or, without any, common operators of the device vulkan.

    The latter trains small networks for one step, needs `pip install lapilli[compile]`, and takes a minute or two."""
    if programs:
        import lapilli

        for path in programs:
            lapilli.load(path, device).close()
            console().print(f"{path}: ready", soft_wrap=True)
        return
    from lapilli.runtime.compiler_packages import require_compiler
    from lapilli.runtime.devices import device_named

    require_compiler()
    index = device_named(device).index
    import torch

    from lapilli.eager.device_registration import announce
    from lapilli.eager.usual import train_usual_models

    announce()  # beside another accelerator too: nothing else runs in this process
    # The usual models name the device "vulkan", which is the current one.
    with torch.get_device_module("vulkan").device(index):
        count = train_usual_models()
    text = f"{count:,} operators were run on vulkan:{index}, forward and backward; their programs are in the cache"
    console().print(text, soft_wrap=True)


def _files(name: str) -> list[tuple[Path, int]]:
    """The files of a part and their bytes, without symbolic links. Pipelines are files beside the folders of the other parts."""
    folder = base() if name == "pipelines" else base() / name
    if folder != base() and folder.is_symlink():
        return []
    wanted = "pipelines-*.bin" if name == "pipelines" else "*"
    return [(path, info.st_size) for path, info in files(folder) if fnmatchcase(path.name, wanted)]


def usage(name: str) -> dict[str, Any]:
    files = _files(name)
    return {"name": name, "files": len(files), "bytes": sum(count for _, count in files)}
