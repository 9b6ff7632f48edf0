"""Attention: a call of its own where no gradients are recorded, and the operators that torch.nn takes for attention and for
encoder layers at inference, in terms of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapilli.eager.call import composite, run

aten = torch.ops.aten

_WHOLE = aten.scaled_dot_product_attention.default


def register(library: Any) -> None:
    """PyTorch would make it of ten other operators, whose gradients it knows."""
    name = "scaled_dot_product_attention"
    library.impl(name, _scaled_dot_product_attention, "PrivateUse1")
    library.impl(name, _differentiable_attention, "AutogradPrivateUse1")
    library.impl("_nested_tensor_from_mask_left_aligned", _is_left_aligned, "PrivateUse1")


def _is_left_aligned(x: Tensor, mask: Tensor) -> bool:
    """Whether nn.TransformerEncoder is to make a nested tensor of rows that are padded at their ends. The device has none: the
    layers get the mask instead."""
    return False


def _scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    kernel = run(_WHOLE) if dropout == 0 else _WHOLE.decompose
    made: Tensor = kernel(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
    return made


def _differentiable_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *options: Any, **named: Any
) -> Tensor:  # fmt: skip
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask)):
        made: Tensor = _WHOLE.decompose(q, k, v, mask, *options, **named)
        return made
    with torch._C._AutoDispatchBelowAutograd():
        return functional.scaled_dot_product_attention(q, k, v, mask, *options, **named)


SOURCE, PADDING = 0, 1
"""Kinds of masks: [L, L] over queries and keys, [N, L] over keys; others broadcast to [N, heads, L, L]."""


@composite(aten._native_multi_head_attention.default)
def attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    weight: Tensor, bias: Tensor, mask: Tensor | None = None, need_weights: bool = True, average: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`aten._native_multi_head_attention`: query, key, value [N, L, E]; masks are true where nothing is to be attended.

    Results: [N, L, E], and the weights [N, L, L] (or one for every head) where they are needed."""

    def split(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.linear(x, w, b).reshape(*x.shape[:2], heads, embed_dim // heads).transpose(1, 2)

    q, k, v = map(split, (query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
    if mask is None and not need_weights:
        heads_out = functional.scaled_dot_product_attention(q, k, v)
        return functional.linear(heads_out.transpose(1, 2).flatten(-2), weight, bias), None
    scores = (q * (embed_dim // heads) ** -0.5) @ k.transpose(-2, -1)
    if mask is not None:
        wide = mask[:, None, None, :] if mask_type == PADDING else mask
        scores = scores.masked_fill(wide.bool(), float("-inf"))
    weights = scores.softmax(-1)
    made = functional.linear((weights @ v).transpose(1, 2).flatten(-2), weight, bias)
    return made, (weights.mean(1) if average else weights) if need_weights else None


@composite(aten._transformer_encoder_layer_fwd.default)
def encoder_layer(
    x: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, weight: Tensor, bias: Tensor, use_gelu: bool,
    norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`aten._transformer_encoder_layer_fwd`: x [N, L, E]."""

    def first(y: Tensor) -> Tensor:
        return functional.layer_norm(y, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(y: Tensor) -> Tensor:
        return functional.layer_norm(y, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attended(y: Tensor) -> Tensor:
        options: Any = (mask, False, True, mask_type)
        return attention(y, y, y, embed_dim, heads, qkv_weight, qkv_bias, weight, bias, *options)[0]

    def forward(y: Tensor) -> Tensor:
        inner = functional.linear(y, weight_1, bias_1)
        return functional.linear(functional.gelu(inner) if use_gelu else functional.relu(inner), weight_2, bias_2)

    if norm_first:
        x = x + attended(first(x))
        return x + forward(second(x))
    x = first(x + attended(x))
    return second(x + forward(x))
