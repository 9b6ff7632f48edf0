"""Attention whose keys and values lie in pages of a cache, against torch."""

from __future__ import annotations

import random
from typing import Any

import as_gpu
import pytest
import torch
from paged_attention import Paged, arguments, hidden
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli


@pytest.mark.part(2)
@pytest.mark.parametrize("seed", range(24))
def test_random_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    r, _ = random.Random(seed), torch.manual_seed(seed)
    half, page, most = r.random() < 0.4, r.choice([1, 3, 16, 64]), r.randint(1, 6)
    size, width = (r.choice([8, 32, 64]) for _ in range(2))
    first = r.choice([0, 0, 0, r.randint(0, page * most - 1)])
    options: dict[str, Any] = dict(two=r.random() < 0.1, first=first, nested=r.random() < 0.3)
    options["end"] = r.choice([None, r.randint(first + 1, page * most)])
    m = Paged(r.randint(most, 20), r.choice([1, 3]), page, size, width, 5, most, half, **options)
    queries = r.choice([n for n in (1, 2, 5, 40) if n <= len(m.places)])
    given = arguments(m, r.choice([1, 4]), r.choice([1, 2]), queries)
    target = "gpu-fp16" if half else r.choice(["cpu-fp32", "gpu-fp32", "any-fp32"])
    in_place = m.other is m.table and page > 1 and not first  # else it is copied
    if in_place and target != "any-fp32":  # which multiplies by weights of zero
        hidden(m, given)
    with lapilli.compile(m, given, target=target, precision="fp16" if half else "fp32", fallback="error") as p:
        found = p(*given)
    # NaN times a weight of zero is NaN in torch; a key that is not seen is not read here
    m.keys.nan_to_num_()
    m.values.nan_to_num_()
    wanted = m.double()(given[0].double(), *given[1:3], given[3].double(), given[4])
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (3e-3 if half else 3e-6), (target, m.keys.shape, given[0].shape)


def test_whole_lines_of_a_cache_are_not_copied() -> None:
    """As a decoder reads what an encoder gave for each of its sequences."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.values = (nn.Buffer(torch.randn(5, 3, 33, 32)) for _ in range(2))

        def forward(self, q: Tensor, line: Tensor) -> Tensor:
            self.keys[0, 0, 0, 0] = self.values[0, 0, 0, 0] = 1.0
            return F.scaled_dot_product_attention(q, self.keys[line], self.values.index_select(0, line))

    given = torch.randn(4, 3, 2, 32), torch.tensor([4, 0, 0, 2])
    with lapilli.compile(Given().eval(), given, target="cpu-fp32") as p:
        plan = p.description.methods[0].plans[0]
        assert [d.kernel for d in plan.run if d.kernel != "map"] == ["attention"]
