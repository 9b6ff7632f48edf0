"""Attention to a cache under random masks: comparisons of places, of other integers of keys, and of positions. What kernels skip
because of a mask must not show.

    python tests/support/random_masks.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

import random_cases
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli

COMPARISONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    operator.le, operator.lt, operator.ge, operator.gt, operator.eq,
)  # fmt: skip
EXTREMES = (-(2**31), 2**31 - 1, -1, 0)


@dataclass
class Case:
    """comparisons: (what of a key, a number added to it, the operator, a number added to the position, whether the key is the
    second operand).
    """

    context: int
    heads: int
    groups: int
    size: int
    positions: list[int]
    comparisons: list[tuple[str, int, int, int, bool]]
    places: torch.dtype

    def masked(self, places: Tensor, integers: Tensor, m: Tensor) -> Tensor:
        mask = torch.ones((), dtype=torch.bool)
        for of, added, index, back, turned in self.comparisons:
            key = (places if of == "place" else integers if of == "integer" else -places) + added
            position = m + back if back else m
            pair = (position, key) if turned else (key, position)
            mask = mask & COMPARISONS[index](*pair)
        return mask


def case(seed: int) -> Case:
    r = random.Random(seed)
    context = r.choice((1, 7, 63, 64, 65, 130, 300, 513, 900))
    groups, share = r.choice(((1, 1), (2, 1), (2, 4), (1, 3), (3, 3)))
    count = r.choice((1, 1, 1, 2, 3, 5, 8, 9, 17, 40))
    near = r.randrange(context)
    positions = [min(near + k, context - 1) if r.random() < 0.8 else r.randrange(-3, context + 3) for k in range(count)]
    comparisons = []
    for _ in range(r.choice((1, 1, 2, 2, 3))):
        of = r.choice(("place", "place", "place", "integer", "reversed"))
        # ranges that are not empty as a rule: up to the position, or from somewhere before it on
        kind = r.choice((0, 0, 1, 2, 2, 3, 4) if r.random() < 0.3 else (0, 1))
        back = r.choice((0, 0, 1, -1, -20, 64)) if kind < 2 or kind == 4 else -r.randrange(1, context + 1)
        comparisons.append((of, r.choice((0, 0, 0, 1, -5, 70)), kind, back, kind == 4 and r.random() < 0.5))
    if all(c[3] == 0 for c in comparisons) and r.random() < 0.3:
        positions[r.randrange(count)] = r.choice(EXTREMES)
    places = r.choice((torch.int64, torch.int32))
    return Case(context, groups * share, groups, r.choice((16, 32, 64, 72)), positions, comparisons, places)


class Masked(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        shape = (1, given.groups, given.context, given.size)
        self.keys, self.values = (nn.Buffer(torch.randn(shape).half()) for _ in range(2))
        self.places = nn.Buffer(torch.arange(given.context, dtype=given.places), persistent=False)
        self.integers = nn.Buffer(torch.randperm(given.context), persistent=False)

    def forward(self, q: Tensor, positions: Tensor, new: Tensor, place: Tensor) -> Tensor:
        self.keys[:, :, place] = new
        self.values[:, :, place] = new
        mask = self.given.masked(self.places, self.integers, positions[:, None])
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64; the name of its kernel. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    model = Masked(given)
    q = torch.randn(1, given.heads, len(given.positions), given.size).half()
    new = torch.randn(1, given.groups, 1, given.size).half()
    args = (q, torch.tensor(given.positions), new, torch.tensor([given.context // 2]))
    with lapilli.compile(model, args, target=plan, fallback="error") as program:
        got = program(*args)
        names = [d.kernel for p in program.description.methods[0].plans for d in p.run]
    with torch.no_grad():
        wanted = model.double()(q.double(), args[1], new.double(), args[3])
    # Weights and results are rounded to halves, and weights add up to 1. Rows that see nothing are zeros, as torch has them.
    bound = 2**-9 * float(model.values.abs().max())
    torch.testing.assert_close(
        got.double(), wanted, rtol=2**-10, atol=bound, equal_nan=True, msg=lambda found: f"{given}: {found}"
    )
    return [next(name for name in names if name.startswith("attention"))]


if __name__ == "__main__":
    random_cases.main(__doc__, "masks", ("gpu-fp16-matrix",), check)
