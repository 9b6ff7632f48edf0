"""Chains of linear layers, whose weights are larger than a GPU's cache: microseconds of a layer by the device's clock, with its
dispatch, and how fast its weights are read. Beside it torch with CUDA, in a graph, where weights are no codes.

A case is WIDTHxWIDTH…:WEIGHTS:ROWS:LAYERS. Layers go from each width to the next and from the last to the first; WEIGHTS are fp32,
fp16, codes of 4 bits in groups with a float16 scale: q4_64 and q4_32, or with an offset as well, q4_32o; or a block format of GGUF,
as Q4_K.

    python benchmarks/linear_chains.py [4096x4096:q4_64:1:16 4096x14336:q4_64:512:4 …] [--target PLAN]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from common import apart, cuda_graph
from torch import Tensor, nn

from lapilli.compiler import compile_to_bytes
from lapilli.llm.blocks import NAMES, BlockedMatrix, Parameter, of_gguf, row_bytes
from lapilli.llm.decoder import Weight
from lapilli.runtime.program import Program

CASES = (
    "4096x4096:q4_64:1:16", "4096x14336:q4_64:1:8", "4096x4096:q4_64:4:16", "4096x14336:q4_64:8:4", "4096x14336:q4_64:16:4",
    "4096x14336:q4_64:512:4", "576x1536:q4_32o:1:24", "4096x4096:fp16:1:8", "4096x4096:fp32:1:4", "4096x4096:fp32:4:4",
)  # fmt: skip
CODES = {"q4_64": (64, False), "q4_32": (32, False), "q4_32o": (32, True)}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def coded(rows: int, columns: int, block: int, offsets: bool, r: np.random.Generator) -> BlockedMatrix:
    """A matrix that keeps the norm of what it is multiplied by. Codes have no mean: a chain would make more of it."""
    least = 0 if offsets else 1
    low, high = (r.integers(least, 16, (rows, columns // 2), np.uint8) for _ in range(2))
    scale = (r.random((rows, columns // block), np.float32) + 0.5) / np.float32(4.6 * columns**0.5)
    offset = Parameter((scale * -7.5).astype(np.float16)) if offsets else None
    stored, first = Parameter(scale.astype(np.float16)), 0 if offsets else -8
    return BlockedMatrix(columns, block, low + 16 * high, stored, offset, bits=4, low=first)


def of_bits(rows: int, columns: int, kind: str, r: np.random.Generator) -> BlockedMatrix:
    """Any codes of a block format, with scales of one size that keep results small, whatever the mean of the codes is."""
    made = of_gguf(r.integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8), kind)

    def even(p: Parameter, size: float) -> Parameter:
        if p.bias is not None:  # powers of two
            exponent = p.bias + round(np.log2(size))
            return replace(p, values=r.integers(exponent, exponent + 2, p.values.shape, dtype=np.uint8))
        return replace(p, values=(size * (1 + r.random(p.values.shape))).astype(p.values.dtype))

    def sized(size: float) -> BlockedMatrix:
        return replace(made, scale=even(made.scale, size), offset=made.offset and even(made.offset, size))

    few = Weight.of(sized(1.0).take(slice(0, 64)))()
    return sized(0.5 / float(abs(few.mean()) * columns + few.std() * columns**0.5))


class Chain(nn.Module):
    def __init__(self, widths: list[int], kind: str, layers: int) -> None:
        super().__init__()
        self.weights = nn.ModuleList()
        r = np.random.default_rng(0)
        for i in range(layers):
            columns, rows = widths[i % len(widths)], widths[(i + 1) % len(widths)]
            if kind in CODES:
                self.weights.append(Weight.of(coded(rows, columns, *CODES[kind], r)))
                continue
            if kind in NAMES:
                self.weights.append(Weight.of(of_bits(rows, columns, kind, r)))
                continue
            layer = nn.Linear(columns, rows, bias=False, dtype=DTYPES[kind])
            nn.init.normal_(layer.weight, std=columns**-0.5)
            self.weights.append(layer)

    def matrices(self) -> list[Tensor]:
        return [w.weight if isinstance(w, nn.Linear) else w() for w in self.weights]

    def forward(self, x: Tensor) -> Tensor:
        for w in self.matrices():
            x = nn.functional.linear(x, w)
        return x


def measure(case: str, target: str | None) -> None:
    shape, kind, rows, layers = case.split(":")
    widths, count = [int(w) for w in shape.split("x")], int(layers)
    torch.manual_seed(0)
    model = Chain(widths, kind, count).eval()
    x = torch.randn(int(rows), widths[0], dtype=DTYPES.get(kind, torch.float32))
    wanted = x.double()
    for w in model.matrices():
        wanted = wanted @ w.double().mT
    precision = "fp32" if kind == "fp32" else "fp16"
    data = compile_to_bytes(model, (x,), precision=precision, weights=precision, target=target, fallback="error")
    elements = sum(w.numel() for w in model.matrices())
    with Program(data, None) as program:
        error = apart(program(x), wanted)
        size = program.memory().constants
        seconds = min(program.profile([x.numpy()], repeat=15).seconds for _ in range(3))
        names = sorted({k.kernel for k in program.profile([x.numpy()], 1).kernels})
    text = (
        f"{case}: {seconds / count * 1e6:.2f} us a layer, {size / seconds / 1e12:.2f} TB/s, "
        f"{2 * int(rows) * elements / seconds / 1e12:.0f} TFLOP/s, error {error:.1e} ({', '.join(names)})"
    )
    if torch.cuda.is_available() and kind in DTYPES:
        given, there = x.cuda(), model.cuda()
        replay, _ = cuda_graph(lambda: there(given))
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        text += f"; CUDA graph {median(times) / count:.2f} us"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--target")
    options = parser.parse_args()
    with torch.no_grad():
        for case in options.cases:
            measure(case, options.target)


if __name__ == "__main__":
    main()
