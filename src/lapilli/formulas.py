"""Operators of PyTorch in terms of others, for capture, lowering and the eager device."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`aten._native_multi_head_attention`, which torch.nn.MultiheadAttention calls at inference.

    query [N, L, E]; key and value [N, S, E]. mask: of type 0 [L, S], 1 [N, S] or 2 [N, heads, L, S]. Elements that are true, or
    a number other than 0, are masked out, as in PyTorch's kernel. Results: [N, L, E], NaN in rows that are masked out entirely,
    and the weights if needed: [N, L, S], or [N, heads, L, S] if they are not averaged.
    """
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        functional.linear(x, w, b).reshape(*x.shape[:2], num_head, embed_dim // num_head).transpose(1, 2)
        for x, w, b in parts
    )
    left_out = None if mask is None else mask.bool()
    if left_out is not None and mask_type == 1:
        left_out = left_out[:, None, None, :]
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(embed_dim // num_head)
        if left_out is not None:
            scores = scores.masked_fill(left_out, -math.inf)
        weights = scores.softmax(-1)
        result = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    elif left_out is None:
        result = functional.scaled_dot_product_attention(q, k, v)
    else:  # also one kernel; it returns zeros for rows that are masked out entirely
        result = functional.scaled_dot_product_attention(q, k, v, left_out.logical_not())
        result = result.masked_fill(left_out.all(-1, keepdim=True), math.nan)
    return functional.linear(result.transpose(1, 2).flatten(-2), proj_weight, proj_bias), weights


def transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`aten._transformer_encoder_layer_fwd`, which torch.nn.TransformerEncoderLayer calls at inference. src and result: [N, L,
    E]; masks as in `multi_head_attention`."""

    def first(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attended(x: Tensor) -> Tensor:
        return multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )[0]  # fmt: skip

    def forward(x: Tensor) -> Tensor:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(
            functional.gelu(inner) if use_gelu else functional.relu(inner), ffn_weight_2, ffn_bias_2
        )

    if norm_first:
        src = src + attended(first(src))
        return src + forward(second(src))
    src = first(src + attended(src))
    return second(src + forward(src))
