"""Products of several rows and codes of 4 bits whose numbers are made where they are multiplied (TB = 3 of
kernels/gpu_matmul_coopmat.slang), on matrix units, which are emulated here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import as_gpu
import numpy as np
import pytest
import random_codes
import random_side_by_side
import torch
from linear_chains import coded, of_bits
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.codegen.tiles import MatrixTile
from lapilli.llm.blocks import BlockedMatrix, Parameter
from lapilli.llm.decoder import Weight
from lapilli.target import TARGETS

Taken = list[MatrixTile]
PLAN = "gpu-fp16-matrix"


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Which tiles were taken, on a GPU of one compute unit: the fewer it has, the smaller a product may be."""
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setitem(TARGETS, PLAN, replace(TARGETS[PLAN], shared_memory=as_gpu.SHARED))
    with random_codes.taken(1, PLAN) as found:
        yield found


class Matrices(nn.Module):
    def __init__(self, rows: tuple[int, ...], columns: int, block: int) -> None:
        super().__init__()
        r = np.random.default_rng(columns)
        self.weights = nn.ModuleList(Weight.of(coded(n, columns, block, False, r)) for n in rows)

    def products(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, w().to(x.dtype)) for w in self.weights]


class Linear(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        return self.products(x)[0] + 1


class Gate(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.products(x)
        return F.silu(gate) * up


def run(model: nn.Module, x: Tensor) -> Tensor:
    with lapilli.compile(model, (x,), precision="fp16", target=PLAN, fallback="error") as program:
        return program(x)


def check(model: nn.Module, rows: int, columns: int, mean: float = 0) -> None:
    torch.manual_seed(rows)
    x = (torch.randn(rows, columns) + mean).half().float()
    wanted = model.eval()(x.double())
    assert (run(model, x).double() - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize(("rows", "band"), [(7, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)])
def test_rows(rows: int, band: int, taken: Taken) -> None:
    check(Linear((96,), 576, 64), rows, 576)
    assert taken and all(t.straight and t.bm == band for t in taken), taken


SIZES: dict[str, tuple[int, int, int]] = {  # columns, terms, those of a scale
    "one vector of a line": (64, 32, 32),
    "fewer columns than a fragment has": (5, 256, 64),
    "a part of a fragment at the end": (83, 256, 128),
    "terms that no chunk divides": (64, 416, 32),
    "one scale for a line": (64, 544, 544),
}


@pytest.mark.parametrize("rows", [9, 20, 40])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, rows: int, taken: Taken) -> None:
    columns, terms, block = SIZES[size]
    check(Linear((columns,), terms, block), rows, terms)
    assert taken and taken[0].straight


@pytest.mark.parametrize("rows", [8, 31])
def test_epilogues(rows: int, taken: Taken) -> None:
    check(Gate((72, 72), 256, 64), rows, 256)
    assert taken and all(t.straight for t in taken)


@pytest.mark.parametrize("units", [4, 9])
@pytest.mark.parametrize("rows", [12, 27])
def test_sums_in_parts(rows: int, units: int, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, PLAN, replace(TARGETS[PLAN], compute_units=units))
    check(Linear((200,), 2080, 32), rows, 2080)
    assert taken[0].straight and taken[0].parts > 1, taken


def scaled(codes: np.ndarray[Any, Any], scale: Tensor) -> BlockedMatrix:
    """Bytes of two codes, of which the first is in the lower bits; a row of scales for 32 each."""
    return BlockedMatrix(codes.shape[1] * 2, 32, codes, Parameter(scale.numpy()), None, bits=4, low=-8)


class One(nn.Module):
    def __init__(self, matrix: BlockedMatrix) -> None:
        super().__init__()
        self.weight = Weight.of(matrix)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight().to(x.dtype))


@pytest.mark.parametrize("terms", [256, 288])
def test_what_is_not_finite(terms: int, taken: Taken) -> None:
    """An infinite scale at the end of a line, and NaN in a row: no zeros that fill up a chunk are multiplied by them."""
    codes = np.random.default_rng(0).integers(0, 256, (48, terms // 2), np.uint8) | np.uint8(0x11)
    scale = torch.full((48, terms // 32), 0.01).half()
    scale[3, -1], codes[3, -16:] = torch.inf, 0xFF
    x = torch.rand(11, terms).half().float()
    x[5, 7] = torch.nan
    model = One(scaled(codes, scale)).eval()
    got, wanted = run(model, x), model(x)
    assert taken[0].straight
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3, equal_nan=True)


OTHERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {  # terms
    "scales of fewer than a vector": (256, lambda: Linear((64,), 256, 16)),
    "lines of no whole vectors": (272, lambda: Linear((64,), 272, 16)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_goes_by_way_of_shared_memory(kind: str, taken: Taken) -> None:
    terms, made = OTHERS[kind]
    check(made(), 16, terms)
    assert not any(t.straight for t in taken), taken


@pytest.mark.parametrize(("rows", "mean"), [(16, 4), (33, 0)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"])
def test_block_formats(kind: str, rows: int, mean: float, taken: Taken) -> None:
    """Offsets, and scales that are codes themselves. Rows with a mean add up what all codes of a block are off by: scales and
    offsets that were rounded to one half had errors of 2e-3.
    """
    check(One(centred(of_bits(64, 1024, kind, np.random.default_rng(rows)))), rows, 1024, mean)
    assert taken and all(t.straight for t in taken), taken


def centred(matrix: BlockedMatrix) -> BlockedMatrix:
    """With offsets that take the mean of the codes away: of 4 bits, it is 7.5."""
    if matrix.offset is None:
        return matrix
    if matrix.offset.codes is None:
        return replace(matrix, offset=replace(matrix.offset, values=-np.float16(7.5) * matrix.scale.values))
    offset = replace(matrix.offset, codes=matrix.scale.codes, values=-np.float16(7.5) * matrix.scale.values)
    return replace(matrix, offset=offset)


class Half(Matrices):
    """Which computes in halves; its input lies as it is, or across memory."""

    def __init__(self, turned: bool) -> None:
        super().__init__((96,), 256, 64)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mT if self.turned else x, self.weights[0]().to(x.dtype))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_rows_that_lie_across_memory(rows: int, turned: bool, taken: Taken) -> None:
    """They are read by columns, which these tiles do not do."""
    torch.manual_seed(rows)
    model, x = Half(turned).eval(), torch.randn(rows, 256).half()
    given = x.mT.contiguous() if turned else x
    with lapilli.compile(model, (given,), target=PLAN, fallback="error") as program:
        got = program(given)
    wanted = model(given.double())
    assert (got.double() - wanted).norm() <= 1e-3 * wanted.norm()
    assert any(t.straight for t in taken) is not turned, taken


def test_random_codes() -> None:
    kinds = {kind for seed in (4, 9, 20, 26, 32, 34) for kind in random_codes.check(seed, PLAN)}
    assert kinds >= {"straight in 1 parts", "straight in 2 parts", "shared memory in 1 parts"}, kinds


def test_random_products_side_by_side() -> None:
    kinds = {kind for seed in (1, 12, 15, 27, 39) for kind in random_side_by_side.check(seed, PLAN)}
    assert kinds >= {"4 products by 1 tiles", "3 products by 1 tiles", "6 products by 2 tiles"}, kinds


def test_a_pair_whose_sums_are_in_parts(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, PLAN, replace(TARGETS[PLAN], compute_units=9))
    check(Gate((128, 128), 2080, 32), 27, 2080)
    assert taken[-1].straight and taken[-1].parts > 1, taken


class Block(Matrices):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, gate, up = self.products(x)
        return q[..., ::2] - q[..., 1::2], k[..., ::2] * k[..., 1::2], F.silu(gate) * up


@pytest.mark.parametrize(("rows", "products"), [(1, 3), (16, 2)])
def test_kernels_of_several_products_are_verified(rows: int, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a few rows have a gate's two sums, too."""
    monkeypatch.setitem(TARGETS, PLAN, replace(TARGETS[PLAN], compute_units=4))
    torch.manual_seed(rows)
    model = Block((256, 128, 256, 256), 1024, 64).eval()
    found = lapilli.verify(model, (torch.randn(rows, 1024).half(),), precision="fp16", target=PLAN)
    assert sum("linear" in c.label for c in found) == products, found
    assert max(c.error for c in found) < 1e-3, found
