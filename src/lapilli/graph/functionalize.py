"""Replaces in-place operators by functional ones, where the memory that they write is not read through another tensor
afterwards.

torch.export leaves `relu_` and `add_` as they are. Its own functionalization traces the model again, which takes seconds.
Most models need only the simple case: the written tensor is read later, but not those that share its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lapilli.graph.aliasing import functional_variant, may_alias
from lapilli.graph.module import Module


def functionalize(module: Module) -> bool:
    """Whether every in-place operator could be replaced. If not, the module keeps them from the first one that
    could not.
    """
    place = {node: k for k, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        if not _is_inplace(node):
            continue
        written, functional = node.args[0], _functional(node.target)
        if functional is None or not isinstance(written, fx.Node) or not _is_read_by_name(written, node, module, place):
            return False
        node.target = functional
        for user in [u for u in written.users if place[u] > place[node]]:
            user.replace_input_with(written, node)
    return True


def _functional(target: Any) -> Any:
    """The operator that only returns the new value of the first argument, given the same arguments."""
    schema = target._schema
    others = [a for a in schema.arguments[1:] if a.alias_info is not None and a.alias_info.is_write]
    variant = None if others else functional_variant(target)
    return variant if variant is not None and len(variant._schema.returns) == 1 else None


def _is_read_by_name(written: fx.Node, by: fx.Node, module: Module, place: dict[fx.Node, int]) -> bool:
    """Whether the memory that `by` writes is only read through `written` (or `by`): no other value that shares it is read
    afterwards, or is an input, a constant or an output.
    """
    shared = {written}
    todo = [written]
    while todo:
        node = todo.pop()
        around = [user for user in node.users if _aliases(user) and user is not by]
        around += node.all_input_nodes if _aliases(node) else []
        todo += [n for n in around if n not in shared]
        shared.update(around)
    if written in module.outputs or any(n.op != "call_function" or n in module.outputs for n in shared):
        return False
    # users of `written` after the write will use its new value
    before = [n for n in shared if n is not written and place[n] < place[by]]
    return not any(place[user] > place[by] for n in before for user in n.users)


def _aliases(node: fx.Node) -> bool:
    """Whether a call may return memory of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    return may_alias(node.target)


def _is_inplace(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
