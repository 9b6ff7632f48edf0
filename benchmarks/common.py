"""What the benchmarks share: fresh processes, empty caches, medians, tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT.parent / "tools"))


def median(function: Callable[[], object], warmup: int = 3, iterations: int = 20, limit: float = 20.0) -> float:
    """Median seconds of a call; fewer iterations where they would take longer than `limit` seconds."""
    for _ in range(warmup):
        function()
    times: list[float] = []
    end = time.perf_counter() + limit
    while len(times) < iterations and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def apart(found: Any, wanted: Any) -> float:
    """Distance of two tensors or arrays relative to the norm of the second, in float64; infinite for NaN."""
    import torch

    a, b = (torch.as_tensor(x).double().cpu() for x in (found, wanted))
    distance = float((a - b).norm() / b.norm().clamp_min(1e-300))
    return distance if distance == distance else float("inf")


def cuda_graph(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The kernels of a function as a CUDA graph: a call that queues them again, and the function's result, which it changes."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


class Caches:
    """Empty caches for a process and those after it: Lapilli's kernels and pipelines, Mesa's shaders."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="lapilli-bench-")

    def environment(self) -> dict[str, str]:
        """The environment of a process that uses them."""
        return {
            **os.environ,
            "XDG_CACHE_HOME": self.folder.name,
            "MESA_SHADER_CACHE_DIR": f"{self.folder.name}/mesa",
            "__GL_SHADER_DISK_CACHE_PATH": f"{self.folder.name}/nvidia",
            "CUDA_CACHE_PATH": f"{self.folder.name}/cuda",
        }


def fresh(command: Sequence[str], caches: Caches) -> Any:
    """Runs a Python command in a process of its own; its standard output is JSON."""
    done = subprocess.run(
        [sys.executable, *command], env=caches.environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def bench(program: Path, caches: Caches, warmup: int, iterations: int, device: str | None) -> dict[str, Any]:
    """`lapilli bench --json` in a process of its own."""
    command = ["-m", "lapilli.cli", "bench", str(program), "--json", "--warmup", str(warmup), "--iter", str(iterations)]
    result: dict[str, Any] = fresh([*command, *(["--device", device] if device else [])], caches)
    return result


def report(name: str, device: str, columns: Sequence[str], rows: Sequence[Sequence[str]], raw: object) -> None:
    """Prints a Markdown table with date and machine, and keeps it with the raw numbers under `results/`."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    table = "\n".join([line(columns), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])
    head = f"{datetime.date.today()}, {device}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    print(f"\n{head}\n\n{table}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{head}\n\n{table}\n")
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": head, "results": raw}, indent=2))


def cell(seconds: float | None) -> str:
    """Milliseconds for a table."""
    return "" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
