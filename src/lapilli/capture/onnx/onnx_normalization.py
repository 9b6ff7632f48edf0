"""Normalization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, axis_of, operator

Tensor = torch.Tensor


def _across(x: Tensor, channel: Tensor) -> Tensor:
    """A value of each channel, for a tensor whose second axis they are."""
    return channel.reshape([1, -1] + [1] * (x.ndim - 2))


@operator("BatchNormalization")
def batch_normalization(call: OnnxCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    epsilon, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    if not call.get("training_mode", 0):
        if x.ndim > 1 and x.dtype == scale.dtype == mean.dtype:
            return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        return (x - _across(x, mean)) * _across(x, scale / torch.sqrt(variance + epsilon)) + _across(x, bias)
    axes = [0, *range(2, x.ndim)]
    now, spread = x.mean(axes), x.var(axes, correction=0)
    result = (x - _across(x, now)) * _across(x, scale / torch.sqrt(spread + epsilon)) + _across(x, bias)
    return result, mean * momentum + now * (1 - momentum), variance * momentum + spread * (1 - momentum)


@operator("InstanceNormalization")
def instance_normalization(call: OnnxCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_normalization(call: OnnxCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups, epsilon = call.get("num_groups"), call.get("epsilon", 1e-5)
    if call.version < 21:  # a scale of each group
        each = x.shape[1] // groups
        scale = scale.reshape(-1, 1).expand(groups, each).reshape(-1)
        bias = bias.reshape(-1, 1).expand(groups, each).reshape(-1)
    return F.group_norm(x, groups, scale, bias, epsilon)


@operator("GroupNorm", domain=MICROSOFT)
def contrib_group_norm(call: OnnxCall, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    if call.get("channels_last", 1):
        x = x.movedim(-1, 1)
    result = F.group_norm(x.float(), call.get("groups"), gamma.float(), beta.float(), call.get("epsilon", 1e-5)).to(
        x.dtype
    )
    result = F.silu(result) if call.get("activation", 0) else result
    return result.movedim(1, -1) if call.get("channels_last", 1) else result


@operator("LayerNormalization")
def layer_normalization(call: OnnxCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis = axis_of(call.get("axis", -1), x.ndim)
    epsilon = call.get("epsilon", 1e-5)
    inner = list(x.shape[axis:])
    plain = list(scale.shape) == inner and (bias is None or list(bias.shape) == inner) and x.dtype == scale.dtype
    if plain and not call.wants(1) and not call.wants(2):
        return F.layer_norm(x, inner, scale, bias, epsilon)
    axes = list(range(axis, x.ndim))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt(((wide - mean) ** 2).mean(axes, keepdim=True) + epsilon)
    result = ((wide - mean) * inverse).to(x.dtype) * scale
    return result if bias is None else result + bias, mean, inverse


@operator("RMSNormalization")
def rms_normalization(call: OnnxCall, x: Tensor, scale: Tensor) -> Tensor:
    return _rms(call, x, scale)[0]


def _rms(call: OnnxCall, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The normalized tensor, and what it was multiplied by."""
    axes = list(range(axis_of(call.get("axis", -1), x.ndim), x.ndim))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = torch.rsqrt((wide * wide).mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    return (wide * inverse).to(x.dtype) * scale, inverse


@operator("SimplifiedLayerNormalization")
def simplified_layer_normalization(call: OnnxCall, x: Tensor, scale: Tensor) -> Any:
    """Of onnxruntime, which writes it into the default domain."""
    return _rms(call, x, scale)


@operator("SimplifiedLayerNormalization", domain=MICROSOFT)
def contrib_simplified_layer_normalization(call: OnnxCall, x: Tensor, scale: Tensor) -> Any:
    return _rms(call, x, scale)


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    call: OnnxCall, x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    return F.layer_norm(total, [total.shape[-1]], gamma, beta, call.get("epsilon", 1e-12)), None, None, total


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    call: OnnxCall, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    wide = total.float()
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + call.get("epsilon", 1e-12))
    return (wide * inverse).to(x.dtype) * gamma, None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    call: OnnxCall, ids: Tensor, segments: Tensor | None, words: Tensor, places: Tensor, kinds: Tensor | None,
    gamma: Tensor, beta: Tensor, mask: Tensor | None = None, positions: Tensor | None = None,
) -> Any:  # fmt: skip
    where = torch.arange(ids.shape[1]).unsqueeze(0) if positions is None else positions
    total = F.embedding(ids, words) + F.embedding(where, places)
    if segments is not None and kinds is not None:
        total = total + F.embedding(segments, kinds)
    lengths = torch.zeros_like(ids[:, 0]) if mask is None else mask.sum(1).to(torch.int32)
    return F.layer_norm(total, [total.shape[-1]], gamma, beta, call.get("epsilon", 1e-12)), lengths, total


@operator("LRN")
def lrn(call: OnnxCall, x: Tensor) -> Tensor:
    size, alpha, beta, k = call.get("size"), call.get("alpha", 1e-4), call.get("beta", 0.75), call.get("bias", 1.0)
    squares = (x * x).unsqueeze(1)
    before = (size - 1) // 2
    pads = [0, 0] * (x.ndim - 2) + [before, size - 1 - before]
    around = F.pad(squares, pads)
    total: Any = 0
    for offset in range(size):
        total = total + around.narrow(2, offset, x.shape[1])
    return x / (k + alpha / size * total.squeeze(1)) ** beta


@operator("MeanVarianceNormalization")
def mean_variance_normalization(call: OnnxCall, x: Tensor) -> Tensor:
    axes = call.get("axes") or [0, 2, 3]
    mean = x.mean(axes, keepdim=True)
    return (x - mean) / (torch.sqrt(((x - mean) ** 2).mean(axes, keepdim=True)) + 1e-9)


@operator("LpNormalization")
def lp_normalization(call: OnnxCall, x: Tensor) -> Tensor:
    axis, p = call.get("axis", -1), call.get("p", 2)
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else torch.sqrt((x * x).sum(axis, keepdim=True))
    return torch.where(norm == 0, 0, x / norm)
