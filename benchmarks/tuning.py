"""What tuning brings: models compiled as cost models decide, beside the same models after `lapilli tune`, in one process.

    python benchmarks/tuning.py [--models NAME ...] [--precision fp16] [--seconds S] [--device D] [--json FILE]

Times are of a run on the device, by its clock, and the sum of its kernels', each timed alone: the least of as many runs in turn,
first one program, then the other, so that other work slows both. Both results are compared with torch's in float32 on the CPU,
relative to their norm. `--seconds` bounds the measuring of each model; what the user's cache knows is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import apart, report

from lapilli import tuning
from lapilli.compiler import uncollected
from lapilli.runtime.program import Program
from lapilli.target.records import Records

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
Model = tuple[torch.nn.Module, torch.Tensor]
_IMAGE = (
    "mobilenet_v2", "resnet18", "squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "efficientnet_b0", "regnet_y_400mf",
    "densenet121", "resnet50", "vit_b_16",
)  # fmt: skip
_DEFAULT = (*_IMAGE[:8], "MiniLM-L6, 64 tokens", "SmolLM2-135M, 4 layers, 64 tokens")
_ROUNDS, _MOST_ROUNDS, _ENOUGH = 10, 100, 3.0
"""Runs of each program at least and at most, and seconds after which there are enough."""


def _classifier(name: str) -> Model:
    from performance.models import classifier

    return classifier(name), torch.randn(1, 3, 224, 224)


def _sentence(tokens: int) -> Model:
    from performance.models import Sentence

    return Sentence(tokens).eval(), torch.randint(0, 2000, (1, tokens))


def _prompt(layers: int, tokens: int) -> Model:
    from performance.models import Prefill

    return Prefill(layers, 576, 9, 3, 64, 1536, 8192, tokens).eval(), torch.randint(0, 8192, (1, tokens))


MODELS: dict[str, Callable[[], Model]] = {
    **{name: partial(_classifier, name) for name in _IMAGE},
    **{f"MiniLM-L6, {n} tokens": partial(_sentence, n) for n in (64, 128)},
    **{f"SmolLM2-135M, {layers} layers, {n} tokens": partial(_prompt, layers, n) for layers, n in ((4, 64), (10, 512))},
}


def pair(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> tuple[bytes, bytes, tuning.Tuned]:
    """The programs with cost models' choices and with what won, each with the plan of the device alone, and what was found."""
    with uncollected():
        compiler, found = tuning.measured(model, (x,), **options)
        (tuned,) = [t for t in compiler.targets if t.name == found.plan]
        compiler.targets = [replace(tuned, records=Records())]
        before = compiler.finish({}, None)
        compiler.targets = [tuned]
        return before, compiler.finish({}, None), found


def least(a: Program, b: Program, x: torch.Tensor) -> list[tuple[float, float]]:
    """Of both programs the seconds of a run on the device, and the sum of those of its kernels, each the least of many runs in
    turn: where other work never pauses for a whole run, it does for a kernel."""
    best: list[tuple[float, list[float]]] = [(float("inf"), [])] * 2
    start, rounds = time.monotonic(), 0
    while rounds < _ROUNDS or (rounds < _MOST_ROUNDS and time.monotonic() - start < _ENOUGH):
        for k, program in enumerate((a, b)):
            found = program.profile([x.numpy()], 1)
            kernels = [kernel.seconds for kernel in found.kernels]
            best[k] = min(best[k][0], found.seconds), list(map(min, kernels, best[k][1] or kernels))
        rounds += 1
    return [(seconds, sum(kernels)) for seconds, kernels in best]


def measure(name: str, precision: str, device: str | None, seconds: float | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    with torch.no_grad():
        want = model(x)
    start = time.monotonic()
    plain, tuned, found = pair(model, x, precision=precision, device=device, seconds=seconds)
    spent = time.monotonic() - start
    with Program(plain, device) as before, Program(tuned, device) as after:
        errors = [apart(program(x), want) for program in (before, after)]
        (old, old_kernels), (new, new_kernels) = least(before, after, x)
    return {
        "model": name, "device": found.device.name, "driver": found.device.driver, "plan": found.plan,
        "before_ms": old * 1e3, "after_ms": new * 1e3,
        "kernels_before_ms": old_kernels * 1e3, "kernels_after_ms": new_kernels * 1e3,
        "error_before": errors[0], "error_after": errors[1],
        "contractions": len(found.choices), "changed": sum(c.best != c.default for c in found.choices),
        "candidates": sum(c.tried - 1 for c in found.choices), "of": sum(c.of - 1 for c in found.choices),
        "rejected": [[r.title, r.candidate, r.why] for r in found.rejected], "seconds": spent,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(_DEFAULT))
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--device")
    parser.add_argument("--seconds", type=float, help="for the candidates of each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows.append(measure(name, options.precision, options.device, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    head = [
        "",
        "run, ms",
        "tuned, ms",
        "of it",
        "kernels, ms",
        "tuned, ms",
        "of it",
        "changed",
        "error",
        "tuned, error",
    ]

    def times(r: dict[str, Any], of: str) -> list[str]:
        old, new = r[f"{of}before_ms"], r[f"{of}after_ms"]
        return [f"{old:.4g}", f"{new:.4g}", f"{new / old:.0%}"]

    table = [
        [r["model"], *times(r, ""), *times(r, "kernels_"), f"{r['changed']} of {r['contractions']}",
         f"{r['error_before']:.1e}", f"{r['error_after']:.1e}"]
        for r in rows
    ]  # fmt: skip
    report("tuning", f"{rows[0]['device']}, {rows[0]['driver']}, plan {rows[0]['plan']}", head, table, rows)


if __name__ == "__main__":
    main()
