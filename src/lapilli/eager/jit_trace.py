"""Kernels under torch.jit.trace, which records most operators, and pauses while their kernels run.

It continues in the kernels of operators that it does not record itself. Sizes are tensors there, and operators called by
the kernel may be recorded, so that the trace would contain constants instead of results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_torch_c: Any = torch._C  # not all of it has types
_TRACER = _torch_c._parse_dispatch_key("Tracer")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_tracing() -> bool:
    """Whether torch.jit.trace is recording."""
    return _torch_c._get_tracing_state() is not None


def untraced(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """A kernel that torch.jit.trace does not look into."""

    @functools.wraps(kernel, updated=())
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_tracing():
            return kernel(*args, **kwargs)
        state, excluded = _torch_c._get_tracing_state(), _torch_c._dispatch_tls_is_dispatch_key_excluded(_TRACER)
        _torch_c._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)  # while it is, the state cannot be set
        _torch_c._set_tracing_state(None)
        try:
            return kernel(*args, **kwargs)
        finally:
            _torch_c._set_tracing_state(state)
            _torch_c._dispatch_tls_set_dispatch_key_excluded(_TRACER, excluded)

    return run


def is_recorded(op: torch._ops.OpOverload) -> bool:
    """Whether an operator has a result that a trace can hold."""
    return any("Tensor" in str(r.type) for r in op._schema.returns)
