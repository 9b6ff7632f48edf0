"""Products and quotients of values that a kernel's compiler knows, as it does a lane's place in a row of four: 0 * NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, arange

import lapilli

Factor = Callable[[Tensor, int], Tensor]
FACTORS: dict[str, Factor] = {
    "place": lambda x, n: x * arange(n),
    "from the end": lambda x, n: x * (n - 1 - arange(n)),
    "remainder": lambda x, n: x * (arange(n) % 3),
    "quotient": lambda x, n: x * (arange(n) // 2),
    "mask": lambda x, n: x * (arange(n) > 1).float(),
    "bool": lambda x, n: x * (arange(n) % 2 == 0),
    "where": lambda x, n: x * torch.where(arange(n) > 1, 0.0, 2.0),
    "difference": lambda x, n: x * (arange(n).float() - 1),
    "clamp": lambda x, n: x * (arange(n).float() - 2).clamp(min=0),
    "eye": lambda x, n: x * torch.eye(n)[0],
    "lerp": lambda x, n: torch.lerp(x, torch.ones(n), arange(n) / max(n - 1, 1)),
    "sine": lambda x, n: torch.sin(arange(n).float()) * x,
    "of known": lambda x, n: x + torch.where(arange(n) > 1, float("nan"), 0.0) * (arange(n) % 2),
    "over": lambda x, n: arange(n) / x,
}


class Model(torch.nn.Module):
    """All factors of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> list[Tensor]:
        return [factor(x, self.length) for factor in FACTORS.values()]


@pytest.mark.poor_device
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
def test_what_is_not_finite_stays(length: int) -> None:
    model = Model(length)
    for lead in ((), (3,)):
        with lapilli.compile(model, (torch.ones(*lead, length),)) as program:
            for value in ("nan", "inf", "-inf", "0", "-0.0", "1"):
                x = torch.full((*lead, length), float(value))
                for name, a, b in zip(FACTORS, program(x), model(x), strict=True):
                    assert torch.equal(a.isnan(), b.isnan()), f"{name} of {value}: {a}, torch's {b}"
                    torch.testing.assert_close(a, b, equal_nan=True)
