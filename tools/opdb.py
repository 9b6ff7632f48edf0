"""Every entry of torch's own operator tests (op_db) through export, compiler and device: `make opdb`.

    python tools/opdb.py [--samples N] [--shard I/K] [--jobs J] [ENTRY...]

Each sample of an entry becomes a module whose tensor arguments are inputs. It is exported and compiled for its own sizes, and
one sample also with every size dynamic, which then runs on other sizes too. Results go to a file of JSON lines; a run goes on
where the last one stopped, and writes docs/operators.md when every entry has been measured."""

from __future__ import annotations

import argparse
import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import opinfo
import torch
from measure import (
    DRAWS,
    Measurement,
    Run,
    Stop,
    Tensors,
    cast,
    compare,
    compare_distributions,
    compile_for_device,
    export,
    interpreted,
    reference,
    results,
    same_kind,
    torch_results,
)
from opinfo import entries, parse_shard, shard
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten
from workers import Died, Limits, Log, Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "opdb.jsonl"
PAGE = ROOT / "docs" / "operators.md"
DYNAMIC = -1
"""The number of the dynamic measurement among the samples of an entry."""

MANY = 100
"""Samples among which the one with most sizes that can be dynamic is looked for."""

UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Entries whose results have no values yet: dtype and shape are compared."""


UP_TO_SIGN = ("linalg.eigh", "linalg.svd", "svd")
"""Operators of which torch's own tests compare absolute values."""


