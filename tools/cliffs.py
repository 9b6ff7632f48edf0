"""Finds cliffs: calls that are much slower than their neighbours (`cliff_cases.py`), on one device.

    python tools/cliffs.py [--size 4] [--dtype float32] [--target gpu-fp32] [--gradients] [--only attention] [--table FILE]

Of every case: the time on the device, and which part of the device's speed that is. A case should take no longer than its bytes or
its operations do, whichever takes longer, at the speed that large copies and large products reach on this device in this run, plus
the time of an empty kernel. What reaches less than a third of what the best of its family does is a cliff: exit status 1.
LAPILLI_DEVICE chooses the device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cliff_cases import Case, cases, gradients
from torch.utils._pytree import tree_leaves

import lapilli
from lapilli.runtime.program import KernelTime
from lapilli.speed import Speed, measure

CLIFF = 3.0
REPEAT = 7


@dataclass(frozen=True)
class Row:
    case: Case
    seconds: float
    share: float  # of what the device can do
    kernels: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=4, help="4 suits a software driver, 16 a large GPU")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--target", help="a plan to compile alone, which is quicker than all")
    parser.add_argument("--gradients", action="store_true", help="those of products and convolutions, instead")
    parser.add_argument("--only", default="", help="part of the name of a family or case")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    speed = measure(given.target, half=dtype is torch.float16)
    print(
        f"{speed.bytes / 1e9:.1f} GB/s, {speed.flops / 1e9:.0f} GFLOP/s, {speed.floor * 1e6:.1f} us for a kernel",
        flush=True,
    )
    rows: list[Row] = []
    wanted = [c for c in (gradients if given.gradients else cases)(given.size) if given.only in f"{c.family}: {c.name}"]
    for n, case in enumerate(wanted):
        rows.append(timed(case, dtype, speed, given.target))
        progress(f"{n + 1} of {len(wanted)}: {case.family}, {case.name}")
    progress("")
    text = "\n".join(table(rows))
    print(text)
    if given.table is not None:
        given.table.write_text(text + "\n")
    return int(any(is_cliff(r, rows) for r in rows))


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def kernels_of(case: Case, dtype: torch.dtype, target: str | None) -> tuple[KernelTime, ...]:
    """The kernels of a call, each with its median time."""
    arguments = case.arguments(dtype)
    inputs = arguments[: len(arguments) - case.weights]
    shapes = case.dynamic_shapes()
    with lapilli.compile(case.model(arguments), tuple(inputs), dynamic_shapes=shapes, target=target) as program:
        return program.profile([t.numpy() for t in inputs], repeat=REPEAT).kernels


def timed(case: Case, dtype: torch.dtype, speed: Speed, target: str | None) -> Row:
    arguments = case.arguments(dtype)
    found = kernels_of(case, dtype, target)
    seconds = sum(k.seconds for k in found)
    with torch.no_grad():
        results = tree_leaves(case.f(*(t.float() for t in arguments)))
    size = sum(t.nbytes for t in arguments) + sum(t.numel() * arguments[0].element_size() for t in results)
    return Row(case, seconds, speed.seconds(size, case.flops) / seconds, tuple(k.kernel for k in found))


def is_cliff(row: Row, rows: Sequence[Row]) -> bool:
    return row.share * CLIFF < max(r.share for r in rows if r.case.family == row.case.family)


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| family | case | µs | of the device's speed | kernels | |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        cliff = "cliff" if is_cliff(r, rows) else ""
        names = ", ".join(r.kernels)
        yield f"| {r.case.family} | {r.case.name} | {r.seconds * 1e6:.1f} | {r.share:.0%} | {names} | {cliff} |"


if __name__ == "__main__":
    sys.exit(main())
