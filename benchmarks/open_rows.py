"""Products, convolutions and attention with an open number of rows: the time of their kernels beside that of programs in which this
number is fixed. What takes more than --most times as long is marked.

    python benchmarks/open_rows.py [--precision fp16] [--most 1.3] [--rows 1 8 64 256 512 1024 4096]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import apart
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli

ROWS = (1, 8, 33, 64, 65, 128, 256, 257, 512, 1024, 1025, 4096)
HEADS, WIDTH = 32, 128
_WARMING = 0.15
"""Seconds of work before a measurement."""


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


Case = tuple[str, nn.Module, Callable[[int], tuple[Tensor, ...]], int]
"""Name, model, its inputs for a number of rows, and the axis of the first of them that is open."""


def linear(columns: int, terms: int) -> Case:
    model = nn.Sequential(nn.Linear(terms, columns, bias=False), nn.SiLU())
    return f"linear {terms} -> {columns}", model, lambda rows: (torch.randn(rows, terms),), 0


def image(channels: int, size: int) -> Case:
    """Images of some size, of which there are as many as have the rows."""
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.ReLU())
    count = size * size
    name = f"conv 3x3, {channels}, {size}x{size}"
    return name, model, lambda rows: (torch.randn(-(-rows // count), channels, size, size),), 0


def attention() -> Case:
    keys = 1024

    def inputs(rows: int) -> tuple[Tensor, ...]:
        return (torch.randn(1, HEADS, rows, WIDTH), *(torch.randn(1, HEADS, keys, WIDTH) for _ in "kv"))

    return f"attention {HEADS} x {WIDTH}, {keys} keys", Attention(), inputs, 2


CASES = (linear(4096, 4096), linear(1024, 4096), linear(14336, 4096), linear(4096, 14336), linear(576, 576),
         linear(1536, 576), image(128, 28), image(512, 7), attention())  # fmt: skip


def compiled(model: nn.Module, inputs: tuple[Tensor, ...], axis: int | None, options: argparse.Namespace) -> Any:
    """axis: of the first input that is open."""
    others = [None] * (len(inputs) - 1)
    shapes = None if axis is None else ({axis: torch.export.Dim("rows", max=8192)}, *others)
    return lapilli.compile(model, inputs, dynamic_shapes=shapes, precision=options.precision, target=options.target)


def seconds(programs: Sequence[Any], inputs: tuple[Tensor, ...]) -> list[float]:
    """Of the kernel of each that takes longest, in turn, when the device runs at its usual clock."""
    arrays = [x.numpy() for x in inputs]
    end = time.monotonic() + _WARMING
    while time.monotonic() < end:
        programs[0].profile(arrays, 20)
    found = [[max(k.seconds for k in p.profile(arrays, 9).kernels) for p in programs] for _ in range(5)]
    return [min(times) for times in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--target")
    parser.add_argument("--most", type=float, default=1.3)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, model, given, axis in (CASES[k] for k in options.cases):
        model.eval()
        open_one = compiled(model, given(4096), axis, options)
        done: set[tuple[int, ...]] = set()
        for rows in options.rows:
            inputs = given(rows)
            if tuple(inputs[0].shape) in done:
                continue
            done.add(tuple(inputs[0].shape))
            took, best = seconds((open_one, compiled(model, inputs, None, options)), inputs)
            with torch.no_grad():
                error = apart(open_one(*inputs), model(*inputs))
            mark = "  SLOW" if took > options.most * best else ""
            mark += "  WRONG" if not error < 2e-3 else ""
            print(
                f"{name}, {rows} rows: open {took * 1e6:.1f} us, fixed {best * 1e6:.1f} us, {took / best:.2f} times, "
                f"error {error:.1e}{mark}",
                flush=True,
            )


if __name__ == "__main__":
    main()
