"""Every entry of torch's own operator tests (op_db) on tensors of the vulkan device: `make eager`.

    python tools/eager.py [--samples N] [--strict] [--shard I/K] [--jobs J] [ENTRY...]

Each sample's tensors go to the device, the operator is called there, and its results are compared with those of the CPU; the
gradients of one sample too. Entries that draw random numbers, and those whose results have no values yet, are left out. Results go
to a file of JSON lines, and a run goes on where the last one stopped. When every entry has been measured with and without
--strict (no operator may run on the CPU then), it writes the table docs/eager_operators.md."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import opinfo
import torch
from measure import Measurement, Stop, compare, first_line, reference, same_kind, torch_results
from opdb import UNINITIALISED, OperatorCall, calls
from opinfo import entries, parse_shard, shard
from torch.utils._pytree import tree_leaves
from workers import Died, Limits, Log, Result

from lapilli import autoload

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "eager_operators.md"
BACKWARD = "backward"

HOST_INDICES = ("tensor_split",)
"""Entries whose tensors of indices PyTorch wants on the CPU, whatever the device."""

FORMS = ("right", "random", "refused", "wrong", "crash")
"""Verdicts from the best to the worst: random entries are left out; refused: strict mode says why not."""


@dataclass
class Found:
    """Of a sample, by number, or of the gradients: the verdict with its reason, and why operators ran on the CPU."""

    sample: int | str
    verdict: str = "right"
    reason: str = ""
    cpu: dict[str, str] = field(default_factory=dict)


def work(limit: int, strict: bool, name: str, start: int) -> Iterator[Result]:
    """Measures an entry: its samples, then gradients."""
    os.environ["LAPILLI_STRICT"] = str(int(strict))
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    if not hasattr(torch, "vulkan"):  # in an installed package the entry point has done so
        autoload.register()
    try:
        samples = calls(name, limit)
    except Exception as error:  # a package that they need is not there, or there are none
        yield asdict(Found(0, "random", f"torch has no samples here: {error}"))
        return
    steps: list[Callable[[], Found]] = [partial(forward, name, k, call) for k, call in enumerate(samples)]
    if entries()[name].supports_autograd:
        steps.append(partial(backward, name, limit))
    for step in steps[start:]:
        yield asdict(step())


def forward(name: str, k: int, call: OperatorCall) -> Found:
    return _judged(Found(k), lambda found: _forward(name, call))


def backward(name: str, limit: int) -> Found:
    return _judged(Found(BACKWARD), lambda found: _backward(name, limit))


def _judged(found: Found, measure: Callable[[Found], None]) -> Found:
    from lapilli.eager.fallback import fallbacks, reasons, reset_fallbacks

    reset_fallbacks()
    try:
        measure(found)
    except Stop as stop:
        found.verdict, found.reason = stop.verdict if stop.verdict in FORMS else "random", stop.reason
    except NotImplementedError as error:
        found.verdict, found.reason = "refused", first_line(error)
    except Exception as error:
        found.verdict, found.reason = "crash", first_line(error)
    found.cpu = {name: reasons[name] for name in sorted(fallbacks())}
    return found


def _forward(name: str, call: OperatorCall) -> None:
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    inputs = call.inputs
    want = torch_results(call, inputs)
    if not torch.equal(torch.get_rng_state(), seeded):
        raise Stop("random", "draws random numbers")
    moved = [_moved(name, x) for x in inputs]
    with torch.no_grad():
        results = tree_leaves(_on_device(call)(*moved))
    got = [_on_host(x) for x in results] + [x.cpu() for x in moved]
    if name.partition(".")[0] in UNINITIALISED:
        raise Stop("random", "results without values")
    agree(got, want, lambda: reference(call, inputs, want, OperatorCall.widened))


def _moved(name: str, x: torch.Tensor) -> torch.Tensor:
    return x if name in HOST_INDICES and not x.is_floating_point() else x.to("vulkan")


def _on_device(call: OperatorCall) -> OperatorCall:
    """The call where devices among its arguments are the vulkan device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) or leaf == "cpu":
            return torch.device("vulkan")
        return leaf

    return OperatorCall(call.function, [moved(leaf) for leaf in call.leaves], call.spec)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "vulkan":
            raise Stop("wrong", f"a result is on {leaf.device}")
        return leaf.cpu()
    return leaf


def agree(got: Sequence[Any], want: Sequence[Any], exact: Callable[[], list[Any] | None]) -> None:
    """Raises Stop("wrong") where results differ by more than torch's own tests allow, unless they are as near to what float64
    gives as torch's are."""
    if len(got) == len(want):
        for ours, theirs in zip(got, want, strict=True):
            if isinstance(theirs, torch.Tensor):
                same_kind(ours, theirs)
        try:
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
            return
        except AssertionError:
            pass
    compare(got, want, exact(), Measurement())


