"""NaN and infinities in attention with masks: a mask adds -inf, which they outlast, and a weight of 0 does not hide them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")

SHAPES = [  # batch, heads, queries, keys, width
    (5, 2, 1, 1, 2), (2, 1, 1, 5, 4), (2, 1, 5, 1, 4), (1, 2, 33, 17, 8), (1, 1, 1, 200, 64), (1, 1, 64, 64, 64), (1, 2, 3, 9, 20),
]  # fmt: skip


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _masks(queries: int, keys: int) -> dict[str, Tensor]:
    some = torch.rand(queries, keys) < 0.5
    some[0] = False
    float_mask = torch.where(some, 0.0, -torch.inf)
    return {"all": torch.ones_like(some), "none": torch.zeros_like(some), "some": some, "float": float_mask}


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32", "gpu-fp16-matrix"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_special_values_and_masks(shape: tuple[int, ...], target: str) -> None:
    check(shape, target)


def test_an_open_batch() -> None:
    """Its parts are put together by a second kernel."""
    batch = torch.export.Dim("batch", min=0, max=50)
    check((2, 1, 1, 200, 64), "gpu-fp32", dynamic_shapes=({0: batch}, {0: batch}, {0: batch}, None))


def check(shape: tuple[int, ...], target: str, **how: Any) -> None:
    """NaN and infinities are where torch's result in float64 has them."""
    torch.manual_seed(0)
    batch, heads, queries, keys, width = shape
    half = target == "gpu-fp16-matrix"
    dtype = torch.float16 if half else torch.float32
    bound = 4e-3 if half else 5e-6  # rounded weights and results; sums of 200 terms
    model, masks = _Attention(), _masks(queries, keys)
    plain = [torch.randn(batch, heads, n, width, dtype=dtype) for n in (queries, keys, keys)]
    for kind in (torch.bool, dtype):
        like = {name: m if m.dtype is torch.bool else m.to(dtype) for name, m in masks.items()}
        like = {name: m for name, m in like.items() if m.dtype is kind}
        first = next(iter(like.values()))
        with lapilli.compile(
            model, (*plain, first), target=target, precision="fp16" if half else "fp32", **how
        ) as program:
            for name, mask in like.items():
                for place, value in itertools.product(range(3), (torch.nan, torch.inf, -torch.inf)):
                    given = [x.clone() for x in plain]
                    given[place][0, 0, 0, 0] = value
                    found = program(*given, mask).double()
                    exact = model(*(x.double() for x in given), mask if kind is torch.bool else mask.double())
                    what = f"mask {name}, {value} in {'qkv'[place]}: " + "{}"
                    torch.testing.assert_close(found, exact, rtol=0, atol=bound, equal_nan=True, msg=what.format)
