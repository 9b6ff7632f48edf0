"""Computed bools are kept as integers between kernels; every operator that reads one must still see a bool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from measure import Measurement, compile_for_device, interpreted, measure
from torch.nn.functional import scaled_dot_product_attention

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "not": lambda x: ~(x > 0),
    "mask of attention": lambda x: scaled_dot_product_attention(x, x, x, x @ x.mT > 0),
    "index": lambda x: x.index_put((x > 0,), torch.tensor(1.0)),
    "scatter": lambda x: (x > 0).scatter(0, torch.zeros(1, 5, 8, dtype=torch.int64), True),
    "sum and product": lambda x: ((x > 0) + (x < 1), (x > 0) * (x < 1), (x > 0).sum(0), (x > 0).cumsum(0)),
    "read twice": lambda x: (m := x > 0, ~m, m.mT, (m & m.any(0)).to(torch.float32)),
}


@pytest.mark.parametrize("compile", [interpreted, compile_for_device])
@pytest.mark.parametrize("name", CASES)
def test_computed_bools(name: str, compile: Any) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
    found: Measurement = measure(Function(CASES[name]), [x], compile)
    assert found.verdict == "right", found.reason
