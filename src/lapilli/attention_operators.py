"""Attention in training: `lapilli::attention`, and its gradients as one operator, `lapilli::attention_backward`.

PyTorch composes attention that records gradients of ten operators, and keeps the weights of every layer until the backward pass:
a number for each pair of a query and a key. Here the forward pass keeps its operands and its result alone. The backward pass
computes the weights again, one layer at a time (as in Dao et al., FlashAttention, 2022, but by whole products).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lapilli.custom_operators import define

_WHOLE = torch.ops.aten.scaled_dot_product_attention.default


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    made: Tensor = _WHOLE.decompose(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    return made


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    grouped: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        made = _attention(leaves[0], leaves[1], leaves[2], mask, causal, scale, grouped)
    return torch.autograd.grad(made, leaves, grad)


define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool enable_gqa) -> Tensor",
    _attention, lambda q, k, v, *options: q.new_empty((*q.shape[:-1], v.shape[-1])),
)  # fmt: skip
define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor? mask, bool causal, float? scale, "
    "bool enable_gqa) -> (Tensor, Tensor, Tensor)",
    _attention_backward, lambda grad, q, k, v, *options: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)  # fmt: skip

ATTENTION: Any = torch.ops.lapilli.attention.default
ATTENTION_BACKWARD: Any = torch.ops.lapilli.attention_backward.default


def is_trained(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, grouped: bool
) -> bool:
    """Whether `attend` computes a call whose gradients are recorded. PyTorch's composition takes the others: gradients of a mask,
    dropout, keys that several batches share, torch.func and derivatives in forward mode.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v)):
        return False
    if dropout or (mask is not None and (mask.requires_grad or causal)) or not q.dtype.is_floating_point:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    batch, shared = q.shape[:-2], k.shape[:-2]
    if not (q.dtype is k.dtype is v.dtype) or q.dtype is torch.float64 or len(batch) < 1 or v.shape[:-2] != shared:
        return False
    fits = q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not fits or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if not grouped:
        return batch == shared
    return len(batch) > 1 and batch[:-1] == shared[:-1] and batch[-1] % shared[-1] == 0


def are_weights_small(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the weights take no more memory than the operands and the result. Without matrix units, to keep them is then faster
    than to compute them again.
    """
    (rows, size), (keys, columns) = q.shape[-2:], v.shape[-2:]
    known = all(type(n) is int for n in (rows, size, keys, columns))
    return q.dtype is torch.float32 and known and rows * keys <= (rows + keys) * (size + columns)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None,
    grouped: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale + mask) v with gradients, where `is_trained`.

    q: [*batch, L, E]. k: [*batch, S, E], v: [*batch, S, D]; with `grouped`, the last batch dimension divides that of q.
    mask: broadcasts to [*batch, L, S]; a bool mask, or numbers that are added. Returns [*batch, L, D].
    """
    made: Tensor = _Attention.apply(q, k, v, mask, causal, scale, grouped)  # type: ignore[no-untyped-call]
    return made


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
        out: Tensor = ATTENTION(q, k, v, mask, *options)
        ctx.save_for_backward(q, k, v, mask, out if _is_saved(q, k, v, mask) else None)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out = ctx.saved_tensors
        nothing = (None,) * (1 + len(ctx.options))
        if not torch.is_grad_enabled():
            if out is None:
                out = ATTENTION(q, k, v, mask, *ctx.options)
            return *_gradients(grad, q, k, v, out, mask, *ctx.options), *nothing
        # With gradients of their own, which are PyTorch's. Operands may be one tensor: of views each has its own gradient.
        q, k, v = own = [x.view_as(x) for x in (q, k, v)]
        wanted = [x for x in own if x.requires_grad]
        made = iter(torch.autograd.grad(_attention(q, k, v, mask, *ctx.options), wanted, grad, create_graph=True))
        return *(next(made) if x.requires_grad else None for x in own), *nothing


def _is_saved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the result is saved, so that nobody may change it in place. Programs do that where PyTorch's own kernels, which
    save it too, do not take the call.
    """
    return (
        q.dim() == 4
        and q.shape[-1] == v.shape[-1]
        and q.shape[1] == k.shape[1]
        and (mask is None or mask.dim() in (2, 4))
    )


_MOST_SCORES = 1 << 28
"""About so many scores are computed at once in the backward pass: a gigabyte in float32."""


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    grouped: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Those of q, k and v, a part of the batch at a time."""
    dim, count = _parts(q, k)
    if count == 1:
        whole: tuple[Tensor, ...] = ATTENTION_BACKWARD(grad, q, k, v, out, mask, causal, scale, grouped)
        return whole
    split = zip(*(_split(x, q.dim(), dim, count) for x in (grad, q, k, v, out, mask)), strict=True)
    made = [ATTENTION_BACKWARD(*given, causal, scale, grouped) for given in split]
    return tuple(torch.cat(part, dim) for part in zip(*made, strict=True))


def _parts(q: Tensor, k: Tensor) -> tuple[int, int]:
    """The batch dimension to split, and in how many parts. Queries that share keys stay together."""
    sizes: list[int] = [*q.shape[:-1], k.shape[-2]]
    if not all(type(n) is int for n in sizes):
        return 0, 1
    dim = max(range(k.dim() - 2), key=lambda d: k.shape[d])
    return dim, min(-(-math.prod(sizes) // _MOST_SCORES), k.shape[dim])


def _split(x: Tensor | None, rank: int, dim: int, count: int) -> Sequence[Tensor | None]:
    """Parts of a tensor; the whole of a mask that is the same for all parts."""
    at = dim - rank + (x.dim() if x is not None else 0)
    if x is None or at < 0 or x.shape[at] == 1:
        return (x,) * count
    return x.tensor_split(count, at)
