"""Gradients of attention on matrix units, of any sizes, masks and layouts, by each of their tiles."""

from __future__ import annotations

import pytest
import random_attention
import random_attention_gradients
import torch
from torch import Tensor, nn

import lapilli
from lapilli.attention_operators import ATTENTION_BACKWARD

pytestmark = pytest.mark.usefixtures("on_any_device")


@pytest.mark.part(36)
@pytest.mark.parametrize("seed", random_attention.NARROW)
def test_random_gradients(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_attention_gradients.check(seed, random_attention.plan_of(seed, monkeypatch.setitem), 2**20)


def test_queries_without_keys_and_what_is_not_finite() -> None:
    """A query that sees no key gives nothing to any gradient; what is not finite stays in its head."""

    class Gradients(nn.Module):
        def forward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor) -> list[Tensor]:
            return list(ATTENTION_BACKWARD(grad, q, k, v, out, mask, False, None, False))

    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(1, 3, 19, 16).half() for _ in range(4))
    mask = torch.ones(19, 19, dtype=torch.bool)
    mask[4] = False
    q[0, 1, 3, 2], v[0, 2, 5, 1] = float("nan"), float("inf")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * 0.25).masked_fill(~mask, -torch.inf)
    made = scores.softmax(-1).masked_fill(~mask, 0) @ leaves[2]
    wanted = torch.autograd.grad(made, leaves, grad.double())
    given = (grad, q, k, v, made.detach().half(), mask)
    with lapilli.compile(Gradients(), given, target="gpu-fp16-matrix", fallback="error") as program:
        found = program(*given)
    assert torch.equal(found[0][0, 0, 4], torch.zeros(16).half())
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[0, 0].double(), want[0, 0].nan_to_num(0), rtol=1e-2, atol=2e-3)
    assert not found[0][0, 1, 3].isfinite().any()
    assert found[0][0, 1, :3].isfinite().all()


def test_open_numbers_of_tokens_and_batches() -> None:
    class Gradients(nn.Module):
        def forward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
            return list(ATTENTION_BACKWARD(grad, q, k, v, out, None, True, None, False))

    def case(batch: int, tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Arguments, and the gradients in float64."""
        q, k, v, grad = (torch.randn(batch, 2, tokens, 16).half() for _ in range(4))
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        made = nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
        return (grad, q, k, v, made.detach().half()), torch.autograd.grad(made, leaves, grad.double())

    torch.manual_seed(2)
    sizes = {0: torch.export.Dim("batch", min=1, max=8), 2: torch.export.Dim("tokens", min=2, max=400)}
    shapes = (sizes,) * 5
    target = "gpu-fp16-matrix"
    with lapilli.compile(
        Gradients(), case(2, 33)[0], dynamic_shapes=shapes, target=target, fallback="error"
    ) as program:
        names = [d.kernel for d in program.description.methods[0].plans[0].run]
        assert names.count("attention_gradient") == 3
        for batch, tokens in ((1, 2), (3, 64), (1, 129)):
            given, wanted = case(batch, tokens)
            for got, want in zip(program(*given), wanted, strict=True):
                assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())


def test_half_precision_reads_inputs_in_float32() -> None:
    """What is given to the gradients is in float32; matrix units multiply halves, to which it is rounded."""

    class Gradients(nn.Module):
        def forward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
            turned = (x.transpose(1, 2) for x in (q, k))
            return list(ATTENTION_BACKWARD(grad, *turned, v, out, None, False, None, False))

    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(1, 2, 19, 16) for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    made = nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
    wanted = torch.autograd.grad(made, leaves, grad.double())
    given = (grad, *(x.transpose(1, 2).contiguous() for x in (q, k)), v, made.detach().float())
    with lapilli.compile(Gradients(), given, precision="fp16", target="gpu-fp16-matrix", fallback="error") as program:
        names = [d.kernel for d in program.description.methods[0].plans[0].run]
        found = program(*given)
    assert names.count("attention_gradient") == 3
    for got, want in zip(found, wanted, strict=True):
        assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())
