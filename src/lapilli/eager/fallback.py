"""Calls that run on the CPU because the device cannot run them: with a warning for every operator or, in strict mode, not
at all.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lapilli.catalog import entry
from lapilli.eager.operator_schema import Schema

_counts: Counter[str] = Counter()
reasons: dict[str, str] = {}
"""The reason why each operator last ran on the CPU."""


def fallbacks() -> dict[str, int]:
    """The number of calls of each operator that ran on the CPU, since the process started or since `reset_fallbacks`."""
    return dict(_counts)


def reset_fallbacks() -> None:
    """Resets the counts; every operator may warn again."""
    _counts.clear()


def strict() -> bool:
    """Whether calls that would run on the CPU raise NotImplementedError."""
    return os.environ.get("LAPILLI_STRICT", "") not in ("", "0")


def check_strict(schema: Schema, leaves: Sequence[Any], reason: str) -> None:
    """Raises NotImplementedError in strict mode, except for numbers, which the host computes anyway."""
    if strict() and not _is_number(leaves):
        raise refuse(schema, leaves, reason)


def refuse(schema: Schema, leaves: Sequence[Any], reason: str) -> NotImplementedError:
    """The exception of strict mode."""
    dtypes = dict.fromkeys(
        str(t.dtype).removeprefix("torch.") for t in tree_leaves(list(leaves)) if isinstance(t, torch.Tensor)
    )
    return NotImplementedError(
        f"{schema.op} on {', '.join(dtypes) or 'no'} tensors cannot run on the vulkan device: {reason}. {nearest(schema, dtypes)} "
        "(LAPILLI_STRICT=1 is set; without it the operator runs on the CPU, with a warning.)"
    )


def nearest(schema: Schema, dtypes: Any) -> str:
    """The most similar supported form of the call."""
    known = entry(schema.computed)
    if known.dtypes:
        missing = [d for d in dtypes if d not in known.dtypes]
        if missing:
            listed = ", ".join(known.dtypes)
            return f"It runs there on {listed}: convert the tensors, for example with .to(torch.{known.dtypes[0]})."
        return "Other sizes or arguments of this operator do run there."
    return "Move its operands to the CPU with .cpu(), or write it in terms of other operators."


def _is_number(leaves: Sequence[Any]) -> bool:
    """Whether a call only computes with numbers in float64 (tensors without dimensions), which the host is meant for. (The
    factor by which gradients are divided is one.)
    """
    tensors = [t for t in tree_leaves(list(leaves)) if isinstance(t, torch.Tensor)]
    return any(t.dtype is torch.float64 for t in tensors) and not any(t.dim() for t in tensors)


def note(schema: Schema, leaves: Sequence[Any], reason: str) -> None:
    """Counts a call that ran on the CPU, and warns about the first one of each operator; not for numbers."""
    if _is_number(leaves):
        return
    name = str(schema.op)
    _counts[name] += 1
    reasons[name] = reason
    if _counts[name] == 1:
        warnings.warn(
            f"{name} runs on the CPU, because the vulkan device cannot run it: {reason}. torch.vulkan.fallbacks() counts such "
            "calls; LAPILLI_STRICT=1 makes them errors.",
            UserWarning,
            stacklevel=2,
        )
