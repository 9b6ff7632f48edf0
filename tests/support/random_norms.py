"""Random products of layer norms on matrix units, which are one kernel where that can be (codegen/normed.py). Sizes, weights of the
norm, how it is written, what reads it beside; rows with large means, single large numbers, equal numbers, infinities.

    python tests/support/random_norms.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import random_cases
import torch
from random_blocks import kernels
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.codegen import normed

_ENDS = (nn.Identity, nn.GELU, nn.SiLU, nn.ReLU)
_ELSEWHERE = ("", "", "", "", "residual", "residual", "maximum", "caller", "own residual")


@dataclass(frozen=True)
class Case:
    """rows: of the input, in one or two dimensions; columns: of each product that reads the norm; written: by means, not a module;
    read: which part of it; elsewhere: what else reads it. turned: whether rows lie across memory. gammas: of about this size.
    strange: what rows have beside normal numbers.
    """

    rows: tuple[int, ...]
    width: int
    columns: tuple[int, ...]
    gamma: bool
    beta: bool
    bias: bool
    epsilon: float
    written: bool
    end: int
    read: str
    elsewhere: str
    turned: bool
    gammas: float
    strange: str


def case(seed: int) -> Case:
    r = random.Random(seed)
    rows = r.choice(((1,), (7,), (33,), (64,), (197,), (1, 50), (2, 33), (3, 17)))
    columns = tuple(r.choice((8, 16, 24, 72, 96, 100, 128, 192)) for _ in range(r.choice((1, 1, 1, 2, 3))))
    gamma = r.random() < 0.8
    return Case(
        rows, r.choice((64, 96, 128, 192, 256, 384, 512, 100, 768)), columns, gamma, gamma and r.random() < 0.8, r.random() < 0.8,
        r.choice((1e-5, 1e-5, 1e-12, 1e-2, 0.0)), r.random() < 0.3, r.randrange(len(_ENDS)),
        r.choice(("", "", "", "", "part", "row", "channels")), r.choice(_ELSEWHERE), r.random() < 0.15,
        r.choice((1, 1, 1, 1, 0.01, 1e-5, 300)),
        r.choice(("", "", "", "mean", "outlier", "equal", "zero", "infinite", "nan", "large", "small")),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        self.norm = nn.LayerNorm(given.width, given.epsilon, given.gamma, given.beta)
        read = given.width // 2 if given.read == "part" else given.width
        self.products = nn.ModuleList(nn.Linear(read, n, given.bias) for n in given.columns)
        self.convolution = nn.Conv1d(given.width, given.columns[0], 1)
        self.end = _ENDS[given.end]()
        self.down = nn.Linear(given.columns[0], given.width, given.bias)
        self.square = nn.Linear(given.width, given.width)
        with torch.no_grad():
            for p in self.norm.parameters():
                p.normal_(std=given.gammas)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        given = self.given
        x = x.mT if given.turned else x
        if given.written:
            apart = x - x.mean(-1, keepdim=True)
            y = apart * (apart.square().mean(-1, keepdim=True) + given.epsilon).rsqrt()
            y = y * self.norm.weight if given.gamma else y
            y = y + self.norm.bias if given.beta else y
        else:
            y = F.layer_norm(x, (given.width,), self.norm.weight, self.norm.bias, given.epsilon)
        z = {"part": y[..., : given.width // 2], "row": y[..., :1, :]}.get(given.read, y)
        if given.read == "channels" and y.ndim == 3:
            return (self.convolution(y.mT),)
        results = [self.end(product(z)) for product in self.products]
        if given.elsewhere == "maximum":
            results[0] = results[0] + y.amax(-1, keepdim=True)
        elif given.elsewhere == "residual":
            results[0] = y + self.down(results[0])
        elif given.elsewhere == "own residual":
            results.append(y + self.square(y))
        elif given.elsewhere == "caller":
            results.append(y)
        return tuple(results)


def numbers(given: Case) -> Tensor:
    x = torch.randn(*given.rows, given.width)
    flat = x.view(-1, given.width)
    some = torch.rand(len(flat)) < 0.5
    some[int(torch.randint(len(flat), ()))] = True
    if given.strange == "mean":
        flat[some] += torch.randn(int(some.sum()), 1) * 100
    elif given.strange == "outlier":
        flat[some, int(torch.randint(given.width, ()))] = 300.0
        flat[some, 0] = -200.0
    elif given.strange == "equal":
        flat[some] = torch.randn(int(some.sum()), 1)
    elif given.strange == "zero":
        flat[some] = 0
    elif given.strange == "infinite":
        flat[some, int(torch.randint(given.width, ()))] = float("inf")
    elif given.strange == "nan":
        flat[some, int(torch.randint(given.width, ()))] = float("nan")
    elif given.strange == "large":
        flat[some] *= 10000
    elif given.strange == "small":
        flat[some] *= 1e-4
    return x


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64, and with kernels apart; the names of its kernels. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    short = torch.bfloat16 if "bf16" in plan else torch.float16
    model, x = Block(given).eval().to(short).requires_grad_(False), numbers(given).to(short)
    wide = x.double()
    x = x.mT.contiguous() if given.turned else x
    made = {}
    for rounds in (1000, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(normed, "_ROUNDS", rounds)
            with lapilli.compile(model, (x,), target=plan, fallback="error") as program:
                made[rounds] = program(x), program(x), kernels(program)
    (found, again, names), (apart, _, before) = made.values()
    with torch.no_grad():
        exact = model.double()(x.double())
    # A result is rounded, and the weights times gamma are, where y was. Sums of x and of its mean cancel in float32.
    step = 2**-8 if short is torch.bfloat16 else 2**-11
    cancelled = wide.abs().amax(-1) / (wide.var(-1, unbiased=False) + given.epsilon).sqrt()
    cancelled[wide.var(-1, unbiased=False) == 0] = 0  # rows of equal numbers are beta
    bound = 3 * step + 2**-20 * cancelled.nan_to_num(0, 0, 0).max()
    for y, same, two, wanted in zip(found, again, apart, exact, strict=True):
        assert torch.equal(y.nan_to_num(), same.nan_to_num()), f"{given}: runs differ"
        assert torch.equal(y.isnan(), two.isnan()) and torch.equal(y.isinf(), two.isinf()), f"{given}: other numbers"
        assert torch.equal(y.isnan(), wanted.isnan()), f"{given}: other numbers than torch's"
        finite = wanted.isfinite() & y.isfinite()
        if bool(finite.any()):
            error = float((y.double() - wanted)[finite].abs().max())
            allowed = bound * (8 * float(wanted[finite].square().mean().sqrt()) + max(given.gammas, 1e-3))
            assert error <= allowed, f"{given}: {error}, where {allowed} is allowed"
    assert names == before or given.elsewhere in ("", "residual"), f"{given}: {names}"
    return ["norms inside" if names != before else "norms apart"]


if __name__ == "__main__":
    random_cases.main(__doc__, "norms", ("gpu-fp16-matrix", "gpu-bf16-matrix"), check)
