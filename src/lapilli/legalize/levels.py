"""Which calls of a graph run together, on the GPU or on the host, and the graphs of those groups.

Every value has a level. Even levels belong to the GPU and odd ones to the host. A value's level is the lowest that its
operands allow, so that calls of a level depend on each other and on lower levels only, and levels run in order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lapilli.lower import READS_NUMBER, is_size

Levels = Mapping[fx.Node, int]


def levels(graph: fx.Graph, on_host: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The level of every node. Numbers computed from sizes, and elements of several results, have the level of their
    operands. Numbers read from a tensor (`item()`) are read by the host.

    on_host: calls that cannot run on the GPU.
    """
    found: dict[fx.Node, int] = {}
    for n in graph.nodes:
        if n.op != "call_function":
            found[n] = 0
            continue
        least = max((found[a] for a in n.all_input_nodes), default=0)
        follows = n.target is operator.getitem or is_size(n.meta.get("val"))
        if n.target in READS_NUMBER or not follows:
            least += least % 2 != (n.target in READS_NUMBER or n in on_host)
        found[n] = least
    return found


def segments(graph: fx.Graph, found: Levels) -> dict[int, list[fx.Node]]:
    """The calls that create tensors on the GPU, by level."""
    made: dict[int, list[fx.Node]] = {}
    for n in graph.nodes:
        if n.op == "call_function" and found[n] % 2 == 0 and not is_size(n.meta.get("val")):
            made.setdefault(found[n], []).append(n)
    return made


@dataclass(frozen=True)
class Cut:
    """A graph of some calls of another.

    outside: the values that they read of other calls, with their placeholders. results: their tensors that others read, in
    the order in which the graph returns them, with their nodes in the new graph.
    """

    graph: fx.Graph
    outside: dict[fx.Node, fx.Node]
    results: dict[fx.Node, fx.Node]


def cut(nodes: Sequence[fx.Node], returned: Collection[fx.Node] = ()) -> Cut:
    """The graph of some calls, in their order. returned: nodes that are used outside the graph."""
    inside = set(nodes)
    graph = fx.Graph()
    outside: dict[fx.Node, fx.Node] = {}
    for a in dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside):
        outside[a] = graph.placeholder(a.name)
        outside[a].meta = dict(a.meta)
    made = dict(outside)
    for n in nodes:
        made[n] = graph.node_copy(n, made.__getitem__)
    results = {
        n: made[n] for n in nodes
        if isinstance(n.meta["val"], torch.Tensor) and (n in returned or any(u not in inside for u in n.users))
    }  # fmt: skip
    graph.output(tuple(results.values()))
    return Cut(graph, outside, results)
