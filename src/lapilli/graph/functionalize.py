"""In-place operators as functional ones, where no view shares the memory that they write.

torch.export keeps `relu_` and `add_` as they stand. Its own functionalization traces the model again (seconds); most models
need only the simple case: the written value is no view and has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lapilli.graph.module import Module


def functionalize(module: Module) -> bool:
    """Whether every in-place operator could be replaced; if not, the module is left as it was."""
    plan: list[tuple[fx.Node, fx.Node, Any]] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        written = node.args[0]
        functional = _functional(node.target)
        if functional is None or not isinstance(written, fx.Node) or not _is_alone(written, module, node):
            return False
        plan.append((node, written, functional))
    for node, written, functional in plan:
        node.target = functional
        for user in _after(node) & set(written.users):
            user.replace_input_with(written, node)
    return True


def _functional(target: Any) -> Any:
    """relu_.default -> relu.default, when there is one of the same arguments."""
    name = target._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    return overload if overload is not None and not overload._schema.is_mutable else None


def _is_alone(written: fx.Node, module: Module, by: fx.Node) -> bool:
    """Whether nothing shares the memory of a value: it is no input, no constant, no view, and has no views."""
    if written.op != "call_function" or _aliases(written.target) or written in module.outputs:
        return False
    return not any(user is not by and _aliases(user.target) and not _is_inplace(user.target) for user in written.users)


def _aliases(target: Any) -> bool:
    """Whether a call may return memory of its argument (in-place operators count when they are not replaced yet)."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten.flatten.using_ints):
        return True
    if target is torch.ops.aten.dropout.default:
        return True
    return any(r.alias_info is not None for r in target._schema.returns) and not _is_inplace(target)


def _is_inplace(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _after(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    current = node.next
    while current.op != "root":
        found.add(current)
        current = current.next
    return found
