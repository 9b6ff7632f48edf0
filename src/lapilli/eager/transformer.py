"""Attention: a single operator if no gradients are recorded; and the operators that torch.nn uses for attention and encoder
layers at inference, as compositions of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapilli import formulas
from lapilli.attention_operators import attend, is_trained
from lapilli.eager.dispatch import composite, run

aten = torch.ops.aten

_WHOLE = aten.scaled_dot_product_attention.default


def register(library: Any) -> None:
    """Registers attention; PyTorch would compose it of ten other operators."""
    name = "scaled_dot_product_attention"
    library.impl(name, _scaled_dot_product_attention, "PrivateUse1")
    library.impl(name, _differentiable_attention, "AutogradPrivateUse1")
    library.impl("_nested_tensor_from_mask_left_aligned", _is_left_aligned, "PrivateUse1")


def _is_left_aligned(x: Tensor, mask: Tensor) -> bool:
    """Whether nn.TransformerEncoder should make a nested tensor of rows that are padded at their ends. The device does not
    support these: the layers get the mask instead.
    """
    return False


def _scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    kernel = run(_WHOLE) if dropout == 0 else _WHOLE.decompose
    made: Tensor = kernel(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
    return made


def _differentiable_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if is_trained(q, k, v, mask, dropout, causal, enable_gqa):
        return attend(q, k, v, mask, causal, scale, enable_gqa)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask)):
        made: Tensor = _WHOLE.decompose(q, k, v, mask, dropout, causal, **options)
        return made
    with torch._C._AutoDispatchBelowAutograd():
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **options)


composite(aten._native_multi_head_attention.default)(formulas.multi_head_attention)
composite(aten._transformer_encoder_layer_fwd.default)(formulas.transformer_encoder_layer)
