"""Lapilli beside the other ways of running PyTorch on Vulkan: measures all in one run, and writes docs/comparison.md.

    make comparison                              everything: some minutes of installing, then at most --minutes of measuring
    make comparison ARGS="--parts models"        a part of it anew; what was measured before is kept
    make comparison ARGS=--parts                 only writes the page

Measurements run in the systems' environments, one after another, with no compiler on the PATH."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS

from comparison import machine
from comparison.environments import BUILD, ENVIRONMENTS, REPOSITORY, environment_of, install
from comparison.page import page

SECONDS = {
    "cases": (60, 150),
    "dtypes": (60, 60),
    "dtypes-strict": (60, 60),
    "models": (150, 240),
    "training": (90, 120),
    "features": (60, 120),
    "operators": (30, 480),
    "operators-strict": (30, 480),
}
"""Of a part, in the order of the run: seconds that one of its measurements may take, and after which none is begun."""

EAGER = tuple(SECONDS)
SYSTEMS: dict[str, tuple[str, ...]] = {
    "lapilli-compiled": ("cases", "dtypes", "models", "features"),
    "lapilli-torch-compile": ("cases", "models", "training", "features"),
    "lapilli-eager": EAGER,
    "torchvulkan": EAGER,
    "pytorch": ("features",),
    "executorch": ("cases", "models", "features"),
}
"""What is measured of each system."""


def measure(system: str, part: str, left: float, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a worker: how long it took, and how busy the machine was; {"failed": …} where it could not run.

    left: seconds that the whole run has."""
    name = environment_of(system)
    file = BUILD / f"{system}.{part}.jsonl"
    file.unlink(missing_ok=True)
    folder = BUILD / name
    # torch's C++ compiler would be found on the PATH; of the shell's commands only those of the environment are left.
    settings = {**os.environ, "PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(BUILD / f"{name}-cache")}
    settings["PYTHONPATH"] = f"{REPOSITORY / 'benchmarks'}:{REPOSITORY / 'tools'}"
    settings["OMP_NUM_THREADS"] = str(options.threads)
    if name != "lapilli":
        settings["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    step, total = SECONDS[part]
    untimed = part.startswith("operators") or system == "executorch"
    limits = ["--step", str(step), "--total", str(max(0.0, min(total, left))), "--samples", str(options.samples)]
    limits += ["--every", str(options.every), "--jobs", str(options.jobs if untimed else 1)]
    worker = [folder / "bin" / "python", "-m", "comparison.worker", system, part, file, *limits]
    started, start, load, others = (
        datetime.datetime.now(datetime.UTC),
        time.perf_counter(),
        machine.load(),
        machine.watch(),
    )
    print(f"== {system}: {part}", file=sys.stderr, flush=True)
    done = subprocess.run([str(w) for w in worker], env=settings, stdout=subprocess.PIPE, text=True)
    told = (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": f"exit code {done.returncode}"}
    )
    return told | {
        "started": started.strftime("%Y-%m-%d %H:%M"),
        "seconds": time.perf_counter() - start,
        "load": (load, machine.load()),
        "others": others(),
        "every": options.every,
        "samples": options.samples,
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--parts", nargs="*", default=list(SECONDS), choices=list(SECONDS))
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="of measuring; what is not begun then is not measured"
    )
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="at most N samples of an entry of op_db")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="one of K entries of op_db, for a quick look")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="op_db's entries, and ExecuTorch's lowerings, at a time"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch's CPU")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    installed = {name: install(name) for name in ENVIRONMENTS}
    notes = BUILD / "runs.json"
    runs: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    until = time.monotonic() + 60 * options.minutes
    for part in options.parts:  # the systems take turns, so that they meet the same machine
        for system in options.systems:
            if part in SYSTEMS[system] and "failed" not in installed[environment_of(system)]:
                runs[f"{system}.{part}"] = measure(system, part, until - time.monotonic(), options)
                notes.write_text(json.dumps(runs, indent=1))
    results = {key: _results(BUILD / f"{key}.jsonl") for key in runs}
    RESULTS.mkdir(exist_ok=True)
    told = {"installed": installed, "runs": runs, "results": results}
    (RESULTS / "comparison.json").write_text(json.dumps(told, indent=1))
    (REPOSITORY / "docs" / "comparison.md").write_text(page(installed, runs, results))
    print("docs/comparison.md is written")


def _results(file: Path) -> dict[str, Any]:
    """The steps of a part's tasks, by name."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["task"]: entry["steps"] for entry in map(json.loads, lines)}


if __name__ == "__main__":
    main()
