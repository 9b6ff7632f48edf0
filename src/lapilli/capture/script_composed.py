"""Operators of traces and of torch's fast paths for inference, as the operators that models call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Optional = Tensor | None


def _convolution(
    x: Tensor, weight: Tensor, bias: Optional, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *flags: bool,
) -> Tensor:  # fmt: skip
    """`aten::_convolution`, which traces have; flags: of cuDNN."""
    dims = weight.dim() - 2
    if transposed:
        transpose: Callable[..., Tensor] = getattr(functional, f"conv_transpose{dims}d")
        return transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    convolve: Callable[..., Tensor] = getattr(functional, f"conv{dims}d")
    return convolve(x, weight, bias, stride, padding, dilation, groups)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    weight: Tensor, bias: Tensor, mask: Optional = None, need_weights: bool = True, average: bool = True,
    mask_kind: int | None = None,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """`aten::_native_multi_head_attention`, batch first. mask: True where nothing is attended to; mask_kind 0: [length, length],
    1: [batch, length] of keys, 2: [batch, heads, length, length]."""
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        functional.linear(x, w, b).reshape(*x.shape[:2], heads, embed_dim // heads).transpose(1, 2) for x, w, b in parts
    )
    if mask is not None and mask_kind == 1:
        mask = mask[:, None, None, :]
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.logical_not()
    if not need_weights:
        y = functional.scaled_dot_product_attention(q, k, v, mask)
        return functional.linear(y.transpose(1, 2).flatten(2), weight, bias), None
    scores = q @ k.transpose(-1, -2) / math.sqrt(embed_dim // heads)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1)
    y = functional.linear((weights @ v).transpose(1, 2).flatten(2), weight, bias)
    return y, weights.mean(1) if average else weights


def _encoder_layer(
    x: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, weight: Tensor, bias: Tensor,
    gelu: bool, norm_first: bool, eps: float, norm1: Tensor, norm1_bias: Tensor, norm2: Tensor, norm2_bias: Tensor,
    weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, mask: Optional = None, mask_kind: int | None = None,
) -> Tensor:  # fmt: skip
    """`aten::_transformer_encoder_layer_fwd`."""
    activation = functional.gelu if gelu else functional.relu

    def attend(x: Tensor) -> Tensor:
        given = (x, x, x, embed_dim, heads, qkv_weight, qkv_bias, weight, bias, mask, False, True, mask_kind)
        return _attention(*given)[0]

    def feed(x: Tensor) -> Tensor:
        return functional.linear(activation(functional.linear(x, weight1, bias1)), weight2, bias2)

    def first(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm1, norm1_bias, eps)

    def second(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm2, norm2_bias, eps)

    if norm_first:
        x = x + attend(first(x))
        return x + feed(second(x))
    x = first(x + attend(x))
    return second(x + feed(x))


COMPOSED: dict[str, Callable[..., Any]] = {
    "aten::_convolution": _convolution,
    "aten::_native_multi_head_attention": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
}
