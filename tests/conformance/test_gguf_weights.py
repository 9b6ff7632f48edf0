"""Blocks of GGUF as kernels decode them, in plans of GPUs and of CPUs: products and embeddings as of the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.code_operators import E2M1, LOOK_UP, NONLINEAR, POWER_OF_TWO
from lapilli.llm.blocks import NAMES, BlockedMatrix, Parameter, of_gguf, row_bytes
from lapilli.llm.decoder import Weight
from lapilli.target import TARGETS

ROWS, COLUMNS = 24, 512
PLANS = ("cpu-fp16", "gpu-fp16", "gpu-fp16-matrix")
WIDE = ("Q4_1", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")  # one of each kind of expression: everywhere
CASES = [
    (name, plan) for k, name in enumerate(NAMES) for j, plan in enumerate(PLANS) if name in WIDE or j == k % len(PLANS)
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, on_any_device: None) -> None:
    small = replace(TARGETS["gpu-fp16-matrix"], shared_memory=32768)  # as software drivers have
    monkeypatch.setitem(TARGETS, "gpu-fp16-matrix", small)


def of_random_bits(name: str, rows: int = ROWS, columns: int = COLUMNS) -> BlockedMatrix:
    """Any codes, with scales that are numbers of one size."""
    rng = np.random.default_rng(4)
    found = of_gguf(rng.integers(0, 256, (rows, row_bytes(name, columns)), dtype=np.uint8), name)

    def tame(p: Parameter) -> Parameter:
        if p.bias is not None:
            return replace(p, values=rng.integers(p.bias - 8, p.bias - 4, p.values.shape, dtype=np.uint8))
        size = 0.02 if p.codes is None else 0.001
        return replace(p, values=(size * (1 + rng.random(p.values.shape))).astype(p.values.dtype))

    return replace(found, scale=tame(found.scale), offset=None if found.offset is None else tame(found.offset))


class Product(nn.Module):
    """x [*, columns] -> its product with a weight."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", ["cpu-fp32", "gpu-fp32", "gpu-fp16-matrix"])
def test_codes_take_the_memory_of_their_bits(name: str, plan: str) -> None:
    """On the device, for one row and for many: 5 % more than the file of GGUF, or on CPUs than its codes and float32 scales."""
    count, columns = 200, 1024
    blocks = of_random_bits(name, count, columns)
    model = Product(Weight.of(blocks))
    ideal: float = count * row_bytes(name, columns)
    if plan.startswith("cpu"):
        parameters = [p for p in (blocks.scale, blocks.offset) if p is not None]
        numbers = sum(p.values.size + (0 if p.codes is None else p.codes.size * 8 // p.bits) for p in parameters)
        ideal = blocks.codes.nbytes + (0 if blocks.upper is None else blocks.upper.nbytes) + 4 * numbers
    precision: Literal["fp16", "fp32"] = "fp16" if "fp16" in plan else "fp32"
    methods = {f"of_{rows}": (model, (torch.randn(rows, columns),)) for rows in (1, 20)}
    with lapilli.compile(methods, target=plan, precision=precision, fallback="error") as program:
        assert program.memory().constants <= 1.05 * ideal


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
        plan = plan.replace("fp16", "fp32")  # it has no halves
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


@pytest.mark.parametrize("plan", ["cpu-fp32", "gpu-fp32", "any-fp32"])
def test_any_table_and_any_exponent(plan: str) -> None:
    """Tables that kernels have a formula for and others, with numbers that are there twice; every exponent."""
    size = [0, 15, 7, 1, 1, 8, 2, 3]
    tables = [NONLINEAR, E2M1, size + [-n for n in size], [-128, 127, *range(14)], [*size, *map(abs, size)], [0] * 16]
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 4) % 16
    exponents = torch.arange(256, dtype=torch.uint8).view(-1, 4)

    class Decoded(nn.Module):
        def forward(self, codes: Tensor, exponents: Tensor) -> tuple[Tensor, ...]:
            found = [LOOK_UP(codes, numbers) for numbers in tables]
            return (*found, *(POWER_OF_TWO(exponents, bias) for bias in (127, 128, 149)))

    with lapilli.compile(Decoded(), (codes, exponents), target=plan, fallback="error") as program:
        found = program(codes, exponents)
    for numbers, made in zip(tables, found, strict=False):
        assert torch.equal(made, torch.tensor(numbers, dtype=torch.float32)[codes.long()])
    for bias, made in zip((127, 128, 149), found[len(tables) :], strict=True):
        wanted = 2.0 ** (exponents.double() - bias)
        is_normal = (
            wanted >= torch.finfo(torch.float32).tiny
        )  # smaller ones may be flushed to 0 where they are multiplied
        assert torch.equal(made[is_normal].double(), wanted[is_normal].float().double())
        assert (made[~is_normal] <= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize(
    "operator, wrong, words",
    [(LOOK_UP, list(range(15)), "16 numbers"), (LOOK_UP, [128] * 16, "-128 to 127"), (POWER_OF_TWO, 126, "127 to 149")],
)
def test_what_is_no_table(operator: Any, wrong: Any, words: str) -> None:
    class Decoded(nn.Module):
        def forward(self, codes: Tensor) -> Any:
            return operator(codes, wrong)

    with pytest.raises(lapilli.CompileError, match=words):
        lapilli.compile(Decoded(), (torch.zeros(4, dtype=torch.uint8),), target="cpu-fp32", fallback="error")
