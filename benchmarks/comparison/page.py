"""docs/comparison.md from what was measured: every number on the page comes from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, Any]]
"""By "system.part": when, how long, how busy the machine was."""
Results = Mapping[str, Mapping[str, Sequence[Result]]]
"""By "system.part" and task: the steps."""

COLUMNS = {
    "lapilli-compiled": "Lapilli, compiled",
    "lapilli-torch-compile": "Lapilli, torch.compile",
    "lapilli-eager": "Lapilli, device",
    "torchvulkan": "torchvulkan 0.2.1",
    "pytorch": "PyTorch's own (wheel)",
    "executorch": "ExecuTorch 1.5.1 (wheel)",
}
COMPUTING = [system for system in COLUMNS if system != "pytorch"]
FORMS = ("right", "random", "refused", "wrong", "crash", "not measured")
"""Verdicts of op_db's samples, from the best to the worst; random: left out."""

OTHERS = 0.2
"""Cores that others may use on average before the page says that the machine was busy."""

HEAD = """# Lapilli beside other ways of running PyTorch on Vulkan

Made by `make comparison`: each system in an environment of its own, installed by pip with torch 2.13.0, measured by the
same code on lavapipe (Mesa's software Vulkan driver), one after another, with no compiler on the PATH.

- **Lapilli, compiled**: `lapilli.compile` to a program file. **torch.compile**: `backend="vulkan"`. **device**: tensors of the
  device `vulkan`.
- [Other runtimes](runtimes.md) of models (onnxruntime, ncnn, ExecuTorch, tinygrad, MLX) have a page of their own.
- **torchvulkan**: another device `vulkan` outside PyTorch.
- **PyTorch's own** Vulkan backend is not part of the wheels that PyTorch publishes; what they do say is below.
- **ExecuTorch**: its wheel has the half of the Vulkan delegate that works ahead of time (partitioner, serializer), not the runtime,
  which needs a build from source. So its cells say how many of a graph's operators the partitioner gives to the delegate;
  whether their results are right is *not measured here*.

A dash: the system has no such thing. *refused*: an exception; *crash*: the process died, or gave no answer in time; reasons are
listed. Results count as right by the rule of `tools/measure.py`: 1e-5 relative error in float32, or 8 times torch's own error
against float64.
"""


def page(installed: Mapping[str, Mapping[str, Any]], runs: Runs, results: Results) -> str:
    """The document."""
    parts = [
        [HEAD],
        _circumstances(runs),
        _install(installed),
        _operators(runs, results),
        _section(
            "Cases that are easy to get wrong",
            "Cases that systems of this kind have been reported or seen to get wrong.",
            *_rows(results, "cases", COMPUTING, _verdict),
        ),
        _dtypes(results),
        _section(
            "Models",
            "Batch 1, float32, random weights, from a tensor on the host to a tensor on the host: medians; torch's CPU took turns "
            "with the system in the same process. Errors are relative to torch in float64.",
            *_rows(results, "models", COMPUTING, _times),
        ),
        _section(
            "Training",
            "Twelve steps from the same weights as on the CPU, whose losses they must follow within 1e-3; medians of a step.",
            *_rows(results, "training", ["lapilli-torch-compile", "lapilli-eager", "torchvulkan"], _times),
        ),
        _section(
            "Sizes, saving, reports",
            "Each line is a check that ran. *sizes*: a convolutional network at four sizes (batch, height and width vary) by one "
            "model or program; times of the first and of the second run at each size. *saving*: weights and results after a round "
            "trip. *fallbacks named*: of three operators that the system runs on the CPU, those of which it says so unasked.",
            *_rows(results, "features", list(COLUMNS), _feature),
        ),
    ]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


# -- tables


def _section(title: str, about: str, table: Sequence[str], reasons: Sequence[str] = ()) -> list[str]:
    return [f"## {title}", "", about, "", *table, *reasons]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows), ""]


def _rows(
    results: Results, part: str, systems: Sequence[str], cell: Callable[[Result], str]
) -> tuple[list[str], list[str]]:
    """A table with a row a task and a column a system, and the reasons of what is not right."""
    rows, reasons = [], []
    for name in _names(results, part, systems):
        found = {s: _first(results, s, part, name) for s in systems}
        rows.append([name, *(_missing(results, s, part) if f is None else cell(f) for s, f in found.items())])
        reasons += [
            f"- {name}, {COLUMNS[s]}: {f['verdict']}: {_plain(f['reason'])}"
            for s, f in found.items()
            if f and f.get("reason") and f["verdict"] != "right"
        ]
    return _table(["", *(COLUMNS[s] for s in systems)], rows), [*reasons, ""] if reasons else []


