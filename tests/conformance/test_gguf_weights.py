"""Blocks of GGUF as kernels decode them, in plans of GPUs and of CPUs: products and embeddings as of the dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.llm.blocks import NAMES, BlockedMatrix, Parameter, of_gguf
from lapilli.llm.decoder import Weight
from lapilli.target import TARGETS

ROWS, COLUMNS = 24, 512
PLANS = ("cpu-fp16", "gpu-fp16", "gpu-fp16-matrix")
WIDE = ("Q4_1", "Q3_K", "Q5_K", "Q6_K")  # one of each kind of expression: everywhere
CASES = [
    (name, plan) for k, name in enumerate(NAMES) for j, plan in enumerate(PLANS) if name in WIDE or j == k % len(PLANS)
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, on_any_device: None) -> None:
    small = replace(TARGETS["gpu-fp16-matrix"], shared_memory=32768)  # as software drivers have
    monkeypatch.setitem(TARGETS, "gpu-fp16-matrix", small)


def of_random_bits(name: str) -> BlockedMatrix:
    """Any codes, with scales that are numbers of one size."""
    rng = np.random.default_rng(4)
    sizes = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}
    small = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18, "MXFP4": 17}
    row = COLUMNS // 256 * sizes[name] if name in sizes else COLUMNS // 32 * small[name]
    found = of_gguf(rng.integers(0, 256, (ROWS, row), dtype=np.uint8), name)

    def tame(p: Parameter) -> Parameter:
        size = 0.02 if p.codes is None else 0.001
        return replace(p, values=(size * (1 + rng.random(p.values.shape))).astype(p.values.dtype))

    return replace(found, scale=tame(found.scale), offset=None if found.offset is None else tame(found.offset))


class Both(nn.Module):
    """x [*, columns] and the tokens of rows -> their product, and the rows."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weight()
        return F.linear(x, w), F.embedding(tokens, w)


@pytest.mark.parametrize("name, plan", CASES)
def test_products_and_embeddings_of_blocks(name: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Both(Weight.of(of_random_bits(name)))
    w, tokens = model.weight().double(), torch.tensor([3, 0, ROWS - 1])
    given = {"one": torch.randn(1, COLUMNS), "many": torch.randn(20, COLUMNS)}
    half = plan == "gpu-fp16-matrix"
    if name == "MXFP4" and not half:
        plan = plan.replace("fp16", "fp32")  # its scales are powers of two beyond a half's
    methods = {method: (model, (x, tokens)) for method, x in given.items()}
    with lapilli.compile(methods, target=plan, precision="fp16" if half else "fp32", fallback="error") as program:
        for method, x in given.items():
            product, rows = program.methods[method](x, tokens)
            # Sums round once a term, decoding a few times; in half precision rows, weights and results are rounded as well.
            unit = 2.0**-24 * (COLUMNS + 16) + (2.0**-11 * 4 if half else 0)
            bound = x.abs().double() @ w.abs().mT * unit
            assert ((product.double() - x.double() @ w.mT).abs() <= bound).all()
            tolerance = 2.0**-11 * 2 if half else 2.0**-23 * 2
            assert ((rows.double() - w[tokens]).abs() <= w.abs().max() * tolerance).all()
