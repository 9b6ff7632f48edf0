"""The next token of a language model, chosen where its logits are.

    class Step(torch.nn.Module):
        def forward(self, token, position, temperature, top_k, top_p):
            logits = self.model(token, position)  # [batch, 1, vocabulary]
            return lapilli.sampling.next_token(logits[:, -1], temperature, top_k, top_p)

`next_token` is a function of torch tensors: eager PyTorch runs it on the CPU, and in a compiled program it is a few kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapilli.errors import InvalidInputError

_library: Any = torch.library.Library("lapilli", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "next_token(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? key=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

SMALLEST = 2.0**-126
"""The lowest temperature that draws: smaller ones are zero on devices without denormals."""


def next_token(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    key: Tensor | None = None,
) -> Tensor:
    """Draws one element of each row of logits, in the order of Hugging Face's processors: temperature, top-k, top-p, then one
    draw with the probabilities that are left.

    Tensors as parameters can change from run to run without a new compilation, and from row to row: they broadcast to the shape
    of the result. Numbers are compiled in, and what they turn off takes no kernels.

    Args:
        logits: float32, float16 or bfloat16 [*, vocabulary], computed with in float32.
        temperature: the logits are divided by it. 0 (or less, or NaN): the largest logit, the first of several, as argmax.
        top_k: only logits that are not below the k-th largest can be drawn; all of several equal ones. 0 (or less), or the
            size of the vocabulary and more: no limit. Integers.
        top_p: of these, a token can be drawn if those that are more probable have less than top_p of the probability together;
            equal logits are equally probable. The most probable one can always be drawn. 1 (or more, or NaN): no limit.
        key: int32 [*, 2], from which alone the draw of a row follows, whatever the other rows are; None: draws follow the random
            state of torch or of the program.

    Returns:
        int64 [*]. A row with NaN, or whose largest logit is infinite, has no probabilities: it gives what argmax gives.

    Raises:
        InvalidInputError: logits are no floating-point tensor or have no dimension, top_k is of floats, a parameter does not
            broadcast to [*], or key is not int32 [*, 2].
    """
    if not logits.is_floating_point() or not logits.dim():
        raise InvalidInputError(
            f"logits are {logits.dtype} of shape {list(logits.shape)}; next_token takes floating-point logits [*, vocabulary]."
        )
    if isinstance(top_k, float) or (isinstance(top_k, Tensor) and top_k.is_floating_point()):
        raise InvalidInputError(f"top_k is {top_k!r}; it is a number of tokens: an integer, or a tensor of integers.")
    rank = logits.dim() - 1
    for name, given in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        if isinstance(given, Tensor) and not _broadcasts(given.shape, logits.shape[:-1]):
            raise InvalidInputError(
                f"{name} has shape {list(given.shape)}; it must broadcast to the {rank} leading dimensions of the logits, "
                f"{list(logits.shape[:-1])}."
            )
    if key is not None and (key.dtype is not torch.int32 or key.shape != (*logits.shape[:-1], 2)):
        raise InvalidInputError(
            f"key is {key.dtype} of shape {list(key.shape)}; it must be int32 of shape {[*logits.shape[:-1], 2]}."
        )
    given_k = None if _is_off(top_k, lambda k: k <= 0) else _tensor(top_k, torch.int64)
    given_p = None if _is_off(top_p, lambda p: not p < 1) else _tensor(top_p, torch.float32)
    greedy = _is_off(temperature, lambda t: not t >= SMALLEST)
    found: Tensor = (
        OPERATOR(logits, None, None, None)
        if greedy
        else OPERATOR(logits, _tensor(temperature, torch.float32), given_k, given_p, key)
    )
    return found


def _is_off(given: Any, off: Any) -> bool:
    return not isinstance(given, Tensor) and bool(off(given))


def _tensor(given: Any, dtype: torch.dtype) -> Tensor:
    return given if isinstance(given, Tensor) else torch.tensor(given, dtype=dtype)


def _broadcasts(shape: Any, to: Any) -> bool:
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))


def kept(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Which elements of [*, vocabulary] can be drawn, for rows with probabilities. Parameters as for the operator."""
    exact = torch.float64 if logits.device.type == "cpu" else torch.float32
    x, size = logits.to(exact), logits.shape[-1]
    ordered, places = torch.sort(x, stable=True, dim=-1, descending=True)
    found = torch.ones_like(x, dtype=torch.bool)
    if top_k is not None:
        k = _of_rows(top_k, x)
        k = torch.where((k > 0) & (k < size), k, size)
        found = found & (x >= ordered.gather(-1, (k - 1).to(torch.int64)))
    if top_p is not None:
        p = _of_rows(top_p, x).to(exact)
        weights = torch.where(found, _scores(x, ordered[..., :1], _of_rows(temperature, x)).exp(), 0)
        sums = weights.gather(-1, places).cumsum(-1)
        before = torch.nn.functional.pad(sums[..., :-1], (1, 0))
        count = (before < p * sums[..., -1:]).sum(-1, keepdim=True).clamp(min=1)
        found = found & (~(p < 1) | (x >= ordered.gather(-1, count - 1)))
    return found


def _scores(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, -torch.inf, (x - top) / temperature)  # at any temperature


def _of_rows(given: Tensor, x: Tensor) -> Tensor:
    return (
        given.to(x.device).unsqueeze(-1).expand(*x.shape[:-1], 1)
        if given.dim()
        else given.to(x.device).expand(*x.shape[:-1], 1)
    )


def _next_token(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, key: Tensor | None = None
) -> Tensor:
    best = logits.argmax(-1)
    if temperature is None or not logits.numel():
        return best
    top = logits.amax(-1, keepdim=True).float()
    heat = _of_rows(temperature, logits).float()
    draws = torch.isfinite(top) & (heat >= SMALLEST)
    heat = torch.where(draws, heat, 1.0)
    scores = torch.where(draws, _scores(logits.float(), top, heat), 0.0)
    shown = torch.where(draws, logits.float(), 0.0)
    weights = torch.where(kept(shown, heat[..., 0], top_k, top_p), scores.exp(), 0.0)
    rows = weights.reshape(-1, weights.shape[-1])
    if key is None:
        drawn = torch.multinomial(rows, 1).reshape(best.shape)
    else:
        drawn = torch.stack([_of_key(*of) for of in zip(rows, key.reshape(-1, 2), strict=True)]).reshape(best.shape)
    return torch.where(draws[..., 0], drawn, best)


def _of_key(weights: Tensor, key: Tensor) -> Tensor:
    first, second = (int(k) % 2**32 for k in key)
    return torch.multinomial(weights, 1, generator=torch.Generator(weights.device).manual_seed(first << 32 | second))[0]


def _shape(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, key: Tensor | None = None
) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


_library.impl("next_token", _next_token, "CompositeExplicitAutograd")
# As torch.library.register_fake does, without searching all modules for the function's location.
_entry: Any = torch._library.simple_registry.singleton.find("lapilli::next_token")
_entry.fake_impl.register(_shape, __name__, _library)

OPERATOR: Any = torch.ops.lapilli.next_token.default
