"""Random products on matrix units whose sums work groups share, or whose right operand is packed by fragments, or both: sizes,
layouts, numbers of parts, what follows, infinities. Who is the last to finish must not show, and a run begins to count at zero.

    python tests/support/random_sums.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]

An upper bound of the error is carried through what follows, beside the value in float64.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import random_cases
import torch
from taken_plan import taken_plan
from torch import Tensor, nn

import lapilli
from lapilli.codegen import gpu, tiles

_TILES = (
    (32, 32, 64, 16, 16, 1, 1),
    (32, 32, 32, 16, 16, 1, 1),
    (16, 32, 64, 16, 16, 2, 1),
    (32, 64, 64, 32, 32, 1, 2),
)
_OF_FRAGMENTS = (
    (16, 64, 32, 16, 32, 1, 1),
    (32, 32, 64, 32, 16, 2, 2),
    (64, 64, 64, 64, 64, 2, 1),
    (48, 128, 64, 48, 32, 1, 1),
)
"""Whose work groups have one row of subgroups, as large ones have that are chosen for fragments."""
_RUNS = 3


@dataclass(frozen=True)
class Case:
    """left, right: whether the operand lies across the sum. after: operations on the product; second: whether another product reads
    the result. strange: where the left operand is infinite or NaN; strange_w: the right one. fragments: whether that one is packed
    by fragments; given: whether it is an input.
    """

    tile: tiles.MatrixTile
    m: int
    n: int
    k: int
    left: bool
    right: bool
    after: tuple[str, ...]
    second: bool
    strange: tuple[tuple[int, int, float], ...]
    strange_w: tuple[tuple[int, int, float], ...]
    fragments: bool
    given: bool


def case(seed: int) -> Case:
    r = random.Random(seed)
    fragments = r.random() < 0.5
    tile = tiles.MatrixTile(*r.choice((*_TILES, *_OF_FRAGMENTS) if fragments else _TILES))
    tile = replace(tile, parts=r.choice((1, 2, 2, 3, 4, 7)), swizzle=r.random() < 0.3)
    left, right = r.random() < 0.2, r.random() < 0.3
    m = 8 * r.randint(1, 12) if left else r.choice((15 if fragments else 1, 15, 16, 17, 33, 64, 97))
    k = r.choice((24, 64, 120, 200, 256, 328, 512, 1000)) + (r.randrange(8) if left and not right else 0)
    after = tuple(r.choice(("bias", "residual", "relu", "twice", "columns")) for _ in range(r.randint(0, 3)))
    n = 8 * r.randint(1, 14) - (r.randrange(8) if fragments else 0)

    def strange(rows: int, columns: int) -> tuple[tuple[int, int, float], ...]:
        values = float("inf"), float("-inf"), float("nan")
        return tuple((r.randrange(rows), r.randrange(columns), r.choice(values)) for _ in range(r.choice((0, 0, 1, 3))))

    given = fragments and r.random() < 0.3
    second = r.random() < 0.3
    return Case(
        tile, m, n, k, left, right, after, second, strange(m, k), strange(k, n) if fragments else (), fragments, given
    )


class Sums(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        n, k = given.n, given.k
        self.w = nn.Buffer(torch.randn((k, n) if given.right else (n, k)).half())
        for row, column, value in given.strange_w:
            self.w[(row, column) if given.right else (column, row)] = value
        self.bias, self.residual = nn.Buffer(torch.randn(n).half()), nn.Buffer(torch.randn(given.m, n).half())
        self.v = nn.Buffer((torch.randn(n, n) / n**0.5).half())

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return (x.t() if self.given.left else x) @ (w if self.given.right else w.t())

    def forward(self, x: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
        y = self.product(x, self.w if w is None else w)
        for name in self.given.after:
            if name == "bias":
                y = y + self.bias
            elif name == "residual":
                y = y + self.residual
            elif name == "relu":
                y = y.relu()
            elif name == "twice":
                y = y * 2
            else:
                y = y * self.bias[:, None].t()
        return (y, y @ self.v.t()) if self.given.second else (y,)


def divide(tile: tiles.MatrixTile, patch: pytest.MonkeyPatch) -> None:
    """Every product whose sum may be shared has this tile, however small it is."""
    found = tiles.matrix_tiles

    def matrix_tiles(*args: Any, **given: Any) -> list[tiles.MatrixTile]:
        may_be = given.get("divisible") or given.get("joinable")
        return [tile, *found(*args, **given)] if may_be else found(*args, **given)

    patch.setattr(tiles, "matrix_tiles", matrix_tiles)


def _force(given: Case, patch: pytest.MonkeyPatch) -> None:
    divide(given.tile, patch)
    patch.setattr(gpu, "fragments_pay", lambda *_: given.fragments)
    patch.setattr(gpu, "WORTH_PACKING", 0)


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64, and runs with each other; the name of its kernel. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    model = Sums(given)
    x = (torch.randn((given.k, given.m) if given.left else (given.m, given.k)) / given.k**0.5).half()
    for row, column, value in given.strange:
        x[(column, row) if given.left else (row, column)] = value
    with pytest.MonkeyPatch.context() as patch:
        _force(given, patch)
        inputs = (x, model.w) if given.given else (x,)
        program = lapilli.compile(model, inputs, target=plan, fallback="error")
    with program:
        runs = [program(*inputs) for _ in range(_RUNS)]
        chosen = taken_plan(program)
        names = [d.kernel for d in chosen.run if int(str(d.groups[2])) == given.tile.parts]
        packed = [d.kernel for d in (*chosen.load, *chosen.run) if d.kernel == "pack_fragments"]
    for run in runs:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{given}: runs differ"
    with torch.no_grad():
        wanted = model.double()(*(i.double() for i in inputs))
    # Sums of numbers whose squares add up to about n, kept in float32; results, and what a second product reads, are halves.
    for got, exact in zip(runs[0], wanted, strict=True):
        size = float(exact[exact.isfinite()].abs().max()) if bool(exact.isfinite().any()) else 1.0
        torch.testing.assert_close(
            got.double(), exact.half().double(), rtol=2**-9, atol=2**-9 * size, equal_nan=True,
            msg=lambda found: f"{given}: {found}",
        )  # fmt: skip
    assert names, f"{given}: no product is divided"
    assert bool(packed) == given.fragments, f"{given}: {packed}"
    return [*names, *packed]


if __name__ == "__main__":
    random_cases.main(__doc__, "sums", ("gpu-fp16-matrix",), check)
