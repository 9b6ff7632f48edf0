"""Replaces in-place operators by functional ones, where the memory that they write is not read through another tensor
afterwards.

torch.export leaves `relu_` and `add_` as they are. Its own functionalization traces the model again, which takes seconds.
Most models need only the simple case: the written tensor is read later, but not those that share its memory. A buffer that is
written so (the cache of a decoder) becomes a state, whose new value is what was written last.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lapilli.graph.aliasing import functional_variant, may_alias
from lapilli.graph.module import Module, ModuleState


def functionalize(module: Module, buffers: Collection[str] = ()) -> bool:
    """Whether every in-place operator could be replaced. If not, the module keeps them from the first one that
    could not. buffers: names of the constants that a run may change; they become states.
    """
    place = {node: k for k, node in enumerate(module.graph.nodes)}
    own = _with_memory_of_their_own(module, buffers)
    newest: dict[fx.Node, fx.Node] = {}  # of a buffer
    for node in module.graph.nodes:
        if not _is_inplace(node):
            continue
        written, functional = node.args[0], _functional(node.target)
        if functional is None or not isinstance(written, fx.Node):
            return False
        if not _is_read_by_name(written, node, module, place, own, set(newest.values())):
            return False
        buffer = next((b for b, value in newest.items() if value is written), written if written in own else None)
        if buffer is not None:
            newest[buffer] = node
        node.target = functional
        for user in [u for u in written.users if place[u] > place[node]]:
            user.replace_input_with(written, node)
    _store(module, newest)
    return True


def _with_memory_of_their_own(module: Module, names: Collection[str]) -> set[fx.Node]:
    """The buffers of these names that share their memory with no other constant."""
    readers: dict[int, int] = {}
    for tensor in module.constants.values():
        memory = tensor.untyped_storage().data_ptr()
        readers[memory] = readers.get(memory, 0) + 1
    return {
        node
        for node, tensor in module.constants.items()
        if module.targets.get(node) in names and readers[tensor.untyped_storage().data_ptr()] == 1
    }


def _store(module: Module, newest: dict[fx.Node, fx.Node]) -> None:
    """Makes buffers states, in the order of their placeholders, and their new values results of the graph."""
    if not newest:
        return
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder" and n in newest]
    for node in placeholders:
        module.states[node] = ModuleState(module.targets[node], module.constants.pop(node), newest[node])
    output = module.graph.output_node()
    returned: Any = output.args[0]
    output.args = ((*(newest[node] for node in placeholders), *returned),)


def _functional(target: Any) -> Any:
    """The operator that only returns the new value of the first argument, given the same arguments."""
    schema = target._schema
    others = [a for a in schema.arguments[1:] if a.alias_info is not None and a.alias_info.is_write]
    variant = None if others else functional_variant(target)
    return variant if variant is not None and len(variant._schema.returns) == 1 else None


def _is_read_by_name(
    written: fx.Node,
    by: fx.Node,
    module: Module,
    place: dict[fx.Node, int],
    own: Collection[fx.Node],
    newest: Collection[fx.Node],
) -> bool:
    """Whether the memory that `by` writes is only read through `written` (or `by`): no other value that shares it is read
    afterwards, or is an input, a constant, an output or the newest value of a buffer. own: buffers that may be written
    themselves; newest: their values so far, which may be, too.
    """
    shared = {written}
    todo = [written]
    while todo:
        node = todo.pop()
        around = [user for user in node.users if _aliases(user) and user is not by]
        around += node.all_input_nodes if _aliases(node) else []
        todo += [n for n in around if n not in shared]
        shared.update(around)
    if written in module.outputs or any(_is_kept(n, module) for n in shared if n is not written or n not in own):
        return False
    if any(n in newest for n in shared if n is not written):
        return False
    # users of `written` after the write will use its new value
    before = [n for n in shared if n is not written and place[n] < place[by]]
    return not any(place[user] > place[by] for n in before for user in n.users)


def _is_kept(node: fx.Node, module: Module) -> bool:
    """Whether a value outlives the run, or was there before it."""
    return node.op != "call_function" or node in module.outputs


def _aliases(node: fx.Node) -> bool:
    """Whether a call may return memory of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    return may_alias(node.target)


def _is_inplace(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
