"""How operators treat the memory of their arguments: which ones return views, and which functional operators replace those
that write in place.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Overload = torch._ops.OpOverload

WHOLE_VIEWS = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.detach.default,
    aten.alias.default,
}  # fmt: skip
"""Views of all elements: if one is needed, so are all elements of its base."""

READ_AS_VIEWS = WHOLE_VIEWS | {
    aten.reshape.default, aten.contiguous.default, aten.unflatten.int, aten.mT.default, aten.slice.Tensor,
}  # fmt: skip
"""Operators whose result kernels read from the memory of the argument, although PyTorch may copy it."""

_SECRET_VIEWS = {
    aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.type_as, aten.meshgrid,
    aten.broadcast_tensors, aten.pad, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.einsum, aten.unsafe_chunk,
    aten.unsafe_split, aten._unsafe_view,
}  # fmt: skip
"""Operators that may return memory of their arguments, although their schemas do not say so."""


def is_view(target: Any) -> bool:
    """Whether an operator's result, or all of several, always share the memory of its first argument."""
    if target is aten._unsafe_view.default:
        return True
    if not isinstance(target, Overload) or target.namespace != "aten" or not target._schema.arguments:
        return False
    first, *others = (r.alias_info for r in target._schema.returns) if target._schema.returns else (None,)
    given = target._schema.arguments[0].alias_info
    return not others and first is not None and given is not None and not given.is_write


def base_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a call's result is a view of."""
    target, source = node.target, node.args[0] if node.args else None
    if target is operator.getitem and isinstance(source, fx.Node) and is_view(source.target):
        source = source.args[0]
    elif not is_view(target):
        return None
    return source if isinstance(source, fx.Node) else None


def root_of(node: fx.Node) -> fx.Node:
    """The tensor at the root of a chain of views."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def may_alias(target: Overload) -> bool:
    """Whether an operator may return memory of its arguments."""
    return target.overloadpacket in _SECRET_VIEWS or any(r.alias_info is not None for r in target._schema.returns)


_FUNCTIONAL: dict[Overload, Overload] = {
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.rrelu_with_noise_.default: aten.rrelu_with_noise_functional.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
}
"""Variants that cannot be found by name."""


@cache
def functional_variant(op: Overload) -> Overload | None:
    """The operator that returns an operator's results, and the new values of the arguments that it writes, without writing
    to them.

    That is the operator itself if it writes nothing; for in-place operators and those with `out`, the one with the same
    name and arguments. None if there is none.
    """
    if op in _FUNCTIONAL:
        return _FUNCTIONAL[op]
    schema = op._schema
    if not schema.is_mutable:
        return op
    wanted = [str(a.type) for a in schema.arguments if not (a.kwarg_only and a.alias_info is not None)]
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        other: Overload = getattr(packet, name)
        if not other._schema.is_mutable and [str(a.type) for a in other._schema.arguments] == wanted:
            return other
    return None
