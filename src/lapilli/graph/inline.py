"""Graphs in the place of single calls: regions that only set a mode, and what a call is made of."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lapilli.graph.module import Module


def inline_regions(module: Module) -> None:
    """Regions that turn gradients on or off, or automatic casts off, become part of the graph: here both are off anyway."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name, args = node.target.__name__, node.args
        if name == "wrap_with_set_grad_enabled":
            region, operands = args[1], args[2:]
        elif name == "wrap_with_autocast" and args[2] is False:
            region, operands = args[4], args[5:]
        else:
            continue
        graph = getattr(module.owner, str(region.target)).graph
        if all(n.op != "get_attr" for n in graph.nodes):  # no region inside
            splice(module, node, graph, operands)
            module.graph.erase_node(region)


def copy_into(module: Module, before: fx.Node, graph: fx.Graph, operands: Sequence[Any]) -> Any:
    """Copy a graph's calls to a place in the module; its placeholders are the operands. Returns what stands for its result."""
    given = iter(operands)
    made: dict[fx.Node, Any] = {}
    with module.graph.inserting_before(before):
        for node in graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op != "output":
                made[node] = module.graph.node_copy(node, made.__getitem__)
    return fx.node.map_arg(next(n for n in graph.nodes if n.op == "output").args[0], made.__getitem__)


def splice(module: Module, call: fx.Node, graph: fx.Graph, operands: Sequence[Any]) -> None:
    """Put a graph in the place of a call; its placeholders are the operands."""
    result = copy_into(module, call, graph, operands)
    if isinstance(result, fx.Node):
        module.replace(call, result)
    else:
        for user in list(call.users):
            assert user.target is operator.getitem
            module.replace(user, result[user.args[1]])
            module.graph.erase_node(user)
    module.graph.erase_node(call)
