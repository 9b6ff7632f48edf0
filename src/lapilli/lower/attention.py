"""Scaled dot-product attention, softmax(q k^T * scale + mask) v (Vaswani et al., Attention is all you need, 2017), as two
matrix products with a softmax between them.

The second product is annotated as attention, for which GPUs have a single kernel (kernels/gpu_attention.slang).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, binary, cast_to, const, index, load, unary, where
from lapilli.ir.integer import Int
from lapilli.ir.node import Attention, AttentionGradient, Map, Matmul, Node, Reduce
from lapilli.lower.matmul import product
from lapilli.lower.registry import Call, broadcast, lowering

aten = torch.ops.aten
_LOWEST = const(float("-inf"))


@lowering(aten.scaled_dot_product_attention.default)
def attention(
    call: Call, q: Node, k: Node, v: Node, mask: Node | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Node:  # fmt: skip
    """q [*batch, L, E], k [*batch, S, E], v [*batch, S, D] -> [*batch, L, D].

    The batch dimensions and the mask [*, L, S] broadcast. With enable_gqa, the last batch dimension of k and v divides that
    of q. Rows without any key are zero.
    """
    return _probabilities(call, q, k, v, mask, dropout, causal, scale, enable_gqa)[0]


@lowering(ATTENTION)
def trained_attention(
    call: Call, q: Node, k: Node, v: Node, mask: Node | None, causal: bool, scale: float | None, enable_gqa: bool
) -> Node:
    """As `attention`."""
    return _probabilities(call, q, k, v, mask, 0.0, causal, scale, enable_gqa)[0]


@lowering(ATTENTION_BACKWARD)
def attention_backward(
    call: Call, grad: Node, q: Node, k: Node, v: Node, out: Node, mask: Node | None, causal: bool, scale: float | None,
    enable_gqa: bool,
) -> list[Node]:  # fmt: skip
    """The gradients of q, k and v. grad, out: [*batch, L, D].

    Where P are the weights, the gradients of the scores are P * (grad v^T - the sum of grad * out over D). That is the sum of
    P * (grad v^T) over the keys, without another pass over the scores.
    """
    batch, count = q.shape[:-2], q.rank - 2
    inner = replace(call, dtypes=(DType.float32,), half=False)
    short = q.dtype if q.dtype.is_short_float else DType.float32
    keys, values = (_expanded(call, x, batch, enable_gqa) for x in (k, v))
    scores = _scores(inner, q, keys, batch, mask, causal, scale)
    weights = _weights(call, scores, short)[0]
    factor = _default_scale(q.shape[-1]) if scale is None else const(scale)
    delta = inner.reduce(
        "sum",
        lambda at, r: cast_to(load(grad, [*at, r[0]]), DType.float32) * cast_to(load(out, [*at, r[0]]), DType.float32),
        grad.shape[:-1],
        grad.shape[-1:],
        name="_delta",
    )
    raw = product(replace(inner, name=f"{call.name}_dp"), grad, values, transposed=True, batch=count)
    changes = replace(call, name=f"{call.name}_ds").map(
        lambda *at: cast_to(load(weights, at), DType.float32) * (load(raw, at) - load(delta, at[:-1])) * factor,
        shape=raw.shape,
        dtype=short,
    )

    def turned(x: Node) -> Node:
        kept = replace(call, name=f"{x.name}_turned")
        return kept.map(
            lambda *at: load(x, (*at[:-2], at[-1], at[-2])), shape=(*batch, x.shape[-1], x.shape[-2]), dtype=x.dtype
        )

    def gradient(of: Literal["q", "k", "v"], a: Node, b: Node, to: Node) -> Node:
        index = "qkv".index(of)
        of_one = replace(
            call,
            name=f"{call.name}_d{of}",
            shapes=call.shapes[index : index + 1],
            dtypes=call.dtypes[index : index + 1],
        )
        shared = to.shape[:-2] != tuple(batch)
        made = product(replace(inner, name=f"{of_one.name}_heads") if shared else of_one, a, b, batch=count)
        if isinstance(note := made.contraction, Matmul) and isinstance(factor, Const):
            made.contraction = AttentionGradient(
                **vars(note), of=of, scores=scores, weights=weights, q=q, k=k, v=v, grad=grad, delta=delta,
                scale=float(factor.value), causal=causal,
            )  # fmt: skip
        if not shared:
            return made
        heads = batch[-1] // to.shape[-3]  # that share these keys

        def head(at: Sequence[Int], r: Sequence[Int]) -> Expr:
            return load(made, [*at[:-3], at[-3] * heads + r[0], *at[-2:]])

        return of_one.reduce("sum", head, to.shape, [heads])

    return [
        gradient("q", changes, keys, q),
        gradient("k", turned(changes), q, k),
        gradient("v", turned(weights), grad, v),
    ]


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    call: Call, q: Node, k: Node, v: Node, dropout: float = 0.0, causal: bool = False, *, attn_mask: Node | None = None,
    scale: float | None = None,
) -> list[Node]:  # fmt: skip
    """The result of `attention`, and the logarithm of the softmax's denominator [*batch, L]."""
    out, top, total = _probabilities(call, q, k, v, attn_mask, dropout, causal, scale, False)
    second = replace(call, name=f"{call.name}_logsumexp", shapes=call.shapes[1:], dtypes=call.dtypes[1:])
    return [out, second.map(lambda *at: load(top, at) + unary("log", load(total, at)))]


