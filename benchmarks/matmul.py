"""A matrix product of n × n fp16 matrices: TFLOP/s of our kernel by the device's clock, beside torch with CUDA.

python benchmarks/matmul.py [--size 4096] [--only compile|run]
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import numpy as np
from common import RESULTS, report

import lapilli


def compile_one(n: int) -> None:
    """Writes the program: x (n, n) times a constant (n, n)."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(n, n, bias=False).half().eval()
    with lapilli.compile(model, (torch.rand(n, n, dtype=torch.float16),), precision="fp16") as program:
        program.save(RESULTS / f"matmul_{n}.lap")


def torch_seconds(n: int) -> float | None:
    """Seconds of torch's product on a CUDA device, or None where there is none."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    a, b = (torch.rand(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):
        a @ b
    start.record()
    for _ in range(50):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 50 * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="n; 512 is enough for a software driver")
    parser.add_argument("--only", choices=["compile", "run"])
    parser.add_argument("--device", help="index or part of a name")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    n = options.size
    if options.only != "run":
        compile_one(n)
    if options.only == "compile":
        return
    rng = np.random.default_rng(0)
    with lapilli.load(RESULTS / f"matmul_{n}.lap", device=options.device) as program:
        x = rng.random((n, n), dtype=np.float32).astype(np.float16)
        times = program.profile([x], repeat=20)
        kernel = max(times.kernels, key=lambda kernel: kernel.seconds)
        device = f"{program.device.name}, plan {program.plan}"
    flops = 2 * n**3
    theirs = torch_seconds(n)
    raw: dict[str, Any] = {"n": n, "kernel": kernel.kernel, "kernel_s": kernel.seconds, "run_s": times.seconds}
    raw |= {"torch_s": theirs}
    rows = [
        ["lapilli, the kernel", f"{kernel.seconds * 1e3:.3f}", f"{flops / kernel.seconds * 1e-12:.3g}", kernel.kernel]
    ]
    rows.append(["lapilli, the run", f"{times.seconds * 1e3:.3f}", f"{flops / times.seconds * 1e-12:.3g}", ""])
    if theirs is not None:
        share = f"ours: {theirs / kernel.seconds:.0%} of it"
        rows.append(["torch CUDA", f"{theirs * 1e3:.3f}", f"{flops / theirs * 1e-12:.3g}", share])
    report(f"matmul_{n}", device, [f"{n}³ fp16", "ms", "TFLOP/s", ""], rows, raw)


if __name__ == "__main__":
    main()
