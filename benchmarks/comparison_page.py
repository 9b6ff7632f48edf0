"""docs/comparison.md from what comparison.py measured: every number on the page comes from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
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
FORMS = ("right", "random", "refused", "wrong", "crash")
"""Verdicts of op_db's samples, from the best to the worst; random: left out."""

HEAD = """# Lapilli beside other ways of running PyTorch on Vulkan

Made by `benchmarks/comparison.py`: each system in an environment of its own, installed by pip with torch 2.13.0, measured by the
same code on lavapipe (Mesa's software Vulkan driver), one after another, with no compiler on the PATH.

- **Lapilli, compiled**: `lapilli.compile` to a program file. **torch.compile**: `backend="vulkan"`. **device**: tensors of the
  device `vulkan`.
- **torchvulkan**: another device `vulkan` outside PyTorch.
- **PyTorch's own** Vulkan backend is not part of the wheels that PyTorch publishes; what they do say is below.
- **ExecuTorch**: its wheel has the half of the Vulkan delegate that works ahead of time (partitioner, serializer), not the runtime,
  which needs a build from source. So its cells say how many of a graph's operators the partitioner gives to the delegate;
  whether their results are right is *not measured here*.

A dash: the system has no such thing, or it was not measured there. *refused*: an exception; the reasons are listed. Results
count as right by the rule of `tools/measure.py`: 1e-5 relative error in float32, or 8 times torch's own error against float64.
"""


def page(installed: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]], results: Results) -> str:
    """The document."""
    return "\n".join([HEAD, *_circumstances(runs), *_install(installed), *_operators(runs, results), *_cases(results),
                      *_dtypes(results), *_models(results), *_training(results), *_features(results)]).rstrip() + "\n"  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows), ""]


def _one(results: Results, system: str, part: str, task: str) -> Result | None:
    steps = results.get(f"{system}.{part}", {}).get(task)
    return steps[0] if steps else None


def _rows(
    results: Results, part: str, systems: Sequence[str], cell: Callable[[Result], str]
) -> tuple[list[list[str]], list[str]]:
    """A row a task, and the reasons of what is not right."""
    names = list(dict.fromkeys(task for s in systems for task in results.get(f"{s}.{part}", {})))
    rows, reasons = [], []
    for name in names:
        found = [_one(results, s, part, name) for s in systems]
        rows.append([name, *("—" if f is None else cell(f) for f in found)])
        reasons += [
            f"- {name}, {COLUMNS[s]}: {f['verdict']}: {_plain(f['reason'])}"
            for s, f in zip(systems, found, strict=True)
            if f and f.get("reason") and f["verdict"] != "right"
        ]
    return rows, [*reasons, ""] if reasons else []


def _plain(text: str) -> str:
    return text.replace("\n", " ").replace("<", "\\<")


def _verdict(found: Result) -> str:
    if found["verdict"] == "not run":
        return f"{found['delegated']} of {found['operators']} operators delegated"
    bold = found["verdict"] in ("wrong", "crash")
    return f"**{found['verdict']}**" if bold else str(found["verdict"])


