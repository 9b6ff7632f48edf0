"""`lapilli report`: what a report of a fault needs to say about the machine and a program, and nothing that is private."""

from __future__ import annotations

import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from lapilli.cli.common import PROGRAM, console, json_option, print_json

PACKAGES = (
    "numpy", "cffi", "click", "rich", "pillow", "torch", "slangtorch", "flatbuffers", "onnx", "torchao", "ray", "pyarrow",
)  # fmt: skip
_SHOWN = ("LAPILLI_", "VK_", "MESA_", "LP_")
"""Environment variables that change what happens begin with these."""


@click.command()
@click.argument("program", required=False, type=PROGRAM)
@json_option
def report(program: Path | None, as_json: bool) -> None:
    """Print what a report of a fault needs: versions, devices, drivers, caches and, of PROGRAM, types, sizes and kernels.

    It has no weights, no names that you gave, and no paths; read it before you send it."""
    found = {"versions": _versions(), "environment": _environment(), "devices": _devices(), "caches": _caches()}
    if program is not None:
        found["program"] = redacted(program)
    if as_json:
        print_json(found)
        return
    for name, part in found.items():
        console().print(f"## {name}")
        for line in _lines(part):
            console().print(line, soft_wrap=True)


def _versions() -> dict[str, str]:
    from lapilli import player
    from lapilli.format.container import FORMAT_VERSION
    from lapilli.version import __version__

    made = {
        "lapilli": __version__,
        "player": player.version(),
        "file format": str(FORMAT_VERSION),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
    }
    for name in PACKAGES:
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            continue
    return made


def _environment() -> dict[str, str]:
    return {name: _without_paths(value) for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)}


def _without_paths(text: str) -> str:
    """Paths by their last parts, which say which driver or layer it is."""
    return os.pathsep.join(os.path.basename(part) if os.sep in part else part for part in text.split(os.pathsep))


def _devices() -> list[dict[str, Any]] | str:
    from lapilli.errors import LapilliError
    from lapilli.runtime.devices import devices

    try:
        found = devices()
    except LapilliError as error:
        return f"{type(error).__name__}: {error}"
    return [
        {
            "name": device.name, "type": device.type, "driver": device.driver, "driver_version": device.driver_version,
            "vulkan": device.api_version, "vendor": device.vendor_id, "memory": device.memory,
            "features": [name for name, there in device.features.items() if there], "limits": dict(device.limits),
        }
        for device in found
    ]  # fmt: skip


def _caches() -> dict[str, Any]:
    from lapilli.cli.cache import KINDS, usage

    return {name: {key: value for key, value in usage(name).items() if key != "name"} for name in KINDS}


def redacted(path: Path) -> dict[str, Any]:
    """A program without names, weights and metadata: what its kernels, sizes and types are."""
    from lapilli.runtime.description import Description

    program = Description.of(path)
    methods = []
    for method in program.methods:
        names = {symbol.name: f"size{k}" for k, symbol in enumerate(method.symbols)}
        methods.append({
            "inputs": [_tensor(spec, names) for spec in method.inputs],
            "outputs": [_tensor(spec, names) for spec in method.outputs],
            "sizes": {names[s.name]: [s.min, s.max] for s in method.symbols},
            "plans": [
                {"name": plan.name, "dispatches": len(plan.run), "kernels": dict(Counter(d.kernel for d in plan.run))}
                for plan in method.plans
            ],
        })  # fmt: skip
    return {
        "bytes": path.stat().st_size,
        "producer": program.producer,
        "methods": methods,
        "constants": {"count": len(program.constants), "bytes": sum(c.size for c in program.constants),
                      "types": dict(Counter(c.dtype for c in program.constants))},
        "states": [_tensor(spec, {}) for spec in program.states],
        "host operators": dict(Counter(map(_operator, program.host_operators))),
        "metadata": {"entries": len(program.metadata), "characters": sum(map(len, program.metadata.values()))},
    }  # fmt: skip


def _operator(name: str) -> str:
    return name if name.startswith(("aten.", "prims.", "torchvision.")) else "of another package"


def _tensor(spec: Any, names: dict[str, str]) -> str:
    sizes = [str(size) if isinstance(size, int) else names.get(str(size), "computed") for size in spec.shape]
    return f"{spec.dtype}[{', '.join(sizes)}]"


def _lines(value: Any, depth: int = 0) -> list[str]:
    """A value as a nested list."""
    space = "  " * depth
    if isinstance(value, dict):
        lines = []
        for name, part in value.items():
            simple = not isinstance(part, dict | list) or all(not isinstance(p, dict | list) for p in _parts(part))
            lines += (
                [f"{space}- {name}: {_inline(part)}"] if simple else [f"{space}- {name}:", *_lines(part, depth + 1)]
            )
        return lines
    if isinstance(value, list):
        return [
            line for part in value for line in (_lines(part, depth) if isinstance(part, dict) else [f"{space}- {part}"])
        ]
    return [f"{space}{value}"]


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items()) or "none"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
