"""One query that several heads ask the same keys: these heads become rows of one product.

Models with fewer heads of keys than of queries repeat keys and values, which would be written out and packed in every run. As rows
they are read where they lie, such as in a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lapilli.graph.module import Module

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)

_MOST = 8
"""Kernels for a few rows take up to as many; a larger product of them has others, which are no better than those of one query."""


def share_heads(module: Module) -> int:
    """attention(q [b, groups * n, 1, d], repeated k, repeated v) = attention(q as [b, groups, n, d], k, v). Returns how many."""
    nodes = [n for n in module.graph.nodes if n.target is _ATTENTION]
    return sum(_share(module, node) for node in nodes)


def _share(module: Module, node: fx.Node) -> bool:
    q, k, v = node.args[:3]
    mask, dropout, causal = (node.args[p] if len(node.args) > p else None for p in (3, 4, 5))
    if causal or dropout or not isinstance(q, fx.Node):
        return False
    shape = tuple(q.meta["val"].shape)
    if len(shape) != 4 or not _is(shape[2], 1) or not all(isinstance(s, int) for s in (shape[1], shape[3])):
        return False
    grouped = bool(node.kwargs.get("enable_gqa"))
    keys, values = (_once(x, grouped) for x in (k, v))
    if keys is None or values is None:
        return False
    groups = keys.meta["val"].shape[1]
    same = isinstance(groups, int) and groups > 0 and _is(values.meta["val"].shape[1], groups)
    if not same or groups >= shape[1] or shape[1] % groups:
        return False
    if shape[1] // groups > _MOST:
        return False
    if isinstance(mask, fx.Node):
        of = tuple(mask.meta["val"].shape)
        if not all(_is(size, 1) for size in of[-3:-1]):
            return False
    val, n = node.meta["val"], shape[1] // groups
    with module.graph.inserting_before(node):
        rows = module.graph.call_function(aten.view.default, (q, [-1, groups, n, shape[3]]))
        rows.meta["val"] = q.meta["val"].new_empty((shape[0], groups, n, shape[3]))
        named = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}
        found = module.graph.call_function(_ATTENTION, (rows, keys, values, mask), named)
        found.meta["val"] = val.new_empty((val.shape[0], groups, n, val.shape[3]))
        result = module.graph.call_function(aten.view.default, (found, [-1, shape[1], 1, val.shape[3]]))
        result.meta["val"] = val.new_empty(val.shape)
    module.replace(node, result)
    return True


def _once(x: Any, grouped: bool) -> fx.Node | None:
    """What heads were repeated of, [b, groups, s, d]: x itself if the operator repeats them. None if none were."""
    if grouped or not isinstance(x, fx.Node):
        return x if isinstance(x, fx.Node) else None
    if x.target not in _VIEWS:
        return None
    inner: Any = x.args[0]
    if inner.target is aten.clone.default:
        inner = inner.args[0]
    if inner.target is not aten.expand.default:
        return None
    source = inner.args[0]
    whole, wide, small = (tuple(n.meta["val"].shape) for n in (x, inner, source))
    if len(wide) != 5 or len(whole) != 4 or len(small) != 5 or not _is(small[2], 1):
        return None
    if wide[:2] + wide[3:] != small[:2] + small[3:] or whole != (wide[0], wide[1] * wide[2], *wide[3:]):
        return None
    if source.target is not aten.unsqueeze.default or source.args[1] not in (2, -3):
        return None
    found: Any = source.args[0]
    while found.target is aten.slice.Tensor and found.meta["val"].shape == found.args[0].meta["val"].shape:
        found = found.args[0]
    return found  # type: ignore[no-any-return]


def _is(size: Any, number: int) -> bool:
    """Whether a size is known to be this number."""
    return isinstance(size, int) and size == number
