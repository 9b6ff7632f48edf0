"""Random products of several rows and packed weights on matrix units: codes become numbers where they are multiplied, or on the way
into shared memory (codegen/coded.py). Rows, sizes, forms of weights, what follows, how many work groups share a sum, infinities.

    python tests/support/random_codes.py [--seconds 60] [--seed 0] [--plan cpu-fp32] [--gpu-plans]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import random_cases
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.code_operators import E2M1, LOOK_UP, NONLINEAR, UNPACK, pack, pack_by_fours
from lapilli.codegen import tiles
from lapilli.codegen.tiles import MatrixTile
from lapilli.target import TARGETS

_CODES = (
    (4, -8, 8), (4, -8, 8), (4, -8, 8), (4, 0, 16), (4, -7, 8), (4, 3, 19), (8, -128, 128),
    (6, -32, 32), (5, 0, 32), (5, -16, 16), (3, -4, 4), (2, 0, 4), (1, 0, 2), (7, 0, 128),
)  # fmt: skip
_PLANES = {1: (1, 0), 2: (2, 0), 3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bits of codes in a first tensor, and further ones in a second, for codes that do not lie in integers of torch."""
_ENDS = (nn.Identity, nn.Identity, nn.ReLU, nn.SiLU, nn.GELU)


@dataclass(frozen=True)
class Case:
    """rows: of the input, in one or two dimensions; group: terms that a scale is for; codes: bits, and from which number to which;
    by_fours: whether codes of a few bits lie so; half: whether scales are halves; offset: whether something is added to each
    weight, a number for each scale; zero: what zero points are, which may lie two in a byte; end: what follows; halves: whether the
    input is halves, and so is what the model computes; turned: whether rows lie across memory; units: of the GPU; strange: what is
    not finite; table: of the numbers that codes stand for, if they do.
    """

    rows: tuple[int, ...]
    columns: int
    terms: int
    group: int
    codes: tuple[int, int, int]
    by_fours: bool
    half: bool
    offset: bool
    zero: str
    bias: bool
    end: int
    residual: bool
    halves: bool
    turned: bool
    units: int
    strange: str
    table: tuple[int, ...] = ()


_TABLES = ((), NONLINEAR, NONLINEAR, E2M1, E2M1, tuple(range(-128, 128, 17)))


def case(seed: int) -> Case:
    r = random.Random(seed)
    rows = r.choice(
        ((1,), (2,), (3,), (7,), (8,), (16,), (17,), (31,), (32,), (33,), (50,), (64,), (65,), (2, 9), (3, 16))
    )
    terms = r.choice((32, 96, 128, 256, 288, 416, 512, 544, 1056, 1024, 2048, 2080))
    group = r.choice([g for g in (16, 32, 32, 64, 64, 128, 128, terms) if terms % g == 0])
    made = Case(
        rows, r.choice((24, 60, 64, 96, 100, 128, 130, 200, 300)), terms, group, r.choice(_CODES),
        r.random() < 0.7, r.random() < 0.8,
        (offset := r.random() < 0.15), "" if offset else r.choice(("", "", "int8", "nibbles", "float")),
        r.random() < 0.5, r.randrange(len(_ENDS)), r.random() < 0.3, r.random() < 0.6, r.random() < 0.2,
        r.choice((1, 1, 2, 5, 9)),
        r.choice(("", "", "", "", "scale", "row", "infinite row")),
    )  # fmt: skip
    return replace(made, table=r.choice(_TABLES)) if made.codes == (4, 0, 16) else made