def _names(results: Results, part: str, systems: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(task for s in systems for task in results.get(f"{s}.{part}", {})))


def _first(results: Results, system: str, part: str, task: str) -> Result | None:
    steps = results.get(f"{system}.{part}", {}).get(task)
    return steps[0] if steps else None


def _missing(results: Results, system: str, part: str) -> str:
    """Each system has checks of its own; of all else every system should have been asked."""
    return "—" if part == "features" and results.get(f"{system}.{part}") else "not measured"


def _plain(text: str) -> str:
    return text.replace("\n", " ").replace("<", "\\<")


def _verdict(found: Result) -> str:
    if found["verdict"] == "not run":
        return f"{found['delegated']} of {found['operators']} operators delegated"
    bold = found["verdict"] in ("wrong", "crash")
    return f"**{found['verdict']}**" if bold else str(found["verdict"])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _times(found: Result) -> str:
    """A model's time, or that of a step of training, and how near its results are."""
    if "seconds" not in found:
        return _verdict(found)
    ratio = found["seconds"] / found["torch_seconds"]
    speed = f"{_milliseconds(found['seconds'])} ms, {ratio:.2g}× torch's {_milliseconds(found['torch_seconds'])} ms"
    if "apart" in found:
        near = f"losses within {found['apart']:.1g}"
    else:
        near = f"error {found['error']:.1g} (torch {found['torch_error']:.1g})"
    return f"{speed}; {near}" + ("" if found["verdict"] == "right" else ", **wrong**")


def _feature(found: Result) -> str:
    if "again" in found:
        first, again = (" ".join(_milliseconds(t) for t in found[k]) for k in ("first", "again"))
        return f"{_verdict(found)}; ms: {first}; again: {again}"
    if "refused" in found:
        return f"{found['named']} of {found['of']} named by warnings; strict refuses {found['refused']}"
    if "named" in found:
        return f"{found['named']} of {found['of']} named in the report"
    if "entries" in found:
        backends = ", ".join(found["backends"])
        return f"{found['aten']} ATen operators of {found['entries']} entries; backends of the wheel: {backends}"
    return str(found["value"]) if "value" in found else _verdict(found)


# -- what is not a table of systems


def _circumstances(runs: Runs) -> list[str]:
    if not runs:
        return ["Nothing has been measured yet.", ""]
    ordered = sorted(runs.values(), key=lambda run: str(run["started"]))
    minutes = sum(run["seconds"] for run in ordered) / 60
    threads = sorted({run["threads"] for run in ordered if "threads" in run})
    others = max(run["others"] for run in ordered)
    lines = [
        f"Measured from {ordered[0]['started']} to {ordered[-1]['started']} (UTC), {minutes:.0f} minutes, on "
        f"{ordered[0]['cores']} cores. Load average at the start {ordered[0]['load'][0]:.1f}, at the end "
        f"{ordered[-1]['load'][1]:.1f}; other programs used {others:.2f} cores at most, on average over a part. torch's CPU uses "
        f"one thread or {', '.join(map(str, threads))}, whichever is faster; lavapipe uses all cores.",
        "",
    ]
    if others > OTHERS:
        lines += ["**The machine was busy with other work**: times are to be compared within a row only.", ""]
    failed = [f"{key} ({run['failed']})" for key, run in runs.items() if "failed" in run]
    return [*lines, f"Not measured, for the worker ended: {', '.join(failed)}.", ""] if failed else lines


