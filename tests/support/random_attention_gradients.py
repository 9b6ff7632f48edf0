"""Gradients of attention in 16 bits of random sizes, masks and layouts, by each tile that a kernel may take.

python tests/support/random_attention_gradients.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import random_cases
import torch
from random_attention import MOST, PLANS, Case, case, exact, heads_apart, inputs_of, weights_of
from torch import Tensor, nn

import lapilli
from lapilli.attention_operators import ATTENTION_BACKWARD
from lapilli.codegen import attention_gradient, attention_tiles


class Gradients(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given

    def forward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        c = self.given
        q, k, v = heads_apart(c, q, k, v)
        made: tuple[Tensor, ...] = ATTENTION_BACKWARD(grad, q, k, v, out, mask, c.causal, c.scale, c.share > 1)
        return made


def _bounds(
    c: Case, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Sequence[Tensor], eps: float
) -> list[Tensor]:
    """Of the three errors: the gradients of scores (or the weights), the result of attention, and the gradients are rounded to 16
    bits, and each term has one of these as a factor.
    """
    weights = weights_of(c, q, k, *mask)
    q, k, v = (x.double().abs() for x in heads_apart(c, q, k, v))
    k, v = (x.repeat_interleave(c.share, -3) for x in (k, v))
    grad, out = grad.double().abs(), out.double().abs()
    scale = abs(c.size**-0.5 if c.scale is None else c.scale)
    scores = weights * (grad @ v.mT + (grad * out).sum(-1, keepdim=True)) * scale
    return [3 * eps * x for x in (scores @ k, _added(scores.mT @ q, c.share), _added(weights.mT @ grad, c.share))]


def _added(x: Tensor, share: int) -> Tensor:
    """Of heads that share keys."""
    return x.unflatten(-3, (-1, share)).sum(-3)


def check(seed: int, plan: str, most: int = MOST) -> list[str]:
    """Compares the gradients of a case with those in float64; the names of the kernels. most: terms of a product. Raises
    AssertionError.
    """
    c = replace(case(seed, most), open=False)
    dtype = torch.bfloat16 if "bf16" in plan else torch.float16
    torch.manual_seed(seed)
    q, k, v, *mask = inputs_of(c, dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    made = exact(c, *leaves, *mask)
    grad, out = torch.randn(made.shape).to(dtype), made.detach().to(dtype)
    wanted = torch.autograd.grad(made, leaves, grad.double())
    given = (grad, q, k, v, out, *mask)
    possible = attention_tiles.gradient_tiles

    def chosen(*args: object) -> list[attention_tiles.AttentionTile]:
        found = possible(*args)  # type: ignore[arg-type]
        return [found[c.tile % len(found)]] if found else []

    with mock.patch.object(attention_gradient, "gradient_tiles", chosen):
        compiled = lapilli.compile(Gradients(c), given, target=plan, fallback="error")
    with compiled as program:
        got = [x.double() for x in program(*given)]
        names = [d.kernel for p in program.description.methods[0].plans for d in p.run]
    info = torch.finfo(dtype)
    bounds = _bounds(c, grad, q, k, v, out, mask, info.eps)
    for name, x, want, bound in zip("qkv", got, wanted, bounds, strict=True):
        (want,) = heads_apart(c, want)
        finite = want.isfinite()
        # What excludes a key is -inf of its score: 0 times what is not finite is NaN in one order of steps, and 0 in another.
        if c.strange is None:
            assert bool(x.isfinite().all()), f"{c}: the gradient of {name} is not finite"
            least = max(c.queries, c.keys) * info.smallest_normal * info.eps * 8
            worst = float(((x - want).abs() / (bound + least + 1e-4 * info.eps)).max())
            assert worst <= 1, f"{c}: the gradient of {name} has {worst:.2f} of the bound"
        elif not c.causal and c.mask is None:
            assert not bool((finite & ~x.isfinite()).any()), f"{c}: a number of the gradient of {name} is not finite"
    return [name for name in names if name.startswith("attention_gradient")][:1] or ["other kernels"]


if __name__ == "__main__":
    random_cases.main(__doc__, "calls", PLANS, check)
