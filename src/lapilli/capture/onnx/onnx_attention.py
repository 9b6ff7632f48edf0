"""Attention and rotary positions, of the standard and of onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_indexing import padded
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor


def heads_of(x: Tensor, count: int) -> Tensor:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    return x.reshape(x.shape[0], x.shape[1], count, x.shape[2] // count).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each head several times, one after the other."""
    if times == 1:
        return x
    n, h, t, d = x.shape
    return x.unsqueeze(2).expand(n, h, times, t, d).reshape(n, h * times, t, d)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added: booleans say what is read."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, -math.inf).to(dtype)


def _without_masked_rows(weights: Tensor, scores: Tensor) -> Tensor:
    """Softmax's result, zero for rows that read nothing."""
    return torch.where(scores.amax(-1, keepdim=True) == -math.inf, 0, weights)


@operator("Attention")
def attention(
    call: OnnxCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_k: Tensor | None = None,
    past_v: Tensor | None = None, lengths: Tensor | None = None,
) -> Any:  # fmt: skip
    flat = q.ndim == 3
    if flat:
        q, k, v = (
            heads_of(q, call.get("q_num_heads")),
            heads_of(k, call.get("kv_num_heads")),
            heads_of(v, call.get("kv_num_heads")),
        )
    before: Any = 0 if past_k is None else past_k.shape[2]
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    present = (k, v)
    times = q.shape[1] // k.shape[1]
    k, v = _repeated(k, times), _repeated(v, times)
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None and isinstance(mask.shape[-1], int) and isinstance(keys, int) and mask.shape[-1] < keys:
        missing = keys - mask.shape[-1]
        mask = padded(mask, {mask.ndim - 1: (0, missing)}, value=False if mask.dtype == torch.bool else -math.inf)
    allowed = _allowed(call, queries, keys, before, lengths)
    scale = call.get("scale") or 1 / math.sqrt(q.shape[3])
    cap, mode = call.get("softcap", 0.0), call.get("qk_matmul_output_mode", 0)
    plain = not cap and not call.wants(3) and q.dtype == torch.float32 and lengths is None and mask is None
    if plain and (allowed is None or not before) and (queries == keys or allowed is None):
        causal = allowed is not None and not _windows(call)
        out = F.scaled_dot_product_attention(q, k, v, None if causal else allowed, 0.0, causal, scale=scale)
        return merged(out) if flat else out, *present
    bias = _bias(mask, q.dtype)
    if allowed is not None:
        causal_bias = torch.where(allowed, 0.0, -math.inf).to(q.dtype)
        bias = causal_bias if bias is None else bias + causal_bias
    # Half of the scale for each side, as in the standard's definition.
    half = torch.tensor(math.sqrt(scale), dtype=q.dtype) if q.dtype != torch.float32 else math.sqrt(scale)
    product = torch.matmul(q * half, (k * half).transpose(2, 3))
    capped = torch.tanh(product / cap) * cap if cap else product
    scores = capped if bias is None else capped + bias
    precision = call.get("softmax_precision")
    wide = scores if precision is None else scores.to(call.dtype(precision))
    weights = _without_masked_rows(torch.softmax(wide, -1), wide).to(q.dtype)
    out = torch.matmul(weights, v)
    return merged(out) if flat else out, *present, (product, capped, scores, weights)[mode]


def _windows(call: OnnxCall) -> bool:
    return bool(call.get("left_window_size", -1) >= 0 or call.get("right_window_size", -1) >= 0)


def _allowed(call: OnnxCall, queries: Any, keys: Any, before: Any, lengths: Tensor | None) -> Tensor | None:
    """Which keys a query may read, of causal attention, windows and lengths; None: all."""
    rows, columns = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    offset: Any = before if lengths is None else lengths.reshape(-1, 1, 1, 1) - queries
    distance = rows + offset - columns
    allowed: Tensor | None = None
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    tests = []
    if call.get("is_causal", 0):
        tests.append(distance >= 0)
    if left >= 0:
        tests.append(distance <= left)
    if right >= 0:
        tests.append(-distance <= right)
    if lengths is not None:
        tests.append(columns < lengths.reshape(-1, 1, 1, 1))
    for test in tests:
        allowed = test if allowed is None else allowed & test
    return allowed


