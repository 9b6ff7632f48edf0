"""Runs operators on the CPU, for tensors on the device, if the device cannot run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lapilli.eager import fallback, storage, transfer
from lapilli.eager.device_state import is_ours
from lapilli.eager.generators import default_generator
from lapilli.eager.operator_schema import Schema, wrapped


def on_cpu(schema: Schema, leaves: Sequence[Any], index: int, reason: str) -> Any:
    """Runs an operator on the CPU, with its results, and the arguments that it writes, on the device `index`.

    Raises torch's own exceptions for wrong arguments, and NotImplementedError in strict mode.
    """
    moved: dict[int, torch.Tensor] = {}

    def down(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor) or not is_ours(leaf):
            return leaf
        if id(leaf) not in moved:
            moved[id(leaf)] = transfer.to_cpu(leaf)
        return moved[id(leaf)]

    fallback.check_strict(schema, leaves, reason)
    given = [tree_map(down, list(leaf) if isinstance(leaf, tuple) else leaf) for leaf in leaves]
    if "generator" in schema.names and given[place := schema.names.index("generator")] is None:
        given[place] = default_generator(index)  # so that random numbers follow the device's seed
    given = _with_tensors(schema, given)
    args, kwargs = arguments(schema, given)
    with torch.no_grad():
        result = schema.op(*args, **kwargs)
    fallback.note(schema, leaves, reason)
    back: dict[int, torch.Tensor] = {}
    for place in schema.written:
        for ours, theirs in zip(tree_leaves(leaves[place]), tree_leaves(given[place]), strict=True):
            if isinstance(ours, torch.Tensor):
                if ours.layout is not torch.strided:
                    transfer.set_sparse(ours, theirs)
                    back[id(theirs)] = ours
                    continue
                if ours.shape != theirs.shape:
                    ours.resize_(theirs.shape)
                    if storage.is_dense(theirs):
                        ours.as_strided_(theirs.shape, theirs.stride())
                if is_ours(ours):
                    transfer.copy_(ours, theirs)
                back[id(theirs)] = ours

    def up(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return back[id(leaf)] if id(leaf) in back else transfer.from_cpu(leaf, index)

    return tree_map(up, result)


def _with_tensors(schema: Schema, given: list[Any]) -> list[Any]:
    """The arguments, with numbers as tensors without dimensions where the operator does not accept numbers."""
    beside = [
        t for k, t in enumerate(given) if k in schema.tensors and k not in schema.outs and isinstance(t, torch.Tensor)
    ]
    types = [(t.dtype, t.dim()) for t in beside]
    return [
        torch.tensor(x, dtype=wrapped(x, types)) if k in schema.tensors and isinstance(x, int | float) else x
        for k, x in enumerate(given)
    ]


def arguments(schema: Schema, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Leaves as positional and named arguments."""
    return list(leaves[: schema.positional]), dict(
        zip(schema.names[schema.positional :], leaves[schema.positional :], strict=True)
    )