def _circumstances(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not runs:
        return []
    begun = sorted(run["started"] for run in runs.values())
    loads = [run["load"][0] for run in runs.values() if "load" in run]
    threads = sorted({run["threads"] for run in runs.values() if "threads" in run})
    return [
        f"Measured from {begun[0].replace('T', ' ')} to {begun[-1].replace('T', ' ')} (UTC) on 2 cores; load average at the ends "
        f"of the parts {min(loads):.1f} to {max(loads):.1f}: where it is above 2, others worked on the machine, and times are to be"
        f" compared within a row only. torch's CPU uses {', '.join(map(str, threads))} thread(s); lavapipe uses all cores.",
        "",
    ]


def _install(installed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    commands = {
        "lapilli": "pip install lapilli[compile]",
        "torchvulkan": "pip install torchvulkan",
        "pytorch": "pip install torch; Vulkan: a build of PyTorch from source",
        "executorch": "pip install executorch; its Vulkan runtime: a build from source",
    }
    rows = [
        [
            COLUMNS.get(name, "Lapilli"),
            f"`{commands[name]}`",
            f"{f['wheel'] / 1e6:.1f}",
            str(f["packages"]),
            f"{f['installed'] / 1e6:.0f}",
        ]
        for name, f in installed.items()
        if f["wheel"]
    ]
    head = ["", "what one types", "wheel, MB", "packages beside torch", "installed beside torch, MB"]
    return ["## Installing", "", *table(head, rows), "None of what is measured below needed a compiler.", ""]


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


def _operators(runs: Mapping[str, Mapping[str, Any]], results: Results) -> list[str]:
    rows, failures = [], []
    for system in ("lapilli-eager", "torchvulkan"):
        for part, what in (("operators", "CPU allowed"), ("operators-strict", "strict: the CPU forbidden")):
            tasks = results.get(f"{system}.{part}")
            if not tasks:
                continue
            entries, gradients = tally(tasks)
            count = entries.total() - entries["random"]
            cells = [
                COLUMNS[system],
                what,
                str(count),
                *(str(entries[v]) for v in ("right", "refused", "wrong", "crash")),
            ]
            measured = gradients.total() - gradients["random"]
            rows.append([*cells, f"{gradients['right']} of {measured}"])
            if part == "operators":
                failures.append(f"- {COLUMNS[system]}, not right: {', '.join(_failed(tasks)) or 'none'}.")
    if not rows:
        return []
    every = max(runs[key]["every"] for key in runs if ".operators" in key)
    which = "the entries" if every == 1 else f"every {every}th entry"
    return [
        "## Operators",
        "",
        f"{which.capitalize()} of PyTorch's own operator tests (op_db) that take float32, three samples each, by `tools/eager.py`. "
        "Entries that draw random numbers, drop out, or give tensors without values are left out, and those for CUDA only. "
        "An entry is as its worst sample; eigenvalues in another order than LAPACK's count as wrong. "
        "The compiled route is measured with all samples in [operators.md](operators.md).",
        "",
        *table(["", "", "entries", "right", "refused", "wrong", "crash or no answer in 4 min", "gradients right"], rows),
        *failures,
        "",
    ]  # fmt: skip


def _failed(tasks: Mapping[str, Sequence[Result]]) -> list[str]:
    found = []
    for name, steps in tasks.items():
        bad = [s for s in steps if s["verdict"] in FORMS[2:] and s["sample"] != "backward"]
        if bad and not any("Jiterator" in s["reason"] for s in steps):
            reason = bad[0]["reason"].partition(". ")[0][:110].strip()
            found.append(f"`{name}` ({bad[0]['verdict']}: {_plain(reason)})")
    return found


def _cases(results: Results) -> list[str]:
    systems = [s for s in COLUMNS if s != "pytorch"]
    rows, reasons = _rows(results, "cases", systems, _verdict)
    about = "Cases that systems of this kind have been reported or seen to get wrong."
    return [
        "## Cases that are easy to get wrong",
        "",
        about,
        "",
        *table(["", *(COLUMNS[s] for s in systems)], rows),
        *reasons,
    ]


def _dtypes(results: Results) -> list[str]:
    systems = ["lapilli-compiled", "lapilli-eager", "torchvulkan"]
    rows = []
    for name in results.get("lapilli-eager.dtypes", results.get("torchvulkan.dtypes", {})):
        cells = []
        for system in systems:
            found, strict = (_one(results, system, part, name) for part in ("dtypes", "dtypes-strict"))
            if found is None:
                cells.append("—")
                continue
            on_cpu = bool(found.get("cpu")) if strict is None else strict["verdict"] != "right"
            cells.append(_verdict(found) + (", on the CPU" if on_cpu and found["verdict"] == "right" else ""))
        rows.append([name, *cells])
    about = (
        "Arithmetic, comparison, a sum and (floats) a matrix product. On the CPU: strict mode or the report says so."
    )
    return ["## Dtypes", "", about, "", *table(["", *(COLUMNS[s] for s in systems)], rows)]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _models(results: Results) -> list[str]:
    def cell(found: Result) -> str:
        if "seconds" not in found:
            return _verdict(found)
        ratio = found["seconds"] / found["torch_seconds"]
        speed = f"{_milliseconds(found['seconds'])} ms, {ratio:.2g}× torch's {_milliseconds(found['torch_seconds'])} ms"
        return f"{speed}; error {found['error']:.1g} (torch {found['torch_error']:.1g})" + (
            "" if found["verdict"] == "right" else ", **wrong**"
        )

    systems = [s for s in COLUMNS if s != "pytorch"]
    rows, reasons = _rows(results, "models", systems, cell)
    about = (
        "Batch 1, float32, random weights, from a tensor on the host to a tensor on the host: medians; torch's CPU took turns with "
        "the system in the same process. Errors are relative to torch in float64."
    )
    return ["## Models", "", about, "", *table(["", *(COLUMNS[s] for s in systems)], rows), *reasons]


def _training(results: Results) -> list[str]:
    def cell(found: Result) -> str:
        if "seconds" not in found:
            return _verdict(found)
        ratio = found["seconds"] / found["torch_seconds"]
        speed = f"{_milliseconds(found['seconds'])} ms a step, {ratio:.2g}× torch's {_milliseconds(found['torch_seconds'])} ms"
        return f"{_verdict(found)}: {speed}; losses within {found['apart']:.1g}"

    systems = ["lapilli-torch-compile", "lapilli-eager", "torchvulkan"]
    rows, reasons = _rows(results, "training", systems, cell)
    about = "Twelve steps from the same weights as on the CPU, whose losses they must follow within 1e-3."
    return ["## Training", "", about, "", *table(["", *(COLUMNS[s] for s in systems)], rows), *reasons]


def _features(results: Results) -> list[str]:
    def cell(found: Result) -> str:
        if "again" in found:
            first, again = (" ".join(_milliseconds(t) for t in found[k]) for k in ("first", "again"))
            return f"{_verdict(found)}; ms: {first}; again: {again}"
        if "refused" in found:
            return f"{found['named']} of {found['of']} named by warnings; strict refuses {found['refused']}"
        if "named" in found:
            return f"{found['named']} of {found['of']} operators on the CPU named in the report"
        if "entries" in found:
            backends = ", ".join(found["backends"])
            return f"{found['aten']} ATen operators of {found['entries']} entries; backends of the wheel: {backends}"
        return str(found["value"]) if "value" in found else _verdict(found)

    systems = list(COLUMNS)
    rows, reasons = _rows(results, "features", systems, cell)
    about = (
        "Each line is a check that ran. *sizes*: a convolutional network at four sizes (batch, height and width vary) by one "
        "model or program; times of the first and of the second run at each size. *saving*: weights and results after a round trip."
    )
    return ["## Sizes, saving, reports", "", about, "", *table(["", *(COLUMNS[s] for s in systems)], rows), *reasons]
