"""What runs on the CPU because the device cannot: with a warning for every operator, or not at all."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lapilli.eager import storage
from lapilli.eager.devices import is_ours
from lapilli.eager.form import Form, wrapped
from lapilli.eager.generators import default_generator

_counts: Counter[str] = Counter()
reasons: dict[str, str] = {}
"""Why operators ran on the CPU, the last time that they did."""


def fallbacks() -> dict[str, int]:
    """How often each operator ran on the CPU since the process began, or since `reset_fallbacks`."""
    return dict(_counts)


def reset_fallbacks() -> None:
    """Begins to count anew; every operator may warn once more."""
    _counts.clear()


def strict() -> bool:
    """Whether operators that would run on the CPU raise NotImplementedError."""
    return os.environ.get("LAPILLI_STRICT", "") not in ("", "0")


def refuse(form: Form, leaves: Sequence[Any], reason: str) -> NotImplementedError:
    """What strict mode says."""
    dtypes = dict.fromkeys(
        str(t.dtype).removeprefix("torch.") for t in tree_leaves(list(leaves)) if isinstance(t, torch.Tensor)
    )
    return NotImplementedError(
        f"{form.op} on {', '.join(dtypes) or 'no'} tensors cannot run on the vulkan device: {reason}. {nearest(form, dtypes)} "
        "(LAPILLI_STRICT=1 is set; without it the operator runs on the CPU, with a warning.)"
    )


def nearest(form: Form, dtypes: Any) -> str:
    """The nearest form of the call that is supported."""
    from lapilli.catalog import entry

    known = entry(form.computed)
    if known.dtypes:
        missing = [d for d in dtypes if d not in known.dtypes]
        if missing:
            listed = ", ".join(known.dtypes)
            return f"It runs there on {listed}: convert the tensors, for example with .to(torch.{known.dtypes[0]})."
        return "Other sizes or arguments of this operator do run there."
    return "Move its operands to the CPU with .cpu(), or write it in terms of other operators."


def on_cpu(form: Form, leaves: Sequence[Any], index: int, reason: str) -> Any:
    """The operator on the CPU, with its results and what it writes on the device `index`.

    Raises what torch raises for wrong arguments, and NotImplementedError in strict mode."""
    from lapilli.eager import sparse

    moved: dict[int, torch.Tensor] = {}

    def down(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor) or not is_ours(leaf):
            return leaf
        if id(leaf) not in moved:
            moved[id(leaf)] = sparse.to_cpu(leaf)
        return moved[id(leaf)]

    is_number = _is_number(leaves)
    if strict() and not is_number:
        raise refuse(form, leaves, reason)
    given = [tree_map(down, list(leaf) if isinstance(leaf, tuple) else leaf) for leaf in leaves]
    if "generator" in form.names and given[place := form.names.index("generator")] is None:
        given[place] = default_generator(index)  # so that random numbers follow the device's seed here too
    given = _with_tensors(form, given)
    args, kwargs = arguments(form, given)
    with torch.no_grad():
        result = form.op(*args, **kwargs)
    if not is_number:
        _warn(form, reason)
    back: dict[int, torch.Tensor] = {}
    for place in form.written:
        for ours, theirs in zip(tree_leaves(leaves[place]), tree_leaves(given[place]), strict=True):
            if isinstance(ours, torch.Tensor):
                if ours.shape != theirs.shape:
                    ours.resize_(theirs.shape)
                if is_ours(ours):
                    storage.copy_(ours, theirs)
                back[id(theirs)] = ours

    def up(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return back[id(leaf)] if id(leaf) in back else sparse.from_cpu(leaf, index)

    return tree_map(up, result)


def _with_tensors(form: Form, given: list[Any]) -> list[Any]:
    """With tensors of no dimensions for numbers where the operator takes no numbers."""
    beside = [
        t for k, t in enumerate(given) if k in form.tensors and k not in form.outs and isinstance(t, torch.Tensor)
    ]
    types = [(t.dtype, t.dim()) for t in beside]
    return [
        torch.tensor(x, dtype=wrapped(x, types)) if k in form.tensors and isinstance(x, int | float) else x
        for k, x in enumerate(given)
    ]


def _is_number(leaves: Sequence[Any]) -> bool:
    """Whether this computes with numbers in float64, tensors without dimensions: that is what the host is for. (The factor by
    which gradients are divided is one.)"""
    tensors = [t for t in tree_leaves(list(leaves)) if isinstance(t, torch.Tensor)]
    return any(t.dtype is torch.float64 for t in tensors) and not any(t.dim() for t in tensors)


def arguments(form: Form, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Leaves as positional and named arguments."""
    return list(leaves[: form.positional]), dict(
        zip(form.names[form.positional :], leaves[form.positional :], strict=True)
    )


def _warn(form: Form, reason: str) -> None:
    name = str(form.op)
    _counts[name] += 1
    reasons[name] = reason
    if _counts[name] == 1:
        warnings.warn(
            f"{name} runs on the CPU, for the vulkan device cannot run it: {reason}. torch.vulkan.fallbacks() counts such calls; "
            "LAPILLI_STRICT=1 makes them errors.",
            UserWarning,
            stacklevel=2,
        )
