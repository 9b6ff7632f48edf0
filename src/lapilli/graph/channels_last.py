"""Keeps model inputs and outputs in torch's channels-last memory format, without a copy.

torch considers such a tensor [batch, channels, height, width] with other strides. In the program it is a dense [batch,
height, width, channels], and the graph begins and ends with permutations, which are index maps and cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lapilli.graph.module import Module

aten = torch.ops.aten


def keep_channels_last(module: Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives such inputs and outputs their permuted shapes. Returns the positions of both."""
    inner = module.constants.keys() | module.states.keys()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    given = [n for n in placeholders if n not in inner and isinstance(n.meta["val"], torch.Tensor | torch.SymInt)]
    inputs = [k for k, n in enumerate(given) if _is_channels_last(n.meta["val"]) and k not in module.updates]
    outputs = [
        k
        for k, n in enumerate(module.outputs[: len(module.outputs) - len(module.updates)])
        if isinstance(n, torch.fx.Node) and n not in placeholders and _is_channels_last(n.meta["val"])
    ]
    for node in (given[k] for k in inputs):
        with module.graph.inserting_after(placeholders[-1]):
            seen = module.graph.call_function(aten.permute.default, (node, [0, 3, 1, 2]))
        seen.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(seen, delete_user_cb=lambda user, seen=seen: user is not seen)
        node.meta["val"] = node.meta["val"].permute(0, 2, 3, 1)
    last = next(n for n in module.graph.nodes if n.op == "output")
    for k in outputs:
        node = module.outputs[k]
        with module.graph.inserting_before(last):
            kept = module.graph.call_function(aten.permute.default, (node, [0, 2, 3, 1]))
        kept._rename(f"{node.name}_channels_last")
        kept.meta["val"] = node.meta["val"].permute(0, 2, 3, 1)
        module.outputs[k] = kept
        returned: Any = last.args[0]
        last.args = ((*returned, kept),)
    return tuple(inputs), tuple(outputs)


def _is_channels_last(val: Any) -> bool:
    """Whether a fake tensor has channels-last strides, and is not dense and row-major as well."""
    if not isinstance(val, torch.Tensor) or val.dim() != 4 or val.layout is not torch.strided:
        return False
    _, channels, height, width = val.shape
    wanted = (height * width * channels, 1, width * channels, channels)
    return (
        isinstance(channels, int)
        and channels > 1
        and not statically_known_true(height * width == 1)
        and all(statically_known_true(a == b) for a, b in zip(val.stride()[1:], wanted[1:], strict=True))
    )
