"""A graph with dynamic sizes, for one set of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map


def dynamic_sizes(placeholders: Sequence[fx.Node]) -> list[sympy.Symbol]:
    """The symbols in the shapes of the arguments, in order of their names. Numbers among the arguments may change with every call,
    and are left alone.
    """
    values: list[Any] = [node.meta.get("val") for node in placeholders]
    shapes: list[Any] = [v.shape for v in values if isinstance(v, torch.Tensor)]
    found = {s for shape in shapes for n in shape if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
    return sorted(found, key=lambda s: str(s.name))


def fix_sizes(graph: fx.Graph, sizes: Mapping[str, int]) -> None:
    """Replaces symbols by these values, in place: in shapes, and where a size is an argument of an operator."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        node.meta["val"] = fixed = tree_map(lambda value: _fixed(value, sizes), val)
        if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool) and isinstance(fixed, int | float):
            for user in list(node.users):
                user.args, user.kwargs = _with_number((user.args, user.kwargs), node, fixed)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and isinstance(node.meta.get("val"), int | float):
            graph.erase_node(node)


def _with_number(given: Any, node: fx.Node, number: float) -> Any:
    return fx.map_arg(given, lambda n: number if n is node else n)


def _fixed(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        e = value.node.expr
        known = {s: sympy.Integer(sizes[s.name]) for s in e.free_symbols if s.name in sizes}
        if len(known) < len(e.free_symbols):
            return value
        kind = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
        return kind(e.xreplace(known))
    if not isinstance(value, FakeTensor):
        return value
    shape, strides = ([_fixed(n, sizes) for n in given] for given in (value.shape, value.stride()))
    with value.fake_mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
