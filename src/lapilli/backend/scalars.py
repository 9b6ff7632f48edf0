"""Numbers that vary between calls: torch makes tensors float64[] of a function's floats, and computes with them. The host does
that, in a few microseconds and without rounding; the program gets the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Scalars = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


def take_out(graph: fx.Graph, placeholders: list[fx.Node]) -> Scalars | None:
    """Moves calls on scalars in float64 out of a graph. Their results become new placeholders, which are appended to the list;
    the function that is returned computes them from the arguments of the others."""
    taken: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and _is_double(node):
            taken[node] = None
        elif node.op == "call_function" and _is_scalar(node) and _is_pure(node):
            operands = node.all_input_nodes
            if all(a in taken for a in operands) and (_is_double(node) or any(map(_is_double, operands))):
                taken[node] = None
    results = [n for n in taken if n.op != "placeholder" and any(u not in taken for u in n.users)]
    if not results:
        return None
    host = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in [*placeholders, *(n for n in taken if n.op != "placeholder")]:
        made[node] = host.node_copy(node, made.__getitem__)
    host.output(tuple(made[n] for n in results))
    compute = fx.GraphModule(torch.nn.Module(), host)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in results:
        with graph.inserting_before(first):
            given = graph.placeholder(f"{node.name}_given")
        given.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(given)
        placeholders.append(given)
    for node in reversed(taken):
        if node.op != "placeholder":
            graph.erase_node(node)

    def scalars(given: Sequence[Any]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            found: Sequence[torch.Tensor] = compute(*given)
        return found

    return scalars


def _is_scalar(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() == 0 and val.device.type == "cpu"


def _is_double(node: fx.Node) -> bool:
    return _is_scalar(node) and node.meta["val"].dtype is torch.float64


def _is_pure(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
