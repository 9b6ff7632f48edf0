"""A query that several heads ask the same keys: as rows of one product, where that is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli.capture import capture
from lapilli.graph.shared_heads import share_heads
from lapilli.legalize.passes import functional


class Repeated(nn.Module):
    """As transformers repeats keys."""

    def __init__(self, n: int, causal: bool = False, operator: bool = False) -> None:
        super().__init__()
        self.n, self.causal, self.operator = n, causal, operator

    def repeat(self, x: Tensor) -> Tensor:
        b, g, s, d = x.shape
        return x if self.operator else x[:, :, None].expand(b, g, self.n, s, d).reshape(b, g * self.n, s, d)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            q, self.repeat(k), self.repeat(v), mask, is_causal=self.causal, enable_gqa=self.operator, scale=0.3
        )


def arguments(b: int, g: int, n: int, rows: int, s: int, d: int, dv: int) -> tuple[Tensor, ...]:
    torch.manual_seed(b + g + n + rows + s + d)
    return torch.randn(b, g * n, rows, d), torch.randn(b, g, s, d), torch.randn(b, g, s, dv)


MASKS: dict[str, Any] = {
    "none": lambda b, h, s: (),
    "keys": lambda b, h, s: (torch.rand(1, s) > 0.3,),
    "rows": lambda b, h, s: (torch.rand(b, 1, 1, s) > 0.3,),
    "numbers": lambda b, h, s: (torch.randn(1, 1, 1, s),),
    "all": lambda b, h, s: (torch.zeros(b, 1, 1, s, dtype=torch.bool),),
}


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 3, 3, 1, 17, 8, 8), (1, 1, 4, 1, 5, 7, 3), (3, 2, 5, 1, 1, 4, 4)])
def test_shared(shape: tuple[int, ...], mask: str, operator: bool) -> None:
    b, g, n, _, s, *_ = shape
    model, given = Repeated(n, operator=operator), (*arguments(*shape), *MASKS[mask](b, g * n, s))
    module = functional(capture(model, given))
    assert share_heads(module) == 1
    with lapilli.compile(model, given) as program:
        torch.testing.assert_close(program(*given), model(*given), equal_nan=True)


@pytest.mark.parametrize(
    "model, shape, mask",
    [
        (Repeated(3), (2, 3, 3, 2, 17, 8, 8), ()),  # two queries: their masks differ
        (Repeated(3, causal=True), (2, 3, 3, 1, 17, 8, 8), ()),  # this query sees the first key alone
        (Repeated(3), (2, 3, 3, 1, 17, 8, 8), (torch.randn(1, 9, 1, 17),)),  # a mask for each head
        (Repeated(1), (2, 3, 1, 1, 17, 8, 8), ()),
        (Repeated(9), (1, 2, 9, 1, 17, 8, 8), ()),  # many rows
    ],
)  # fmt: skip
def test_not_shared(model: nn.Module, shape: tuple[int, ...], mask: tuple[Tensor, ...]) -> None:
    given = (*arguments(*shape), *mask)
    assert share_heads(functional(capture(model, given))) == 0
    with lapilli.compile(model, given) as program:
        torch.testing.assert_close(program(*given), model(*given), equal_nan=True)


def test_other_repetitions() -> None:
    """Heads in another order are not the same heads."""

    class Tiled(Repeated):
        def repeat(self, x: Tensor) -> Tensor:
            return x.repeat(1, self.n, 1, 1)

    given = arguments(2, 3, 2, 1, 9, 8, 8)
    with lapilli.compile(Tiled(2), given) as program:
        torch.testing.assert_close(program(*given), Tiled(2)(*given))


def test_open_sizes() -> None:
    given = arguments(2, 3, 3, 1, 17, 8, 8)
    batch, keys = torch.export.Dim("b", min=1, max=8), torch.export.Dim("s", min=2, max=64)
    sizes = ({0: batch}, {0: batch, 2: keys}, {0: batch, 2: keys})
    with lapilli.compile(Repeated(3), given, dynamic_shapes=sizes) as program:
        for b, s in ((2, 17), (1, 2), (8, 63)):
            other = arguments(b, 3, 3, 1, s, 8, 8)
            torch.testing.assert_close(program(*other), Repeated(3)(*other))
