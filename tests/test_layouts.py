"""The choice of layouts: nothing is read or written in large steps where another order of a value avoids it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import FLOAT_BOUND, relative_error
from test_graph import Wrap
from test_schedule import labels, plan
from torch import nn

import lapilli
from lapilli.target import ANY, GPU

torch.manual_seed(4)
X = torch.randn(1, 8, 12, 12)
T = torch.randn(1, 32, 48)
CONV, LINEAR, HEADS = nn.Conv2d(8, 16, 3), nn.Linear(16, 24), nn.Linear(48, 48)


def heads(x: torch.Tensor) -> torch.Tensor:
    """Self-attention in 4 heads, and the projection of what they give."""
    q = x.reshape(1, 32, 4, 12).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(1, 32, 48)
    return HEADS(y) + x


def heads_by_hand(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(1, 32, 4, 12).transpose(1, 2)
    y = torch.softmax(q @ q.transpose(-1, -2), -1) @ q
    return HEADS(y.transpose(1, 2).reshape(1, 32, 48)) + x


def to_linear(x: torch.Tensor) -> torch.Tensor:
    return LINEAR(CONV(x).permute(0, 2, 3, 1))


def from_linear(x: torch.Tensor) -> torch.Tensor:
    """Back from channels-last for one more convolution."""
    y = F.gelu(LINEAR(CONV(x).permute(0, 2, 3, 1)))[..., :8]
    return CONV(y.permute(0, 3, 1, 2))


def chain(x: torch.Tensor) -> torch.Tensor:
    """Pointwise values between convolutions stay channels-last."""
    y = CONV(x).sigmoid()
    z = (y * y.mean((2, 3), keepdim=True)).relu()
    return CONV(z[:, :8] + z[:, 8:])


def transposed_products(x: torch.Tensor) -> torch.Tensor:
    """The left operand of the second product is the first one transposed."""
    y = x[0] @ x[0].transpose(0, 1)
    return (y + 1).transpose(0, 1) @ x[0]


IN, OUT = "args_0", "conv2d_1_out"  # row-major, whatever convolutions would like

MODELS: dict[str, tuple[Callable[..., Any], torch.Tensor, set[str]]] = {  # and which values no order helps
    "attention": (heads, T, set()),
    "attention by hand": (heads_by_hand, T, set()),
    "convolution to linear": (to_linear, X, {IN}),
    "linear to convolution": (from_linear, X, {IN, OUT}),
    "chain": (chain, X, {IN, OUT}),
    "transposed products": (transposed_products, T, {"add"}),
}


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_strided(name: str, target: Any) -> None:
    f, x, allowed = MODELS[name]
    s = plan(f, x, target=target)
    assert {t.reason.partition("strided in memory: ")[2] for t in s.tasks} - {""} == allowed


def test_a_transition_is_paid_where_it_is_cheapest() -> None:
    """A product can store transposed at less cost than the next one could read so."""
    first, last = (t for t in plan(transposed_products, T).order.run if t.core is not None)
    assert "strided" in first.reason
    assert "strided" not in last.reason
    assert last.template is not None


def test_attention_is_projected_by_a_template() -> None:
    """The projection reads rows of consecutive elements: it needs no copy, and no generic kernel."""
    last = plan(heads, T).order.run[-1]
    assert last.label == "linear + add"
    assert last.template is not None


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_results_agree(target: str, gpu_plans: None) -> None:
    for name, (f, x, _) in MODELS.items():
        with torch.no_grad(), lapilli.compile(Wrap(f), (x,), target=target) as program:
            assert relative_error(program(x), f(x)) <= FLOAT_BOUND, name


def test_the_choice_is_the_same_every_time() -> None:
    one, other = (plan(heads_by_hand, T) for _ in range(2))
    assert labels(one) == labels(other)
    assert [one.layouts[t.out.id].order for t in one.tasks] == [other.layouts[t.out.id].order for t in other.tasks]