def _install(installed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    commands = {
        "lapilli": "pip install lapilli[compile]",
        "torchvulkan": "pip install torchvulkan",
        "pytorch": "pip install torch; Vulkan: a build of PyTorch from source",
        "executorch": "pip install executorch; its Vulkan runtime: a build from source",
    }
    rows = []
    for name, found in installed.items():
        if "failed" in found:
            cells = [f"not measured: {_plain(found['failed'])}", "", ""]
        elif found["wheel"]:
            cells = [f"{found['wheel'] / 1e6:.1f}", str(found["packages"]), f"{found['installed'] / 1e6:.0f}"]
        else:
            cells = ["torch's own", "0", "0"]
        rows.append([COLUMNS.get(name, "Lapilli"), f"`{commands[name]}`", *cells])
    head = ["", "what one types", "wheel, MB", "packages beside torch", "installed beside torch, MB"]
    return _section("Installing", "None of what is measured below needed a compiler.", _table(head, rows))


def tally(tasks: Mapping[str, Sequence[Result]]) -> tuple[Counter[str], Counter[str]]:
    """Entries by verdict, each as its worst sample, and gradients by verdict."""
    entries: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for steps in tasks.values():
        if any("Jiterator" in s["reason"] for s in steps):
            continue  # for CUDA only
        samples = [s["verdict"] for s in steps if s["sample"] != "backward"]
        entries[max(samples, key=FORMS.index, default="random")] += 1
        gradients.update(s["verdict"] for s in steps if s["sample"] == "backward")
    return entries, gradients


def _operators(runs: Runs, results: Results) -> list[str]:
    rows, failures, measured = [], [], []
    for system in ("lapilli-eager", "torchvulkan"):
        for part, what in (("operators", "CPU allowed"), ("operators-strict", "strict: the CPU forbidden")):
            key = f"{system}.{part}"
            if not results.get(key):
                rows.append([COLUMNS[system], what, *[""] * 5, "not measured", ""])
                continue
            measured.append(runs[key])
            entries, gradients = tally(results[key])
            counts = [entries.total() - entries["random"], *(entries[v] for v in FORMS if v != "random")]
            pulled = gradients.total() - gradients["random"]
            rows.append([COLUMNS[system], what, *map(str, counts), f"{gradients['right']} of {pulled}"])
            if part == "operators":
                failures.append(f"- {COLUMNS[system]}, not right: {', '.join(_failed(results[key])) or 'none'}.")
    every, samples = (max((run[k] for run in measured), default=1) for k in ("every", "samples"))
    which = "The entries" if every == 1 else f"One in {every} of the entries"
    return _section(
        "Operators",
        f"{which} of PyTorch's own operator tests (op_db) that take float32, at most {samples} of each one's samples, by "
        "`tools/eager.py`. Entries that draw random numbers, drop out, or give tensors without values are left out, and those "
        "for CUDA only. An entry is as its worst sample; eigenvalues in another order than LAPACK's count as wrong; *crash*: an "
        "exception that is no refusal, the end of the process, or no answer in time. "
        "The compiled route is measured with all samples in [operators.md](operators.md).",
        _table(["", "", "entries", "right", "refused", "wrong", "crash", "not measured", "gradients right"], rows),
        [*failures, ""],
    )


def _failed(tasks: Mapping[str, Sequence[Result]]) -> list[str]:
    found = []
    for name, steps in tasks.items():
        bad = [s for s in steps if s["verdict"] in ("refused", "wrong", "crash") and s["sample"] != "backward"]
        if bad and not any("Jiterator" in s["reason"] for s in steps):
            reason = bad[0]["reason"].partition(". ")[0][:110].strip()
            found.append(f"`{name}` ({bad[0]['verdict']}: {_plain(reason)})")
    return found


def _dtypes(results: Results) -> list[str]:
    systems = ["lapilli-compiled", "lapilli-eager", "torchvulkan"]
    rows = []
    for name in _names(results, "dtypes", systems):
        cells = []
        for system in systems:
            found, strict = (_first(results, system, part, name) for part in ("dtypes", "dtypes-strict"))
            cells.append("not measured" if found is None else _verdict(found) + _place(found, strict))
        rows.append([name, *cells])
    about = (
        "Arithmetic, comparison, a sum and (floats) a matrix product. On the CPU: strict mode or the report says so."
    )
    return _section("Dtypes", about, _table(["", *(COLUMNS[s] for s in systems)], rows))


def _place(found: Result, strict: Result | None) -> str:
    """Whether the CPU computed what is right: says the report, or strict mode, which refuses then."""
    if found["verdict"] != "right":
        return ""
    if strict is None:
        return ("", ", on the CPU")[bool(found["cpu"])] if "cpu" in found else ", strict mode not measured"
    return {"right": "", "refused": ", on the CPU"}.get(strict["verdict"], f", strict: {strict['verdict']}")
