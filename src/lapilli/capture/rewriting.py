"""Calls of a model that are traced as other calls: where torch.export would lose or unroll them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

Rewrite: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(function, args, kwargs) -> the result, or NotImplemented for the call as it is."""


class _Rewriting(TorchFunctionMode):
    def __init__(self, rewrites: Mapping[Any, Rewrite]) -> None:
        super().__init__()
        self.rewrites = rewrites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        rewrite = self.rewrites.get(func)
        result = NotImplemented if rewrite is None else rewrite(func, args, given)
        return func(*args, **given) if result is NotImplemented else result


@contextmanager
def rewriting(model: torch.nn.Module, rewrites: Mapping[Any, Rewrite]) -> Iterator[None]:
    """A context for tracing a model: its calls of these functions are rewritten, and what torch.export does around it is not
    slowed down (the mode sees each attribute of a tensor: a tenth of an export)."""
    active: list[ExitStack] = []

    def enter(*_: Any) -> None:
        active.append(ExitStack())
        active[-1].enter_context(_Rewriting(rewrites))

    def leave(*_: Any) -> None:
        active.pop().close()

    hooks = [model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while active:
            leave()