# -- rotary positions


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of elements of the last axis turned; the rest of the axis as it is. cos, sin: [..., half of what is turned]."""
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : size // 2], turned[..., size // 2 :]
    first, second = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        made = torch.stack([first, second], -1).reshape(turned.shape)
    else:
        made = torch.cat([first, second], -1)
    return made if rest.shape[-1] == 0 else torch.cat([made, rest], -1)


@operator("RotaryEmbedding")
def rotary_embedding(call: OnnxCall, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None = None) -> Tensor:
    flat = x.ndim == 3
    tokens = x.reshape(x.shape[0], x.shape[1], call.get("num_heads"), -1) if flat else x.transpose(1, 2)
    half = (call.get("rotary_embedding_dim", 0) or tokens.shape[3]) // 2
    if places is not None:
        cos, sin = F.embedding(places, cos), F.embedding(places, sin)
    cos, sin = cos[..., :half].unsqueeze(2), sin[..., :half].unsqueeze(2)
    result = _rotated(tokens, cos, sin, bool(call.get("interleaved", 0)))
    return result.reshape(x.shape) if flat else result.transpose(1, 2)


@operator("RotaryEmbedding", domain=MICROSOFT)
def contrib_rotary_embedding(call: OnnxCall, x: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions are [1] (of the first token) or [batch, tokens]."""
    half = cos.shape[1]
    if x.ndim == 3:
        heads = call.get("num_heads", 0)
        size = (call.get("rotary_embedding_dim", 0) and x.shape[2] // heads) or 2 * half
        tokens = x.reshape(x.shape[0], x.shape[1], x.shape[2] // size, size)
    else:
        tokens = x.transpose(1, 2)
    at = places if places.ndim == 2 else places.reshape(1, 1) + torch.arange(tokens.shape[1])
    c, s = F.embedding(at, cos).unsqueeze(2), F.embedding(at, sin).unsqueeze(2)
    result = _rotated(tokens, c, s, bool(call.get("interleaved", 0)))
    return result.reshape(x.shape) if x.ndim == 3 else result.transpose(1, 2)


# -- of onnxruntime


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    if cap:
        scores = torch.tanh(torch.matmul(q * scale, k.transpose(2, 3)) / cap) * cap
        return torch.matmul(torch.softmax(scores if bias is None else scores + bias, -1), v)
    return F.scaled_dot_product_attention(q, k, v, bias, 0.0, False, scale=scale)


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    call: OnnxCall, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, attention_bias: Tensor | None = None, past_k: Tensor | None = None,
    past_v: Tensor | None = None, *rest: Any,
) -> Any:  # fmt: skip
    heads = call.get("num_heads")
    if any(x is not None for x in rest):
        raise CompileError(
            "a cache that is written in place is not supported; export the model with past and present values"
        )
    if q.ndim == 5 or k is None or (k.ndim == 5 and v is None):
        raise CompileError("packed queries, keys and values are not supported; separate ones are")
    if bias is not None:
        width = q.shape[2]
        q, k = q + bias[:width], k + bias[width : 2 * width] if k.ndim == 3 else k
        v = v + bias[2 * width :] if v is not None and v.ndim == 3 else v
    assert v is not None
    qs = heads_of(q, heads)
    ks = heads_of(k, heads) if k.ndim == 3 else k
    vs = heads_of(v, heads) if v.ndim == 3 else v
    before: Any = 0
    if past_k is not None and past_v is not None:
        before = past_k.shape[2]
        ks, vs = torch.cat([past_k, ks], 2), torch.cat([past_v, vs], 2)
    added = attention_bias
    if key_mask is not None:
        added = _plus(added, _key_bias(call, key_mask, qs.shape[0], ks.shape[2], qs.dtype))
    if call.get("unidirectional", 0):
        reads = torch.arange(qs.shape[2]).unsqueeze(1) + before >= torch.arange(ks.shape[2])
        added = _plus(added, torch.where(reads, 0.0, -math.inf).to(qs.dtype))
    scale = call.get("scale") or 1 / math.sqrt(qs.shape[3])
    return merged(_attended(qs, ks, vs, added, scale)), ks, vs


def _plus(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _key_bias(call: OnnxCall, mask: Tensor, batch: Any, keys: Any, dtype: torch.dtype) -> Tensor:
    """What a mask of keys adds: [batch] are lengths, [batch, keys] and [batch, queries, keys] say what is read."""
    if mask.ndim == 1:
        reads = torch.arange(keys) < mask.reshape(-1, 1)
        reads = reads.reshape(batch, 1, 1, keys)
    elif mask.ndim == 2:
        reads = (mask != 0).unsqueeze(1).unsqueeze(1)
    else:
        reads = (mask != 0).unsqueeze(1)
    return torch.where(reads, 0.0, call.get("mask_filter_value", -10000.0)).to(dtype)


@operator("Attention", domain=MICROSOFT)
def contrib_attention(
    call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, past: Tensor | None = None,
    attention_bias: Tensor | None = None, *rest: Any,
) -> Any:  # fmt: skip
    if any(r is not None for r in rest):
        raise CompileError(
            "a cache that is written in place is not supported; export the model with past and present values"
        )
    heads, widths = call.get("num_heads"), call.get("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    made = torch.matmul(x, weight)
    made = made if bias is None else made + bias
    q, k, v = (heads_of(part, heads) for part in torch.split(made, widths, 2))
    before: Any = 0
    if past is not None:
        before = past.shape[3]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    added = attention_bias
    if mask is not None:
        added = _plus(added, _key_bias(call, mask, q.shape[0], k.shape[2], q.dtype))
    if call.get("unidirectional", 0):
        reads = torch.arange(q.shape[2]).unsqueeze(1) + before >= torch.arange(k.shape[2])
        added = _plus(added, torch.where(reads, 0.0, -math.inf).to(q.dtype))
    out = _attended(q, k, v, added, call.get("scale") or 1 / math.sqrt(q.shape[3]))
    return merged(out), torch.stack([k, v]) if call.wants(1) else None


@operator("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    call: OnnxCall, q: Tensor, k: Tensor | None, v: Tensor | None, past_k: Tensor | None, past_v: Tensor | None, last: Tensor,
    total: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, places: Tensor | None = None,
    attention_bias: Tensor | None = None, *rest: Any,
) -> Any:  # fmt: skip
    """last: the place of the last token of each sequence, [batch]; total: the tokens with the past, one number. The present is the
    past with the new tokens after it, so sequences of one batch are of one length."""
    if any(r is not None for r in rest):
        raise CompileError("sinks and quantized caches of GroupQueryAttention are not supported")
    heads, groups = call.get("num_heads"), call.get("kv_num_heads")
    if k is None or v is None:
        size = q.shape[2] // (heads + 2 * groups)
        q, k, v = torch.split(q, [heads * size, groups * size, groups * size], 2)
    qs, ks, vs = heads_of(q, heads), heads_of(k, groups), heads_of(v, groups)
    before: Any = 0 if past_k is None else past_k.shape[2]
    tokens = qs.shape[2]
    if call.get("do_rotary", 0):
        assert cos is not None and sin is not None
        at = torch.arange(tokens).unsqueeze(0) + before if places is None else places
        c, s = F.embedding(at, cos).unsqueeze(1), F.embedding(at, sin).unsqueeze(1)
        turned = bool(call.get("rotary_interleaved", 0))
        qs, ks = _rotated(qs, c, s, turned), _rotated(ks, c, s, turned)
    if past_k is not None and past_v is not None:
        ks, vs = torch.cat([past_k, ks], 2), torch.cat([past_v, vs], 2)
    present = (ks, vs)
    ks, vs = _repeated(ks, heads // groups), _repeated(vs, heads // groups)
    rows, columns = torch.arange(tokens).unsqueeze(1) + before, torch.arange(ks.shape[2])
    reads = rows >= columns
    window = call.get("local_window_size", -1)
    if window > 0:
        reads = reads & (rows - columns < window)
    # Tokens after the last of a sequence are padding.
    valid = reads & (columns <= last.reshape(-1, 1, 1, 1))
    bias = torch.where(valid, 0.0, -math.inf).to(qs.dtype)
    bias = bias if attention_bias is None else bias + attention_bias
    scale = call.get("scale") or 1 / math.sqrt(qs.shape[3])
    out = _attended(qs, ks, vs, bias, scale, call.get("softcap", 0.0))
    return merged(out), *present