def _probabilities(
    call: Call, q: Node, k: Node, v: Node, mask: Node | None, dropout: float, causal: bool, scale: float | None, grouped: bool,
) -> tuple[Node, Node, Node]:  # fmt: skip
    """The attention result, and the maximum and the sum of exponentials of every row of scores."""
    if dropout:
        raise TypeError(
            f"{call.op}: dropout_p is {dropout}; only 0 is supported: put the model into inference mode with eval()"
        )
    if not all(x.dtype.is_float for x in (q, k, v)):
        raise TypeError(f"{call.op}: queries, keys and values must be floating-point tensors")
    batch = call.shape[:-2]
    inner = replace(call, dtypes=(DType.float32,), half=False)  # scores and statistics are not rounded
    scores = _scores(inner, q, _expanded(call, k, batch, grouped), batch, mask, causal, scale)
    weights, top, total = _weights(call, scores, q.dtype if q.dtype.is_short_float else DType.float32)
    result = product(call, weights, _expanded(call, v, batch, grouped), batch=len(batch))
    note = result.contraction
    if isinstance(note, Matmul):
        result.contraction = Attention(**vars(note), scores=scores, weights=weights, q=q, k=k, v=v, causal=causal)
    return result, top, total


def _weights(call: Call, scores: Map, dtype: DType) -> tuple[Node, Node, Node]:
    """The softmax of scores [*batch, L, S], zero in rows without any key; the maximum and the sum of exponentials of every row."""
    inner = replace(call, dtypes=(DType.float32,), half=False)  # statistics are not rounded
    rows = scores.shape[:-1]
    top = inner.reduce("max", lambda at, r: load(scores, [*at, r[0]]), rows, scores.shape[-1:], name="_max")

    def shifted(at: Sequence[Int]) -> Expr:
        return unary("exp", load(scores, tuple(at)) - load(top, tuple(at[:-1])))

    total = inner.reduce("sum", lambda at, r: shifted([*at, r[0]]), rows, scores.shape[-1:], name="_sum")

    def weight(*at: Int) -> Expr:
        empty = binary("eq", load(top, at[:-1]), _LOWEST)
        return where(empty, const(0.0), shifted(at) / load(total, at[:-1]))

    named = replace(call, name=f"{call.name}_weights")
    weights = named.map(weight, shape=scores.shape, dtype=dtype)
    return weights, top, total


def _scores(
    call: Call, q: Node, k: Node, batch: Sequence[Int], mask: Node | None, causal: bool, scale: float | None
) -> Map:
    """q k^T * scale + mask: [*batch, L, S]. A bool mask adds -inf to the scores of keys that it excludes, as torch's does: NaN
    remains NaN. Keys that `causal` excludes have the score -inf.
    """
    named = replace(call, name=f"{call.name}_scores")
    raw: Reduce = product(named, _expanded(call, q, batch, False), k, transposed=True, batch=len(batch))
    factor = _default_scale(q.shape[-1]) if scale is None else const(scale)

    def body(*at: Int) -> Expr:
        e = load(raw, at) * factor
        if mask is not None:
            given = load(mask, broadcast(mask, at))
            e = e + (where(given, const(0.0), _LOWEST) if given.dtype is DType.bool else cast_to(given, DType.float32))
        return where(binary("le", index(at[-1]), index(at[-2])), e, _LOWEST) if causal else e

    return named.map(body, shape=raw.shape)


def _default_scale(head: Int) -> Expr:
    """1 / sqrt(E); 1 for a head of size 0, whose scores are 0 anyway."""
    if head.value is not None:
        return const(1 / math.sqrt(head.value or 1))
    return unary("rsqrt", binary("max", cast_to(index(head), DType.float32), const(1.0)))


def _expanded(call: Call, x: Node, batch: Sequence[Int], grouped: bool) -> Node:
    """x [*, rows, columns] expanded to all batch dimensions; grouped: heads of q that share keys read the same ones."""
    if x.shape[:-2] == tuple(batch):
        return x
    shape = (*batch, *x.shape[-2:])

    def at_head(at: Sequence[Int]) -> list[Int]:
        place = list(at)
        if grouped:
            head = len(batch) - 1
            place[head] = place[head] // (batch[head] // x.shape[-3])
        return broadcast(x, place)

    kept = replace(call, name=f"{x.name}_expanded")
    return kept.map(lambda *at: load(x, at_head(at)), shape=shape, dtype=x.dtype)
