"""Operators of traces and of torch's inference fast paths, in terms of the operators that models call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from lapilli import formulas


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *flags: bool,
) -> Tensor:  # fmt: skip
    """`aten::_convolution`, which occurs in traces. flags: cuDNN's."""
    dims = weight.dim() - 2
    if transposed:
        transpose: Callable[..., Tensor] = getattr(functional, f"conv_transpose{dims}d")
        return transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    convolve: Callable[..., Tensor] = getattr(functional, f"conv{dims}d")
    return convolve(x, weight, bias, stride, padding, dilation, groups)


COMPOSED: dict[str, Callable[..., Any]] = {
    "aten::_convolution": _convolution,
    "aten::_native_multi_head_attention": formulas.multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": formulas.transformer_encoder_layer,
}