def _backward(name: str, limit: int) -> None:
    """Gradients of the first sample that has some, for given gradients of its results."""
    torch.manual_seed(1)
    entry = entries()[name]
    for sample in itertools.islice(opinfo.samples(entry, torch.float32, requires_grad=True), limit):
        wanted = [
            leaf.requires_grad
            for leaf in tree_leaves(((sample.input, *sample.args), sample.kwargs))
            if _is_tensor(leaf)
        ]
        call = OperatorCall.of(entry, sample)
        seeded = torch.get_rng_state()
        try:
            want = _gradients(call, call.inputs, wanted)
        except RuntimeError as error:
            raise Stop("random", f"torch itself: {first_line(error)}") from error
        if not torch.equal(torch.get_rng_state(), seeded):
            raise Stop("random", "draws random numbers")
        if want:
            break
    else:
        raise Stop("random", "no sample has gradients")
    got = _gradients(_on_device(call), [_moved(name, x) for x in call.inputs], wanted)
    wide = [x.double() if x.is_floating_point() else x for x in call.inputs]
    agree([_on_host(g) for g in got], want, lambda: _gradients(call.widened(), wide, wanted))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _gradients(call: OperatorCall, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[Any]:
    given = [x.detach().clone().requires_grad_(wants) for x, wants in zip(inputs, wanted, strict=True)]
    results = [r for r in tree_leaves(call(*(x.clone() for x in given))) if _is_tensor(r) and r.requires_grad]
    if not results or not any(wanted):
        return []
    pulls = []
    for r in results:
        steps = torch.arange(r.numel(), dtype=torch.float64).mul(0.7).cos().reshape(r.shape)
        pulls.append(steps.to(r.dtype).to(r.device))
    found = torch.autograd.grad(results, [x for x in given if x.requires_grad], pulls, allow_unused=True)
    return [g for g in found if g is not None]


# -- what the table says


def verdict(steps: Sequence[Result]) -> str:
    """An entry is as its worst sample; gradients are counted by themselves."""
    found = [s["verdict"] for s in steps if s["sample"] != BACKWARD]
    return max(found, key=FORMS.index, default="random")


def totals(tasks: dict[str, Any]) -> str:
    counted = Counter(verdict(t["steps"]) for t in tasks.values())
    left_out = counted.pop("random", 0)
    return f"{counted.total()} entries ({left_out} left out): " + ", ".join(
        f"{counted[v]} {v}" for v in FORMS if counted[v]
    )


def gradients(tasks: dict[str, Any]) -> str:
    counted = Counter(s["verdict"] for t in tasks.values() for s in t["steps"] if s["sample"] == BACKWARD)
    counted.pop("random", 0)
    return f"{counted.total()} entries: " + ", ".join(f"{counted[v]} {v}" for v in FORMS if counted[v])


def died(reason: Died) -> Result:
    return asdict(Found(0, "crash", reason.reason))


def show(name: str, steps: list[Result], seconds: float) -> None:
    bad = [s for s in steps if s["verdict"] not in ("right", "random")]
    cpu = sorted({f"{op} ({why})" for s in steps for op, why in s["cpu"].items()})
    what = "; ".join(f"{s['sample']}: {s['verdict']}: {s['reason']}" for s in bad) or (
        "CPU: " + ", ".join(cpu) if cpu else ""
    )
    print(f"{seconds:6.0f} s  {verdict(steps):8} {name:40} {what[:300]}", flush=True)


def page(free: dict[str, Any], strict: dict[str, Any]) -> str:
    """docs/eager_operators.md."""
    rows = []
    for name in sorted(free):
        steps = free[name]["steps"]
        cpu = sorted({op for s in steps for op in s["cpu"]})
        grad = next((s["verdict"] for s in steps if s["sample"] == BACKWARD), "")
        bad = [s["reason"] for s in steps if s["verdict"] not in ("right", "random")]
        cells = [
            f"`{name}`",
            verdict(steps),
            verdict(strict[name]["steps"]),
            grad,
            ", ".join(cpu),
            "; ".join(dict.fromkeys(bad)),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(
        [
            "# Operators of the eager device",
            "",
            f"Made by `make eager`: PyTorch {torch.__version__.partition('+')[0]}'s own operator tests (op_db) in float32, "
            "on tensors of the vulkan device, compared with the CPU.",
            "",
            f"- Operators may run on the CPU: {totals(free)}.",
            f"- `LAPILLI_STRICT=1`: {totals(strict)}.",
            f"- Gradients: {gradients(free)}.",
            "",
            "*random*: left out, for it draws random numbers, gives tensors without values, or torch has no samples here. "
            "*crash*: of `jiterator` entries, which PyTorch has for CUDA only.",
            "",
            "| entry | verdict | strict | gradients | runs on the CPU | why |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ENTRY", help="default: all")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="at most N samples of an entry, spread over them"
    )
    parser.add_argument("--strict", action="store_true", help="no operator may run on the CPU")
    parser.add_argument(
        "--shard", type=parse_shard, default=(1, 0), metavar="I/K", help="one of K parts of the entries"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a sample may take")
    parser.add_argument("--results", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in entries()]
    if unknown:
        parser.error(f"no such entries: {', '.join(unknown)}")
    logs = {strict: Log(options.results / f"eager{'-strict' * strict}.jsonl") for strict in (False, True)}
    log = logs[options.strict]
    names = options.names or shard(entries(), *options.shard)
    log.fill(partial(work, options.samples, options.strict), names, options.jobs, Limits(options.seconds), died, show)
    measured = {name: log.tasks[name] for name in names}
    print(totals(measured), gradients(measured), sep="\ngradients: ")
    if all(log.tasks.keys() >= entries().keys() for log in logs.values()):
        PAGE.write_text(page(*({name: log.tasks[name] for name in entries()} for log in logs.values())))


if __name__ == "__main__":
    main()
