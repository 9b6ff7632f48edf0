"""Measures a system in its environment: python -m runtimes.worker SYSTEM FOLDER. Prints a line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.systems import OPEN, SYSTEMS

NAMES = ("convolutions", "transformer", "products")
RUNS, LEAST = 20, 1.0
"""Runs that are timed at least, and seconds."""


def measured(system: str, folder: Path, name: str) -> dict[str, Any]:
    """Seconds until there is a first result (imports included where this is the first model), median and fastest of a run from
    array to array, and the largest error against float64, relative to the largest value.
    """
    data = np.load(folder / f"{name}.npz")
    x, exact = data["x"], data["y"]
    start = time.perf_counter()
    run = SYSTEMS[system](folder, name)
    got = run(x)
    first = time.perf_counter() - start
    for _ in range(3):
        got = run(x)
    times: list[float] = []
    while len(times) < RUNS or sum(times) < LEAST:
        start = time.perf_counter()
        got = run(x)
        times.append(time.perf_counter() - start)
    error = float(np.abs(got.reshape(exact.shape) - exact).max() / np.abs(exact).max())
    return {
        "first": first,
        "median": statistics.median(times),
        "fastest": min(times),
        "runs": len(times),
        "error": error,
    }


def sizes(system: str, folder: Path) -> dict[str, Any]:
    """One file at three numbers of rows: whether the results are right."""
    run = SYSTEMS[system](folder, "products-open")
    data = np.load(folder / "products.npz")
    for rows in (64, 1, 17):
        got, want = run(np.ascontiguousarray(data["x"][:rows])), data["y"][:rows]
        if got.shape != want.shape or np.abs(got - want).max() > 1e-5 * np.abs(want).max():
            return {"verdict": f"wrong at {rows} rows"}
    return {"verdict": "right"}


def main() -> None:
    system, folder, answers = sys.argv[1], Path(sys.argv[2]), os.dup(1)
    os.dup2(2, 1)  # what libraries print
    told: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {name: partial(measured, system, folder, name) for name in NAMES}
    if system in OPEN:
        parts["open sizes"] = partial(sizes, system, folder)
    for name, part in parts.items():
        try:
            told[name] = part()
        except Exception as error:
            told[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    status = Path("/proc/self/status").read_text()
    told["peak"] = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    os.write(answers, (json.dumps(told) + "\n").encode())


if __name__ == "__main__":
    main()
