"""Computes numbers that vary between calls on the host. torch makes the floats of a function float64 scalars, and computes
with them in the graph; the host does that in a few microseconds and without rounding, and passes the results to the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Scalars = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


def take_out(graph: fx.Graph, placeholders: list[fx.Node], constants: Mapping[fx.Node, torch.Tensor]) -> Scalars | None:
    """Moves calls on float64 scalars out of a graph. Their results become new placeholders, which are appended to the list;
    the returned function computes these from the other arguments. constants: values of placeholders that are not arguments.
    """
    taken: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and _is_double(node):
            taken[node] = None
        elif node.op == "call_function" and _is_scalar(node) and _is_pure(node):
            operands = node.all_input_nodes
            if all(a in taken for a in operands) and (_is_double(node) or any(map(_is_double, operands))):
                taken[node] = None
    results = [(n, narrow) for n in taken for narrow in (False, True) if _readers(n, taken, narrow)]
    if not results:
        return None
    host = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in [*placeholders, *taken]:
        if node in constants:
            made[node] = host.create_node("get_attr", node.name)
        elif node not in made:
            made[node] = host.node_copy(node, made.__getitem__)
    host.output(tuple(_single(host, made[n]) if narrow else made[n] for n, narrow in results))
    kept: dict[str, Any] = {n.name: t for n, t in constants.items() if n in taken}
    compute = fx.GraphModule(kept, host)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node, narrow in results:
        with graph.inserting_before(first):
            given = graph.placeholder(f"{node.name}_{'single' if narrow else 'given'}")
        given.meta["val"] = node.meta["val"].float() if narrow else node.meta["val"]
        for reader in _readers(node, taken, narrow):
            reader.replace_input_with(node, given)
        placeholders.append(given)
    for node in reversed(taken):
        if node.op != "placeholder":
            graph.erase_node(node)

    def scalars(given: Sequence[Any]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            found: Sequence[torch.Tensor] = compute(*given)
        return found

    return scalars


def _single(host: fx.Graph, number: fx.Node) -> fx.Node:
    return host.call_function(aten._to_copy.default, (number,), {"dtype": torch.float32})


def _readers(node: fx.Node, taken: Mapping[fx.Node, None], narrow: bool) -> list[fx.Node]:
    """The calls in the program that read a result, either in its own type or (narrow) as float32: with a tensor that has
    axes, PyTorch computes with a float64 scalar in that tensor's type. Arguments in their own type are left alone.
    """
    found = [u for u in node.users if u not in taken and narrow == (_is_double(node) and _is_beside_a_tensor(u))]
    return found if narrow or node.op != "placeholder" else []


def _is_beside_a_tensor(node: fx.Node) -> bool:
    """Whether a call computes in the type of an operand that has axes."""
    vals = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [v for v in vals if isinstance(v, torch.Tensor)]
    wide = any(v.dtype is torch.float64 and (v.dim() or v is vals[0]) for v in tensors)
    return not wide and any(v.dim() and v.dtype.is_floating_point for v in tensors[1:])


def _is_scalar(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() == 0 and val.device.type == "cpu"


def _is_double(node: fx.Node) -> bool:
    return _is_scalar(node) and node.meta["val"].dtype is torch.float64


def _is_pure(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