class Layer(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        bits, low, high = given.codes
        groups = (given.columns, given.terms // given.group, 1)
        scale = (torch.rand(groups) + 0.5) / (4.6 * given.terms**0.5)
        codes = torch.randint(low, high, (given.columns, given.terms))
        if given.strange == "scale":  # all of whose products have one sign where x has
            column = int(torch.randint(given.columns, ()))
            scale[column, -1] = torch.inf
            codes[column, -given.group :] = high - 1
        kind = torch.float16 if given.half else torch.float32
        integers = torch.uint8 if low >= 0 else torch.int8
        self.q: Tensor
        self.upper: Tensor | None
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("q", codes.to(integers))
        if bits in _PLANES:
            packed = pack_by_fours if given.by_fours else pack
            first, above = _PLANES[bits]
            numbers = (codes - low).numpy()
            self.register_buffer("q", torch.from_numpy(packed(numbers & (1 << first) - 1, first)))
            self.register_buffer("upper", torch.from_numpy(packed(numbers >> first, above)) if above else None)
        self.register_buffer("scale", scale.to(kind))
        # No weight is zero: of an infinity it would make NaN, if it is exactly that.
        self.register_buffer("offset", (scale.nan_to_num(posinf=1) * 2.7).to(kind))
        self.zero: Tensor
        zeros = torch.randint(max(low, -128), min(high - 1, 127), groups)  # not the highest code, of which a row is
        if given.zero == "nibbles":
            zeros = torch.randint(0, 256, (given.columns, -(-groups[1] // 2)))
        kinds = {"": torch.int8, "int8": torch.int8, "nibbles": torch.uint8, "float": torch.float32}
        self.register_buffer("zero", zeros.to(kinds[given.zero]))
        self.bias = nn.Parameter(torch.randn(given.columns).half().float())
        self.end = _ENDS[given.end]()

    def codes(self) -> Tensor:
        given = self.given
        bits, low, _ = given.codes
        if bits not in _PLANES:
            return self.q
        first, above = _PLANES[bits]
        found: Tensor = UNPACK(self.q, low, given.terms, first, self.upper, above, given.by_fours)
        return found

    def matrix(self, dtype: torch.dtype) -> Tensor:
        given = self.given
        codes = LOOK_UP(self.codes(), given.table) if given.table else self.codes()
        w = codes.reshape(given.columns, -1, given.group).to(dtype)
        if given.zero == "nibbles":
            groups = given.terms // given.group
            w = w - UNPACK(self.zero, 0, groups)[..., None].to(dtype)
        elif given.zero:
            w = w - self.zero.to(dtype)
        w = w * self.scale.to(dtype)
        w = w + self.offset.to(dtype) if given.offset else w
        return w.reshape(given.columns, given.terms)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT if self.given.turned else x
        y = F.linear(x, self.matrix(x.dtype), self.bias.to(x.dtype) if self.given.bias else None)
        return self.end(y) + x[..., :1] if self.given.residual else self.end(y)


@contextmanager
def taken(units: int, plan: str) -> Iterator[list[MatrixTile]]:
    """The tiles that are taken for few rows, on a GPU of so many units that has the shared memory of software devices."""
    found = list[MatrixTile]()

    def spied(*given: Any) -> list[MatrixTile]:
        made = few(*given)
        found.extend(made)
        return made

    few = tiles._few_for_codes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_few_for_codes", spied)
        patch.setattr(
            tiles, "_STRAIGHT_FEW", tuple(replace(t, tile=replace(t.tile, ep=1)) for t in tiles._STRAIGHT_FEW)
        )
        patch.setitem(TARGETS, plan, replace(TARGETS[plan], compute_units=units))
        yield found


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64; what kind of tile it has. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    model = Layer(given).eval().requires_grad_(False)
    x = torch.randn(*given.rows, given.terms).half().float()
    if given.strange == "scale":
        x[..., -given.group :].abs_()
    if given.strange.endswith("row"):
        x.view(-1, given.terms)[0, -1] = torch.nan if given.strange == "row" else torch.inf
    wide, x = x.double(), x.half() if given.halves else x
    if given.turned:
        wide, x = wide.mT.contiguous(), x.mT.contiguous()
    with taken(given.units, plan) as found, torch.no_grad():
        precision: Literal["fp16", "fp32"] = "fp16" if "fp16" in plan else "fp32"
        with lapilli.compile(model, (x,), target=plan, precision=precision, fallback="error") as program:
            y = program(x)
        wanted, matrix = model(wide), model.matrix(torch.float64)
    wide = wide.mT if given.turned else wide
    assert torch.equal(y.isnan(), wanted.isnan()), f"{given}: other numbers"
    finite = wanted.isfinite() & y.isfinite() & (wanted.abs() < 60000)
    # Rows, weights, and what they are computed of, are rounded to halves; results are, and so is what is added to them. In float32
    # a sum rounds once a term.
    unit = 4 * 2.0**-11 if precision == "fp16" or given.halves or given.half else (given.terms + 32) * 2.0**-23
    bound = unit * (F.linear(wide.abs(), matrix.abs()) + 8)
    wrong = ((y.double() - wanted).abs() > bound)[finite]
    assert not bool(wrong.any()), f"{given}: {int(wrong.sum())} of {wrong.numel()}"
    return [f"straight in {t.parts} parts" if t.straight else f"shared memory in {t.parts} parts" for t in found] or [
        "others"
    ]


if __name__ == "__main__":
    random_cases.main(__doc__, "products", ("gpu-fp16-matrix", "gpu-fp32"), check)
