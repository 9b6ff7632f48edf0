"""Language models with packed weights: the time of a token early and late in the cache, of steps of several sequences, of a prompt.

Weights are random, of the shapes of SmolLM2-135M (Q4_1: codes of 4 bits, a float16 scale and an offset for 32), of Llama-3.2-1B and
of an 8B model (codes of 4 bits, a float16 scale for 64). With --check, the first greedy tokens and the logits are compared with
torch's, in float32 of the same numbers.

    python benchmarks/quantized_tokens.py [--models 135m 1b 8b] [--layers N] [--target PLAN] [--precision fp16] [--check]
        [--sequences 32] [--context 4096]

With --sequences 32, steps of 1, 2, 4, 8, 16 and 32 sequences are timed; each has a cache of its own. For a long context:
--context 32768 --places 128 32000.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from common import median

from lapilli.compiler import compile_to_bytes
from lapilli.llm.about import KNOWN, step_name, step_sizes
from lapilli.llm.blocks import BlockedMatrix, Parameter
from lapilli.llm.decoder import Decoder, Shape
from lapilli.llm.token_methods import methods
from lapilli.runtime.program import Program

SHAPES: dict[str, tuple[Shape, int, bool]] = {  # shape; numbers of a scale; with offsets
    "135m": (Shape(49152, 576, 30, 9, 3, 64, 1536, 1e-5, 1e5, 8192, 64), 32, True),
    "1b": (Shape(128256, 2048, 16, 32, 8, 64, 8192, 1e-5, 5e5, 65536, 64), 64, False),
    "8b": (Shape(128256, 4096, 32, 32, 8, 128, 14336, 1e-5, 5e5, 65536, 128), 64, False),
}
LIMITS = np.array([[0, 1, -np.inf, 1]], np.float32)  # the likeliest token


def rows(count: int, place: int, token: int = KNOWN) -> tuple[Any, Any]:
    """Arguments of a step: every sequence goes on at this place."""
    numbers = np.zeros((count, 6), np.int32)
    numbers[:, 0], numbers[:, 1], numbers[:, 2] = token, place, np.arange(count)
    return numbers, LIMITS.repeat(count, 0)


def weights(shape: Shape, block: int, offsets: bool, layers: int) -> dict[str, Any]:
    r = np.random.default_rng(0)
    ones = torch.ones(shape.width)

    def matrix(rows: int, columns: int) -> BlockedMatrix:
        codes = r.integers(0, 256, (rows, columns // 2), np.uint8)
        size = 1 / (4.6 * columns**0.5)  # codes of a deviation of 4.6
        scale = (r.random((rows, columns // block), np.float32) + 0.5).astype(np.float32) * size
        offset = Parameter((scale * -7.5).astype(np.float16)) if offsets else None
        low = 0 if offsets else -8
        return BlockedMatrix(columns, block, codes, Parameter(scale.astype(np.float16)), offset, bits=4, low=low)

    found: dict[str, Any] = {"token_embd.weight": matrix(shape.words, shape.width), "output_norm.weight": ones}
    inner, keys = shape.heads * shape.size, shape.groups * shape.size
    for k in range(layers):
        sizes = {"attn_q": (inner, shape.width), "attn_k": (keys, shape.width), "attn_v": (keys, shape.width),
                 "attn_output": (shape.width, inner), "ffn_gate": (shape.inner, shape.width),
                 "ffn_up": (shape.inner, shape.width), "ffn_down": (shape.width, shape.inner)}  # fmt: skip
        found |= {f"blk.{k}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        found |= {f"blk.{k}.{name}_norm.weight": ones for name in ("attn", "ffn")}
    return found


def greedy(model: Decoder, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and logits by torch."""
    tokens, logits, start = [], [], 0
    given = torch.tensor([prompt])
    for _ in range(count):
        logits.append(model(given, torch.tensor([start]))[0].double())
        start += given.shape[1]
        given = logits[-1].argmax()[None, None]
        tokens.append(int(given))
    return tokens, logits


