"""Results of a graph that are views: their bases, and how the host creates them again.

PyTorch gives a result that is a view of an argument, or of another result, that memory with the sizes, strides and offset
of the tensor that the graph returned. A view must therefore be created exactly as PyTorch does, wherever it begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from lapilli.graph.aliasing import WHOLE_VIEWS

aten = torch.ops.aten

_ABSOLUTE = {aten.as_strided.default}
"""Views whose offset is relative to the beginning of the memory, whichever part of it the operand is."""


@dataclass(frozen=True)
class NumberArgument:
    """A number that differs from call to call: its position among the numbers of a call."""

    place: int


@dataclass(frozen=True)
class View:
    """A view operator, with its arguments after the tensor. element: which one, of an operator that returns
    several views.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    element: int | None
    is_fixed: bool

    @property
    def is_absolute(self) -> bool:
        return self.target in _ABSOLUTE

    def __call__(self, tensor: torch.Tensor, numbers: Sequence[Any]) -> torch.Tensor:
        args, kwargs = self.args, self.kwargs
        if not self.is_fixed:
            args, kwargs = tree_map(lambda x: numbers[x.place] if isinstance(x, NumberArgument) else x, (args, kwargs))
        made = self.target(tensor, *args, **kwargs)
        return made if self.element is None else made[self.element]  # type: ignore[no-any-return]


def is_whole(node: fx.Node) -> bool:
    """Whether a view has all elements of its base."""
    return node.target in WHOLE_VIEWS


def view_of(node: fx.Node, number: Callable[[Any], int]) -> View:
    """The view that a call creates. number: returns the position of a value that differs from call to call."""

    def given(leaf: Any) -> Any:
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        return NumberArgument(number(value)) if isinstance(value, torch.SymInt) else value

    call: Any = node
    element: Any = None
    if node.target is operator.getitem:
        call, element = node.args
    is_reshape = call.target in (
        aten.view.default,
        aten._unsafe_view.default,
    )  # the operand's strides may differ from those traced
    target = aten.reshape.default if is_reshape else call.target
    args, kwargs = tree_map(given, (tuple(call.args[1:]), dict(call.kwargs)))
    is_fixed = not any(isinstance(x, NumberArgument) for x in tree_leaves((args, kwargs)))
    return View(target, args, kwargs, element, is_fixed)
