"""The large tiles of kernels for CPUs at sizes that fill none of them. They are taken for much work alone; tests have little."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.codegen import cpu


@pytest.fixture(autouse=True)
def all_work_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_WORTH_COMPILING", 0)
    monkeypatch.setattr(cpu, "_WORTH_ROWS", 0)


class Product(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        k, n = r.choice((3, 8, 12, 40, 512)), r.choice((14, 16, 30, 33, 61, 64))
        self.x = torch.randn(r.choice((1, 2)), r.choice((16, 17, 37, 64, 131)), k)
        self.weight = nn.Parameter(torch.randn(n, k))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight)) + 1


class Convolution(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        groups, stride = r.choice((1, 1, 2)), r.choice((1, 2))
        c, o = r.choice((3, 4, 8, 20)) if groups == 1 else r.choice((14, 16)), r.choice((14, 16, 30, 32, 72))
        kernel = r.choice(((1, 1), (3, 3), (2, 5)))
        self.x = torch.randn(r.choice((1, 2)), c, r.randrange(5, 14), r.randrange(6, 14))
        self.layer = nn.Conv2d(c, o, kernel, stride, r.choice((0, 1)), r.choice((1, 2)), groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(F.relu(x)))


class Depthwise(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        c, kernel = r.choice((4, 11, 12, 32)), r.choice(((3, 3), (5, 5), (2, 3), (1, 4)))
        self.x = torch.randn(r.choice((1, 3)), c, r.randrange(5, 18), r.randrange(6, 18))
        self.layer = nn.Conv2d(c, c, kernel, r.choice((1, 2)), r.choice((0, 1)), groups=c)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh(self.layer(F.relu(x)))


@pytest.mark.part(4)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [Product, Convolution, Depthwise])
def test_odd_sizes(kind: type[Product], seed: int) -> None:
    torch.manual_seed(seed)
    model = kind(random.Random(seed)).eval()
    with torch.no_grad(), lapilli.compile(model, (model.x,), target="cpu-fp32", fallback="error") as program:
        found, exact = program(model.x).double(), model.double()(model.x.double())
    # Sums of at most 512 products in float32, taken in parts of eight.
    assert (found - exact).norm() <= 1e-6 * exact.norm()
