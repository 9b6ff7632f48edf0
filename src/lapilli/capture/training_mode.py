"""What an exported program computes as in training: its graph has the mode that its model had when it was exported."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch.export import ExportedProgram


def warn(program: ExportedProgram) -> None:
    """Warns of operators in training mode, which are computed as they are: who deploys a model rarely means them."""
    found = Counter(
        str(node.target.overloadpacket)
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and _trains(node.target, node.args, node.kwargs)
    )
    if found:
        names = ", ".join(name if n == 1 else f"{n} of {name}" for name, n in sorted(found.items()))
        warnings.warn(
            f"the model was exported in training mode, and is compiled so: dropout draws random numbers in every call, and "
            f"batch norm takes the statistics of its batch ({names}). Call model.eval() before torch.export for inference.",
            UserWarning,
            stacklevel=2,
        )


def _trains(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given: dict[str, Any] = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in op._schema.arguments), args, strict=False))
    given.update(kwargs)
    if given.get("dropout_p"):  # attention, which has no mode
        return True
    if given.get("train") is not True and given.get("training") is not True:
        return False
    chance = given.get("p", given.get("dropout"))  # of layers of an RNN
    if chance is not None:
        return bool(chance)
    return "running_mean" not in given or given["running_mean"] is not None
