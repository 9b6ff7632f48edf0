"""Random products of the same few rows with several matrices of codes, on matrix units: kernels compute some of them together
(codegen/side_by_side.py). What reads them, which are results, biases, gates, sizes, how many work groups share a sum.

    python tests/support/random_side_by_side.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import random_cases
import torch
from random_codes import taken
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli

_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotation": lambda y: y[..., ::2] * 0.6 - y[..., 1::2] * 0.8,
    "itself": lambda y: y,
    "end": lambda y: F.silu(y),
    "norm": lambda y: F.layer_norm(y.float(), y.shape[-1:]).to(y.dtype),
    "heads": lambda y: F.layer_norm(y.unflatten(-1, (4, -1)).float(), (y.shape[-1] // 4,)).to(y.dtype),
    "sum": lambda y: y.float().sum(-1),
    "twice": lambda y: torch.cat([y[..., ::2] + y[..., 1::2], y[..., ::2] * y[..., 1::2]], -1),
    "odd product": lambda y: y[..., 1:38] @ torch.linspace(-1, 1, 37 * 8).to(y).view(37, 8),
    "attention": lambda y: _of_heads(y, 4),
    "wide attention": lambda y: _of_heads(y, 32),
    "across": lambda y: y.mT[..., : y.shape[-2] // 2] * 2 + y.mT[..., -(y.shape[-2] // 2) :],
}
"""What is computed of a product."""


def _of_heads(y: Tensor, size: int) -> Tensor:
    """Attention of a product's columns with themselves."""
    heads = y.unflatten(-1, (-1, size)).transpose(-2, -3)
    return F.scaled_dot_product_attention(heads, heads * 0.1, heads)


@dataclass(frozen=True)
class Case:
    """rows: of the input, in one or two dimensions; columns, readers, biases: of each product; group: terms that a scale is for;
    odd: a product whose codes are others; computed: one whose scales are computed of the input; gate: columns of two products whose
    results are multiplied, 0: none; halves: whether the model is in halves; units: of the GPU; strange: what is not finite.
    """

    rows: tuple[int, ...]
    terms: int
    columns: tuple[int, ...]
    readers: tuple[str, ...]
    biases: tuple[bool, ...]
    group: int
    odd: int | None
    computed: int | None
    gate: int
    read_twice: bool
    halves: bool
    units: int
    strange: str


def case(seed: int) -> Case:
    r = random.Random(seed)
    rows = r.choice(((3,), (4,), (8,), (16,), (17,), (32,), (33,), (50,), (64,), (2, 9), (3, 16)))
    terms = r.choice((128, 256, 288, 512, 544, 1024, 1056, 2048))
    count = r.choice((1, 2, 2, 3, 3, 4))
    plain = r.random() < 0.5
    return Case(
        rows, terms, tuple(r.choice((128, 128, 128, 128, 256, 256, 384, 64, 132)) for _ in range(count)),
        tuple(r.choice(tuple(_READERS)) if r.random() < 0.6 else "rotation" for _ in range(count)),
        tuple(not plain and r.random() < 0.6 for _ in range(count)), r.choice([g for g in (32, 64, 128) if terms % g == 0]),
        r.choice((None, None, None, None, r.randrange(count))),
        r.choice((None, None, None, None, r.randrange(count))), r.choice((0, 64, 128, 192, 256, 80)), r.random() < 0.2,
        r.random() < 0.5, r.choice((1, 3, 4, 4, 5, 6, 8)), r.choice(("", "", "", "row", "infinite row")),
    )  # fmt: skip


class Layers(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        columns = [*given.columns, *[given.gate] * (2 if given.gate else 0)]
        self.codes, self.scales, self.biases = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for k, n in enumerate(columns):
            low, high = (0, 16) if k == given.odd else (-8, 8)
            codes = torch.randint(low, high, (n, given.terms)).to(torch.uint8 if low == 0 else torch.int8)
            scale = (torch.rand(n, given.terms // given.group, 1) + 0.5) / (4.6 * given.terms**0.5)
            self.codes.append(nn.Parameter(codes, requires_grad=False))
            self.scales.append(nn.Parameter(scale.half()))
            self.biases.append(nn.Parameter(torch.randn(n).half().float()))

    def matrices(self, x: Tensor) -> list[Tensor]:
        found = []
        for k, (q, s) in enumerate(zip(self.codes, self.scales, strict=True)):
            scale = s.to(x.dtype)
            if k == self.given.computed:
                scale = scale * (1 + (x[..., :1] != 0).any()).to(x.dtype)  # twice as large, unless all is zero
            found.append((q.reshape(len(q), -1, self.given.group).to(x.dtype) * scale).flatten(1))
        return found

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """What reads the products, and the gate's result."""
        given, w = self.given, self.matrices(x)
        found = []
        for k, (name, bias) in enumerate(zip(given.readers, given.biases, strict=True)):
            found.append(_READERS[name](F.linear(x, w[k], self.biases[k].to(x.dtype) if bias else None)))
        if not given.gate:
            return found, None
        gate = F.linear(x, w[-2])
        if given.read_twice:
            found.append(_READERS["rotation"](gate))
        return found, F.silu(gate) * F.linear(x, w[-1])


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64; how many products kernels compute together. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    model = Layers(given).eval().requires_grad_(False)
    x = torch.randn(*given.rows, given.terms).half().float()
    if given.strange:
        x.view(-1, given.terms)[0, -1] = torch.nan if given.strange == "row" else torch.inf
    wide, x = x.double(), x.half() if given.halves else x
    with taken(given.units, plan), torch.no_grad():
        with lapilli.compile(model, (x,), target=plan, precision="fp16", fallback="error") as program:
            y, gated = program(x)
            kernels = sum(k.kernel == "matmul_matrix" for k in program.profile([x.numpy()], 1).kernels)
        wanted, wanted_gate = model(wide)
        products = [F.linear(wide.abs(), w.abs()) + 8 for w in model.matrices(wide)]
    for k, (got, want) in enumerate(zip([*y, gated], [*wanted, wanted_gate], strict=True)):
        if got is None:
            continue
        assert torch.equal(got.isnan(), want.isnan()), f"{given}: other numbers in result {k}"
        finite = want.isfinite() & got.isfinite() & (want.abs() < 60000)
        name = "" if got is gated else given.readers[k] if k < len(given.readers) else "rotation"
        if name in ("attention", "wide attention"):
            bound = 2.0**-6 * products[k].amax().expand(want.shape)  # weights follow differences of scores
        elif name in ("norm", "heads"):
            bound = torch.full_like(want, 2e-2)  # of numbers of size one
        elif name == "sum":
            bound = 8 * 2.0**-11 * products[k].sum(-1)
        else:
            size = float(max(p[p.isfinite()].max() for p in products))
            bound = 8 * 2.0**-11 * torch.full_like(want, size) * (size if name in ("", "twice") else 1)
        wrong = ((got.double() - want).abs() > bound)[finite]
        assert not bool(wrong.any()), f"{given}: {int(wrong.sum())} of {wrong.numel()} of result {k}"
    return [f"{len(model.codes)} products by {kernels} tiles"]


if __name__ == "__main__":
    random_cases.main(__doc__, "models", ("gpu-fp16-matrix",), check)
