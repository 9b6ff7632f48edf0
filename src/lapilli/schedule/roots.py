"""Views: values that only read others at other indices, and the values that are read."""

from __future__ import annotations

from collections.abc import Mapping

from lapilli.ir.expr import Load, rewrite
from lapilli.ir.integer import Extremum, Indirect, Int, Quotient, Remainder
from lapilli.ir.node import Map, Node


def chase(node: Node, index: tuple[Int, ...], views: Mapping[int, Map] | None = None) -> tuple[Node, tuple[Int, ...]]:
    """Follows views to the value that is actually read, and the index."""
    while isinstance(node, Map) and node.view_of is not None and (views is None or node.id in views):
        source = rewrite(node.body, dict(zip(node.axes, index, strict=True)))
        assert isinstance(source, Load)
        node, index = source.node, source.index
    return node, index


def is_affine(index: tuple[Int, ...]) -> bool:
    return not any(
        isinstance(a, Quotient | Remainder | Extremum | Indirect) for i in index for m, _ in i.terms for a in m
    )
