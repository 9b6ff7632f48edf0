"""Attention on the eager device: one call where no gradients are recorded, else what PyTorch makes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli import autoload

autoload.register()

Names = list[str]
WHOLE = "aten.scaled_dot_product_attention.default"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Names:
    """The operators that are called, as the list grows."""
    from lapilli.eager.dispatch import Operator

    names: Names = []
    call = Operator.__call__

    def noted(self: Operator, *args: Any, **kwargs: Any) -> Any:
        names.append(str(self.schema.op))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Operator, "__call__", noted)
    return names


def heads(*shape: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    *batch, queries, size = shape
    shapes = ((*batch, queries, size), *[(*batch, keys or queries, size)] * 2)
    q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    return q, k, v


def on_device(x: Any) -> Any:
    return x.vulkan() if isinstance(x, Tensor) else x


def exactly(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 10, 16), {}),
        ((2, 4, 10, 16), {"is_causal": True}),
        ((3, 17, 8), {"scale": 0.3}),
        ((9, 8), {"scale": 0.4}),
        ((2, 4, 7, 12), {"attn_mask": torch.arange(7)[:, None] >= torch.arange(7)[None] - 2}),
        ((2, 4, 7, 12), {"attn_mask": torch.linspace(-2, 2, 98).view(2, 1, 7, 7)}),
    ],
    ids=["plain", "causal", "scale", "two dimensions", "bool mask", "float mask"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_one_call(
    shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, called: Names
) -> None:
    q, k, v = (x.to(dtype) for x in heads(*shape))
    options = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in options.items()}
    got = F.scaled_dot_product_attention(*map(on_device, (q, k, v)), **{n: on_device(x) for n, x in options.items()})
    want = F.scaled_dot_product_attention(*map(exactly, (q, k, v)), **{n: exactly(x) for n, x in options.items()})
    assert called == [WHOLE] and got.is_vulkan and got.dtype == dtype
    # Sums of fp32; in half, the weights and the result are rounded once each (2^-11 relative).
    assert (got.cpu().double() - want).norm() <= (1e-6 if dtype is torch.float32 else 1e-3) * want.norm()


def test_other_sizes_use_the_same_program(called: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    from lapilli.eager.programs import Programs

    F.scaled_dot_product_attention(*map(on_device, heads(2, 3, 9, 20)))
    monkeypatch.setattr(Programs, "_compile", lambda *_: pytest.fail("a program was compiled"))
    for shape in ((5, 2, 11, 20), (4, 3, 6, 20), (3, 7, 40, 20)):
        q, k, v = heads(*shape)
        got = F.scaled_dot_product_attention(*map(on_device, (q, k, v)))
        torch.testing.assert_close(got.cpu(), F.scaled_dot_product_attention(q, k, v))
    assert called == [WHOLE] * 4


def test_grouped_heads_and_inference_mode(called: Names) -> None:
    q, k, v = heads(2, 4, 6, 8)
    with torch.inference_mode():
        got = F.scaled_dot_product_attention(q.vulkan(), k[:, :2].vulkan(), v[:, :2].vulkan(), enable_gqa=True)
    torch.testing.assert_close(got.cpu(), F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))
    assert called == [WHOLE]


def test_dropout_and_gradients(called: Names) -> None:
    host = [x.requires_grad_() for x in heads(2, 2, 5, 8)]
    there = [x.detach().vulkan().requires_grad_() for x in host]
    F.scaled_dot_product_attention(*there, is_causal=True).sin().sum().backward()
    F.scaled_dot_product_attention(*host, is_causal=True).sin().sum().backward()  # type: ignore[arg-type]
    for a, b in zip(there, host, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    assert called.count("lapilli.attention.default") == called.count("lapilli.attention_backward.default") == 1
    assert WHOLE not in called and "aten.bmm.default" not in called
    dropped = F.scaled_dot_product_attention(*(x.detach() for x in there), dropout_p=1.0)
    assert not dropped.cpu().any()
    called.clear()
    with torch.no_grad():
        F.scaled_dot_product_attention(*there)
    assert called == [WHOLE]


def test_multihead_attention_of_torch(called: Names) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        got = copy.deepcopy(layer).to("vulkan")(*[x.vulkan()] * 3, need_weights=False)[0]
        torch.testing.assert_close(got.cpu(), layer(x, x, x, need_weights=False)[0])
    assert WHOLE in called
