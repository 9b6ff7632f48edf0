"""RowFusion fusion and attention: how many kernels there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plans import labels, plan
from row_cases import ROWS, X, heads

from lapilli.target import ANY, CPU, GPU, Target


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_one_kernel(name: str, target: Target) -> None:
    assert len(labels(plan(ROWS[name], X, target=target))) == 1


def test_what_others_read_stays_a_kernel() -> None:
    s = plan(lambda x: (x.amax(-1), x.softmax(-1)), X)
    assert len(s.order.run) == 2


def test_long_rows_stay_apart() -> None:
    """Each reduction of theirs has two steps, in which many invocations share."""
    assert len(plan(lambda x: x.softmax(-1), torch.randn(2, 20000), target=GPU).order.run) > 1
    assert len(plan(lambda x: x.softmax(-1), torch.randn(2, 5000), target=ANY).order.run) > 1


def test_a_producer_is_computed_in_the_row() -> None:
    """Where the row is kept in registers; elsewhere only what is cheap to compute in every pass."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x + y), (24,))

    assert len(plan(f, X, X, target=GPU).order.run) == 1
    assert len(plan(f, X, X, target=CPU).order.run) == 2
    assert len(plan(lambda x, y: F.layer_norm(x + y, (24,)), X, X, target=CPU).order.run) == 1


def test_attention_is_one_kernel_on_gpus() -> None:
    def block(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in x.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=(1 - mask[:, None, None]) * -1e4)
        return out.transpose(1, 2).flatten(-2)

    args = torch.randn(2, 33, 96), torch.ones(2, 33)
    assert len(plan(block, *args, target=GPU).order.run) == 1
    assert 3 <= len(plan(block, *args, target=ANY).order.run) <= 5


def test_attention_of_large_heads_falls_back() -> None:
    """Tiles of heads of 512 do not fit into the memory of a work group."""
    s = plan(F.scaled_dot_product_attention, *heads(1, 2, 9, 512), target=GPU)
    assert len(s.order.run) >= 3


def test_dropout_is_refused() -> None:
    with pytest.raises(TypeError, match="dropout_p is 0.1"):
        plan(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), *heads(1, 2, 5, 8))
