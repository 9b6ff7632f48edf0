"""Kernels under torch.jit.trace, which records most operators, and stops while their kernels run.

It goes on in the kernels of those that it does not record itself. Sizes are then tensors, and what a kernel calls may be
recorded: the trace would have constants in place of results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_tracing() -> bool:
    """Whether torch.jit.trace records what is called."""
    return torch._C._get_tracing_state() is not None


def untraced(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """A kernel of which torch.jit.trace sees nothing."""

    @functools.wraps(kernel, updated=())
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_tracing():
            return kernel(*args, **kwargs)
        state = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[arg-type]
        try:
            return kernel(*args, **kwargs)
        finally:
            torch._C._set_tracing_state(state)

    return run


def is_recorded(op: torch._ops.OpOverload) -> bool:
    """Whether an operator has a result that a trace can hold."""
    return any("Tensor" in str(r.type) for r in op._schema.returns)