def timed(step: Any, count: int, place: int) -> tuple[float, float]:
    """Mean and median seconds of a step of so many sequences, of which two are queued while the host reads one."""
    runs: deque[Any] = deque()
    times, at = [], place
    for _ in range(250):
        while len(runs) <= 2:
            runs.append(step.submit(*rows(count, at, KNOWN if at > place else 5)))
            at += 1
        runs.popleft().result()
        times.append(time.perf_counter())
    while runs:
        runs.popleft().result()
    return (times[-1] - times[50]) / (len(times) - 51), float(np.median(np.diff(times[50:])))


def measure(name: str, options: argparse.Namespace) -> None:
    shape, block, offsets = SHAPES[name]
    layers = min(options.layers or shape.layers, shape.layers)
    shape = Shape(**{**vars(shape), "layers": layers})
    tensors = weights(shape, block, offsets, layers)
    size = sum(t.nbytes for t in tensors.values())
    start = time.perf_counter()
    cached = torch.float16 if options.precision == "fp16" else torch.float32
    model = Decoder(shape, tensors, options.context, cached, options.sequences).eval()
    taken = {k: v for k, v in methods(model).items() if k == "prompt" or k.startswith("step")}
    data = compile_to_bytes(
        taken, precision=options.precision, weights=options.precision, target=options.target,
        fallback="error",
    )  # fmt: skip
    made = time.perf_counter() - start
    del tensors
    with Program(data, None) as program:
        memory = program.memory()
        print(
            f"{name}: {layers} layers, weights {size / 1e6:.0f} MB, file {len(data) / 1e6:.0f} MB, device {memory}, compile "
            f"{made:.0f} s, plan {program.plan}",
            flush=True,
        )
        prompt, step, first_one = program.methods["prompt"], program.methods["step"], np.array([0])
        r = np.random.default_rng(1)
        if options.check:
            first = r.integers(0, shape.words, 7).tolist()
            wanted, exact = greedy(model, first, 4)
            tokens = []
            for k in range(4):
                run = (
                    prompt.submit(np.array([first]), first_one, *rows(1, 0)) if k == 0 else step.submit(*rows(1, 6 + k))
                )
                tokens.append(int(run.result()[0][0]))
                logits = torch.from_numpy(program.state()["owner.logits"][0]).double()
                error = float((logits - exact[k]).norm() / exact[k].norm())
                print(f"  token {tokens[-1]}, torch's {wanted[k]}, relative error of logits {error:.1e}", flush=True)
                if tokens[-1] != wanted[k]:
                    break
        alone: dict[int, float] = {}
        for count in step_sizes(options.sequences):
            for place in options.places or (100, options.context - 300):
                mean, middle = timed(program.methods[step_name(count)], count, place)
                alone.setdefault(place, mean)
                print(
                    f"  a step of {count} at {place}: median {middle * 1e3:.3f} ms, mean {mean * 1e3:.3f} ms, "
                    f"{count / mean:.0f} tokens/s, {count * alone[place] / mean:.1f} times one; weights at "
                    f"{size / mean / 1e9:.0f} GB/s",
                    flush=True,
                )
        for length in (128, 512):
            given = r.integers(0, shape.words, (1, length))
            seconds = median(lambda: prompt.submit(given, first_one, *rows(1, 0)).result(), 3, 9, 3)  # noqa: B023
            print(f"  prompt of {length}: {seconds * 1e3:.2f} ms, {length / seconds:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--target")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--places", type=int, nargs="+", help="Of the cache, where steps are timed")
    parser.add_argument("--check", action="store_true", help="compare with torch, which takes long for large models")
    options = parser.parse_args()
    with torch.no_grad():
        for name in options.models:
            measure(name, options)


if __name__ == "__main__":
    main()