class OperatorCall(torch.nn.Module):
    """A call of an operator; its inputs are the tensors among the arguments."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.leaves, self.spec = function, list(leaves), spec
        self.places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    @classmethod
    def of(cls, entry: Any, sample: Any) -> OperatorCall:
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        function = entry.op
        if entry.name in UP_TO_SIGN:
            function = lambda *args, **kwargs: sample.output_process_fn_grad(entry.op(*args, **kwargs))  # noqa: E731
        return cls(function, [k.detach() if isinstance(k, torch.Tensor) else k for k in leaves], spec)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.leaves[k] for k in self.places]

    def widened(self) -> OperatorCall:
        """The call in float64."""
        return OperatorCall(self.function, [cast(leaf) for leaf in self.leaves], self.spec)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def calls(name: str, limit: int | None) -> list[OperatorCall]:
    """The samples of an entry, up to `limit` spread over them; the same at every call."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    entry = entries()[name]
    samples = list(opinfo.samples(entry, torch.float32))
    if limit is not None and len(samples) > limit:
        samples = [samples[k * len(samples) // limit] for k in range(limit)]
    return [OperatorCall.of(entry, sample) for sample in samples]


def work(limit: int | None, without_device: bool, name: str, start: int) -> Iterator[Result]:
    """Measures an entry: first with dynamic sizes, then its samples."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    compile = interpreted if without_device else compile_for_device
    try:
        samples = calls(name, limit)
        richest = max(calls(name, MANY), key=_free_sizes)
    except Exception as error:  # a package that they need is not there, or there are none
        yield {"sample": 0, **Measurement("unexportable", f"torch has no samples here: {error}").as_dict()}
        return
    for k in range(start - 1, len(samples)):
        if k == DYNAMIC:
            found = dynamic(name, richest, compile)
        else:
            found = static(name, samples[k], compile)
        yield {"sample": k, **found.as_dict()}


def _free_sizes(call: OperatorCall) -> int:
    """How many sizes torch.export may leave open."""
    return sum(size > 1 for tensor in call.inputs for size in tensor.shape)


def static(name: str, call: OperatorCall, compile: Callable[[ExportedProgram, Measurement], Run]) -> Measurement:
    """A sample, with its own sizes."""
    found = Measurement()
    try:
        check(name, call, call.inputs, compile(export(call, call.inputs), found), found)
    except Stop as stop:
        found.verdict, found.reason = stop.verdict, stop.reason
    return found


SEARCHES = ("searchsorted", "bucketize")
"""Operators whose result is not defined where what they search is not in order: they run on their own sizes only."""


def dynamic(name: str, call: OperatorCall, compile: Callable[[ExportedProgram, Measurement], Run]) -> Measurement:
    """A sample with every size open, on its own sizes and on others."""
    found = Measurement()
    try:
        shapes = tuple({d: Dim.AUTO for d in range(t.dim())} for t in call.inputs)
        exported = export(call, call.inputs, (shapes,))
        others = other_sizes(exported, call.inputs)
        if others is None:
            raise Stop("unexportable", "torch.export fixes every size")
        if name in SEARCHES:
            others = call.inputs
        run = compile(exported, found)
        for inputs in (call.inputs, others):
            check(name, call, inputs, run, found)
    except Stop as stop:
        found.verdict, found.reason = stop.verdict, stop.reason
    return found


def other_sizes(exported: ExportedProgram, inputs: Tensors) -> list[torch.Tensor] | None:
    """Inputs with one more element along every open dimension, where the program accepts them (else as they are); None when
    no size is open."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    shapes = [nodes[name].meta["val"].shape for name in exported.graph_signature.user_inputs]
    sizes = {
        size.node.expr: given
        for shape, tensor in zip(shapes, inputs, strict=True)
        for size, given in zip(shape, tensor.shape, strict=True)
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
    }
    if not sizes:
        return None
    more = {symbol: size + 1 for symbol, size in sizes.items()}
    grown = []
    for shape, tensor in zip(shapes, inputs, strict=True):
        for d, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                tensor = _extended(tensor, d, int(size.node.expr.subs(more)))
        grown.append(tensor)
    try:
        with torch.no_grad():
            exported.module()(*(t.clone() for t in grown))
    except Exception:
        return list(inputs)
    return grown


def _extended(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """With its first elements again at the end of a dimension; floats a little smaller, for equal ones have no one order."""
    places = torch.arange(size)
    longer = tensor.index_select(dim, places % max(1, tensor.shape[dim]))
    if not longer.is_floating_point():
        return longer
    scale = torch.where(places < tensor.shape[dim], 1.0, 0.97).to(tensor.dtype)
    return longer * scale.reshape([-1 if d == dim else 1 for d in range(tensor.dim())])


def check(name: str, call: OperatorCall, inputs: Tensors, run: Run, found: Measurement) -> None:
    """Raises Stop("wrong") where the program does not do what torch does."""
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    want = torch_results(call, inputs)
    if name.partition(".")[0] in UNINITIALISED:
        for ours, theirs in zip(results(run, inputs), want, strict=True):
            same_kind(ours, theirs)
    elif torch.equal(torch.get_rng_state(), seeded):
        compare(results(run, inputs), want, reference(call, inputs, want, OperatorCall.widened), found)
    else:  # random numbers were drawn
        compare_distributions(
            [results(run, inputs) for _ in range(DRAWS)], [torch_results(call, inputs) for _ in range(DRAWS)]
        )


# -- what the table says


def verdict(steps: Sequence[Result]) -> str:
    """An entry is as its worst sample that torch.export accepts."""
    found = {step["verdict"] for step in steps}
    return next((v for v in ("crash", "wrong", "refused", "right") if v in found), "unexportable")


def place(steps: Sequence[Result]) -> str:
    """Where an entry's samples run."""
    operators = sorted({operator for step in steps for operator, _ in step["cpu"]})
    if not any(step["segments"] for step in steps):
        return ""
    return "CPU: " + ", ".join(operators) if operators else "GPU"


def row(name: str, steps: Sequence[Result]) -> list[str]:
    """Entry, samples right of those that torch.export accepts, dynamic, where, why."""
    samples = [s for s in steps if s["sample"] != DYNAMIC]
    accepted = [s for s in samples if s["verdict"] != "unexportable"]
    right = sum(s["verdict"] == "right" for s in accepted)
    grown = next((s["verdict"] for s in steps if s["sample"] == DYNAMIC), "")
    bad = [s for v in ("crash", "wrong", "refused") for s in steps if s["verdict"] == v]
    bad += steps[:1] if not accepted else []
    reasons = sorted({reason for s in steps for _, reason in s["cpu"]})
    if bad:
        reasons = [f"{bad[0]['verdict']}: {bad[0]['reason']}", *reasons]
    return [f"`{name}`", f"{right}/{len(accepted)}", grown, place(steps), "; ".join(reasons)]


def page(tasks: dict[str, Any]) -> str:
    """docs/operators.md."""
    rows, static_, dynamic_, places = [], Counter[str](), Counter[str](), Counter[str]()
    for name in sorted(tasks):
        steps = tasks[name]["steps"]
        samples = [s for s in steps if s["sample"] != DYNAMIC]
        static_[verdict(samples)] += 1
        dynamic_[next((s["verdict"] for s in steps if s["sample"] == DYNAMIC), "unexportable")] += 1
        if verdict(samples) == "right":
            places[place(samples).partition(":")[0]] += 1
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row(name, steps)) + " |")
    samples_ = [s for t in tasks.values() for s in t["steps"] if s["sample"] != DYNAMIC]
    counted = Counter(s["verdict"] for s in samples_)

    def totals(found: Counter[str]) -> str:
        return ", ".join(f"{found[v]} {v}" for v in ("right", "refused", "wrong", "crash", "unexportable") if found[v])

    return "\n".join(
        [
            "# Operators",
            "",
            f"Made by `make opdb`: the {len(tasks)} entries of PyTorch {torch.__version__.partition('+')[0]}'s own operator "
            "tests (op_db) that take float32,",
            "each sample exported, compiled, run on a Vulkan device and compared with torch on the CPU (tools/measure.py has "
            "the bounds).",
            "",
            f"- Entries, sizes fixed: {totals(static_)}.",
            f"- Of the right ones: {places['GPU']} run on the GPU alone, {places['CPU']} with a part on the CPU.",
            f"- Entries, sizes dynamic: {totals(dynamic_)}.",
            f"- Samples: {totals(counted)}.",
            "",
            "*unexportable*: torch.export refuses it (results whose Python type or control flow depends on data). *refused*: "
            "Lapilli says why it does not.",
            "",
            "| entry | samples right | dynamic sizes | runs on | why |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def died(reason: Died) -> Result:
    return {"sample": 0, **Measurement("crash", reason.reason).as_dict()}


def show(name: str, steps: list[Result], seconds: float) -> None:
    cells = row(name, steps)
    print(f"{seconds:6.0f} s  {verdict(steps):12} {name:40} {cells[1]:>6} {cells[2]:12} {cells[4][:140]}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ENTRY", help="default: all")
    parser.add_argument("--samples", type=int, metavar="N", help="at most N samples of an entry, spread over them")
    parser.add_argument(
        "--shard", type=parse_shard, default=(1, 0), metavar="I/K", help="one of K parts of the entries"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a sample may take")
    parser.add_argument("--interpret", action="store_true", help="run the kernel IR in NumPy: no device, quick")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in entries()]
    if unknown:
        parser.error(f"no such entries: {', '.join(unknown)}")
    log = Log(options.results)
    names = options.names or shard(entries(), *options.shard)
    log.fill(
        partial(work, options.samples, options.interpret), names, options.jobs, Limits(options.seconds), died, show
    )
    print(Counter(verdict(log.tasks[name]["steps"]) for name in names))
    if log.tasks.keys() >= entries().keys() and not options.interpret:
        PAGE.write_text(page({name: log.tasks[name] for name in entries()}))


if __name__ == "__main__":
    main()
