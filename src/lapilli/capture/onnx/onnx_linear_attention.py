"""Attention whose state does not grow, and the convolution that comes with it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_attention import heads_of, merged
from lapilli.capture.onnx.onnx_registry import OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor


@operator("LinearAttention")
def linear_attention(
    call: OnnxCall, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> Any:  # fmt: skip
    """A state of keys times values, which decays and takes in one token after the other."""
    heads, groups, steps = call.get("q_num_heads"), call.get("kv_num_heads"), q.shape[1]
    if not isinstance(steps, int):
        raise CompileError("it is unrolled, which needs a number of tokens that is known; fix that size")
    kept = q.dtype if state is None else state.dtype
    qs, ks, vs = heads_of(q, heads).float(), heads_of(k, groups).float(), heads_of(v, groups).float()
    size = qs.shape[3]
    now = qs.new_zeros([q.shape[0], groups, size, vs.shape[3]]) if state is None else state.float()
    fades = None if decay is None else torch.exp(heads_of(decay, groups).float())
    shares = None if beta is None else beta.transpose(1, 2).unsqueeze(3).float()
    scale = call.get("scale", 0.0) or 1 / math.sqrt(size)
    outputs = []
    for t in range(steps):
        if fades is not None:
            now = now * fades[:, :, t].unsqueeze(3)
        key, value = ks[:, :, t].unsqueeze(3), vs[:, :, t].unsqueeze(2)
        if shares is not None:
            value = shares[:, :, t].unsqueeze(3) * (value - (now * key).sum(2, keepdim=True))
        now = now + key * value
        read = now.repeat_interleave(heads // groups, 1) if heads != groups else now
        outputs.append(torch.matmul(qs[:, :, t].unsqueeze(2), read) * scale)
    return merged(torch.cat(outputs, 2)).to(q.dtype), now.to(kept)


@operator("CausalConvWithState")
def causal_conv_with_state(
    call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None
) -> Any:
    before = weight.shape[2] - 1
    whole = F.pad(x, [before, 0]) if state is None else torch.cat([state, x], 2)
    result = F.conv1d(whole, weight, bias, groups=x.shape[1])
    if call.get("activation", "none") in ("silu", "swish"):
        result = F.silu(result)
    return result, whole.narrow(2, whole.shape[2] - before, before)
