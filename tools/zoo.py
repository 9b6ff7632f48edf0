"""Whole models through export, compiler and device, compared with torch: `make zoo`.

    python tools/zoo.py [--precision fp16] [--every K] [--jobs J] [MODEL...]

MODEL is a name as `--list` shows it, or the beginning of some (timm/ for all of timm). Results go to a file of JSON lines; a
run goes on where the last one stopped, and writes docs/models.md when every model has been measured in fp32. With --precision
fp16, errors are compared with those of torch's half."""

from __future__ import annotations

import argparse
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Measurement, compile_for_device, first_line, measure, measure_half
from workers import Died, Limits, Log, Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "zoo.jsonl"
PAGE = ROOT / "docs" / "models.md"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: weights are random


def work(precision: str, name: str, start: int) -> Iterator[Result]:
    """Measures a model: one step."""
    if start > 0:
        return
    import zoo_models

    logging.disable()
    torch.set_num_threads(1)
    try:
        model, inputs = zoo_models.build(name)
    except Exception as error:
        yield {**Measurement("crash", f"the model cannot be made: {first_line(error)}").as_dict(), "inputs": ""}
        return
    shapes = ", ".join("×".join(map(str, t.shape)) for t in inputs)
    found = measure(model, inputs, compile_for_device) if precision == "fp32" else measure_half(model, inputs)
    yield {**found.as_dict(), "inputs": shapes}


def died(reason: Died) -> Result:
    return {**Measurement("crash", reason.reason).as_dict(), "inputs": ""}


# -- what the table says


def row(name: str, found: Result) -> list[str]:
    cpu = Counter(operator for operator, _ in found["cpu"])
    why = "; ".join(f"{operator}: {reason}" for operator, reason in found["cpu"])
    compiled = found["kernels"] > 0
    ran = found["verdict"] == "right"
    return [
        f"`{name}`",
        found["inputs"],
        found["verdict"],
        str(found["operators"] or ""),
        str(found["kernels"]) if compiled else "",
        segments(found["segments"]) + (f" ({', '.join(cpu)})" if cpu else ""),
        f"{found['arena'] / 1e6:.2f} / {found['arena_bound'] / 1e6:.2f}" if compiled else "",
        f"{found['error']:.1e} / {found['torch_error']:.1e}" if ran else "",
        f"{found['seconds']:.1f}" if compiled else "",
        why if ran else found["reason"],
    ]


def segments(kinds: Sequence[str]) -> str:
    """How many of each kind."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(kinds).items())


def page(tasks: dict[str, Any]) -> str:
    """docs/models.md."""
    found = {name: task["steps"][0] for name, task in tasks.items()}
    families = sorted({name.partition("/")[0] for name in found})
    lines = [
        "# Models",
        "",
        f"Made by `make zoo`: {len(found)} architectures with random weights (MiniLM with its own), small inputs, fp32, on a "
        "software Vulkan device,",
        "compared with torch on the CPU. Errors are relative, in norm, against torch in float64: ours / that of torch's own "
        "fp32. Compile seconds are those",
        "of a shared machine with two cores, and of one plan. Arena: megabytes / the most that are alive at once. *Operators* "
        "are those of the exported graph.",
        "",
        "| family | models | right | GPU alone | refused | wrong | crash | torch.export refuses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in [*families, ""]:
        rows = [f for name, f in found.items() if not family or name.startswith(f"{family}/")]
        counted = Counter(f["verdict"] for f in rows)
        alone = sum(f["verdict"] == "right" and set(f["segments"]) == {"gpu"} for f in rows)
        verdicts = (counted[v] for v in ("refused", "wrong", "crash", "unexportable"))
        cells = [family or "**all**", len(rows), counted["right"], alone, *verdicts]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    head = ("model", "inputs", "verdict", "operators", "kernels", "segments", "arena, MB", "error", "compile, s", "why")
    for family in families:
        lines += ["", f"## {family}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for name in sorted(n for n in found if n.startswith(f"{family}/")):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row(name, found[name])) + " |")
    return "\n".join([*lines, ""])


def show(name: str, steps: list[Result], seconds: float) -> None:
    found = steps[0]
    what = f"{found['kernels']} kernels, {found['error']:.1e}" if found["verdict"] == "right" else found["reason"]
    print(f"{seconds:6.0f} s  {found['verdict']:12} {name:48} {found['seconds']:6.1f} s  {what[:150]}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="names, or beginnings of names; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th model")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="which of them is the first")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="that a model may take")
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--results", type=Path, help="default: build/zoo.jsonl, or build/zoo-fp16.jsonl")
    parser.add_argument("--list", action="store_true", help="only print the names")
    options = parser.parse_args()
    import zoo_models

    missing = zoo_models.missing_packages()
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; tools/setup.sh zoo installs them")
    every = zoo_models.names()
    names = [n for n in every if not options.names or n.startswith(tuple(options.names))][
        options.first :: options.every
    ]
    if options.list:
        print(*names, sep="\n")
        return
    half = options.precision == "fp16"
    log = Log(options.results or RESULTS.with_stem("zoo-fp16" if half else "zoo"))
    log.fill(partial(work, options.precision), names, options.jobs, Limits(options.seconds), died, show)
    print(Counter(log.tasks[name]["steps"][0]["verdict"] for name in names))
    if log.tasks.keys() >= set(every) and not half:
        PAGE.write_text(page({name: log.tasks[name] for name in every}))


if __name__ == "__main__":
    main()
