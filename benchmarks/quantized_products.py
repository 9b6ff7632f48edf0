"""Quantized products and classifiers beside the same in floats, interleaved: device time of a run, and of the largest kernel.

    python benchmarks/quantized_products.py [--size 4096] [--networks resnet50] [--plans int8 int8-fp16 fp16 fp32]
    python benchmarks/quantized_products.py --only compile     only write results/quantized/*.lap (needs torch and torchao)
    python benchmarks/quantized_products.py --only run         only run them (needs neither)

A product has int8 rows, int8 columns with a scale each, and an int8 result; some rows of it are compared with float64, where a
sum of codes is exact. A classifier is quantized by PT2E with random weights and images; its int8 programs are compared with each
other, which must give the same but for ties. "int8-fp16" is the quantized model at precision="fp16".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from common import RESULTS, cell, report
from numpy.typing import NDArray

import lapilli
from lapilli.runtime.program import Program

FOLDER = RESULTS / "quantized"
PLANS = ("int8", "int8-fp16", "fp16", "fp32")
_ROWS = 16
"""Of a product that are compared."""
_STEP = 0.02


def codes_of(size: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A matrix of codes, distributed as those of trained weights are, and a scale for each of its rows."""
    r = np.random.default_rng(1)
    codes = np.clip(np.round(r.normal(0, 24, (size, size))), -127, 127).astype(np.int8)
    return codes, ((r.random(size, np.float32) + 0.5) / 1000).astype(np.float32)


def rows_of(size: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).normal(0, 1, (size, size)).astype(np.float32)


def product(size: int, plan: str) -> tuple[Any, tuple[Any, ...]]:
    """A model of a product, and its input."""
    import torch
    import torch.ao.quantization.fx._decomposed
    import torch.nn.functional as F

    decomposed = torch.ops.quantized_decomposed
    q, s = map(torch.from_numpy, codes_of(size))

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Buffer(q if plan.startswith("int8") else q.float() * s[:, None])
            self.s, self.z = torch.nn.Buffer(s), torch.nn.Buffer(torch.zeros(size, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not plan.startswith("int8"):
                return F.linear(x, self.q)
            codes = decomposed.quantize_per_tensor(x, _STEP, 3, -128, 127, torch.int8)
            x = decomposed.dequantize_per_tensor(codes, _STEP, 3, -128, 127, torch.int8)
            w = decomposed.dequantize_per_channel(self.q, self.s, self.z, 0, -127, 127, torch.int8)
            result: torch.Tensor = decomposed.quantize_per_tensor(F.linear(x, w), _STEP, 0, -128, 127, torch.int8)
            return result

    return Product().eval(), (torch.from_numpy(rows_of(size)),)


def classifier(name: str, plan: str) -> tuple[Any, tuple[Any, ...]]:
    """A classifier with random weights, and its input."""
    import torch
    from classifiers import build

    model, image = build(name), torch.from_numpy(image_of())
    if not plan.startswith("int8"):
        return model, (image,)
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from lapilli.quantization import VulkanQuantizer, get_symmetric_quantization_config

    quantizer = VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(model, (image,)).module(), quantizer)
    prepared(image)
    return torch.export.export(convert_pt2e(prepared), (image,)), ()


def image_of() -> NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 1, (1, 3, 224, 224)).astype(np.float32)


def path_of(case: str, plan: str) -> Path:
    return FOLDER / f"{case}-{plan}.lap"


def write(case: str, plan: str, made: tuple[Any, tuple[Any, ...]], target: str | None) -> None:
    """made: a model and its example inputs."""
    model, given = made
    precision: Literal["fp16", "fp32"] = "fp16" if plan.endswith("fp16") else "fp32"
    FOLDER.mkdir(parents=True, exist_ok=True)
    from lapilli.compiler import compile_to_bytes

    data = compile_to_bytes(model, given or None, precision=precision, target=target, fallback="error")
    path_of(case, plan).write_bytes(data)
    print(f"{case}, {plan}: {len(data) / 1e6:.1f} MB", flush=True)


def wrong_steps(size: int, found: NDArray[Any]) -> str:
    """How a product's first rows differ from exact sums, scaled in float64."""
    q, s = codes_of(size)
    x = np.clip(np.round(rows_of(size)[:_ROWS] * np.float32(1 / np.float32(_STEP))) + 3, -128, 127) - 3
    exact = (x.astype(np.int64) @ q.astype(np.int64).T) * s.astype(np.float64)  # rows and results have the same step
    steps = np.abs(found[:_ROWS].astype(np.int64) - np.clip(np.round(exact), -128, 127).astype(np.int64))
    return f"{np.mean(steps != 0):.1e} of the results a step off, at most {steps.max()}"


def measure(case: str, plans: Sequence[str], given: NDArray[np.float32], size: int, rounds: int) -> list[list[str]]:
    programs = {plan: Program(path_of(case, plan).read_bytes(), None) for plan in plans if path_of(case, plan).exists()}
    best: dict[str, Any] = {}
    results = {plan: p.run_flat([given])[0] for plan, p in programs.items()}
    for _ in range(rounds):  # interleaved, so that what else runs on the machine meets all of them
        for plan, p in programs.items():
            found = p.profile([given], 3)
            if plan not in best or found.seconds < best[plan].seconds:
                best[plan] = found
    rows = []
    for plan, p in programs.items():
        largest = max(best[plan].kernels, key=lambda k: k.flops)
        work = sum(k.flops for k in best[plan].kernels)
        if size:
            right = wrong_steps(size, results[plan]) if plan.startswith("int8") else ""
        else:
            wanted = results[next(iter(programs))]
            right = f"{np.abs(results[plan] - wanted).max() / np.abs(wanted).max():.1e} from {next(iter(programs))}"
        rate = f"{largest.flops / largest.seconds / 1e12:.4g}"
        arena = p.memory()
        rows.append([case, plan, p.plan, cell(best[plan].seconds), f"{work / best[plan].seconds / 1e12:.4g}", largest.kernel, rate,
                     f"{sum(v for v in vars(arena).values() if isinstance(v, int)) / 1e6:.1f}", right])  # fmt: skip
        p.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="*", default=[4096], help="rows, columns and terms of products")
    parser.add_argument("--networks", nargs="*", default=["resnet50"], help="torchvision's names")
    parser.add_argument("--plans", nargs="*", default=PLANS, choices=PLANS)
    parser.add_argument("--target", help="a plan or a device to compile for; default: all plans")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("compile", "run"))
    options = parser.parse_args()
    cases = [(f"product-{size}", size) for size in options.size] + [(name, 0) for name in options.networks]
    if options.only != "run":
        for case, size in cases:
            for plan in options.plans:
                made = product(size, plan) if size else classifier(case, plan)
                write(case, plan, made, options.target)
    if options.only != "compile":
        rows = [
            row
            for case, size in cases
            for row in measure(case, options.plans, rows_of(size) if size else image_of(), size, options.rounds)
        ]
        columns = ["case", "program", "plan", "ms", "TOP/s", "largest kernel", "its TOP/s", "MB", "right"]
        report("quantized_products", lapilli.devices()[0].name, columns, rows, rows)


if __name__ == "__main__":
    main()
