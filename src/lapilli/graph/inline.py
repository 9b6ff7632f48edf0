"""Inlines graphs in place of single calls: regions that only set a mode, and decompositions of a call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lapilli.graph.module import Module


def inline_regions(module: Module) -> None:
    """Inlines regions that turn gradients or autocast on or off: both are off here anyway. Calls with a type of their result, as
    PT2E's reference representation has, become calls of converted operands.
    """
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name, args = node.target.__name__, node.args
        if name == "out_dtype":
            _compute_in(module, node)
            continue
        if name == "wrap_with_set_grad_enabled":
            region, operands = args[1], args[2:]
        elif name == "wrap_with_autocast" and args[2] is False:
            region, operands = args[4], args[5:]
        else:
            continue
        graph = getattr(module.owner, str(region.target)).graph
        if all(n.op != "get_attr" for n in graph.nodes):  # no nested region
            splice(module, node, graph, operands)
            module.graph.erase_node(region)


def _compute_in(module: Module, node: fx.Node) -> None:
    """As torch computes it: in the type of which operands and result can be, and then converted."""
    given: Any = node.args
    target, dtype, *operands = given
    seen = fx.node.map_arg(operands, lambda n: n.meta["val"])
    kind, _ = elementwise_dtypes(
        *(x for x in seen if isinstance(x, torch.Tensor | int | float)), torch.empty(1, dtype=dtype, device="meta"),
        type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT,
    )  # fmt: skip

    def converted(x: Any, dtype: torch.dtype) -> Any:
        if not isinstance(x, fx.Node) or x.meta["val"].dtype is dtype:
            return x
        made = module.graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta["val"] = x.meta["val"].new_empty(x.meta["val"].shape, dtype=dtype)
        return made

    with module.graph.inserting_before(node):
        call = module.graph.call_function(target, tuple(converted(x, kind) for x in operands), node.kwargs)
        call.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=kind)
        result = converted(call, dtype)
    module.replace(node, result)
    module.graph.erase_node(node)


def copy_into(module: Module, before: fx.Node, graph: fx.Graph, operands: Sequence[Any]) -> Any:
    """Copies a graph's calls into the module before a node, with the operands as its placeholders. Returns the value of its
    result.
    """
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
    """Replaces a call by a graph, with the operands as its placeholders."""
    result = copy_into(module, call, graph, operands)
    if isinstance(result, fx.Node):
        module.replace(call, result)
    else:
        for user in list(call.users):
            assert user.target is operator.getitem
            module.replace(user, result[user.args[1]])
            module.graph.erase_node(user)
    module.graph.erase_node(call)
