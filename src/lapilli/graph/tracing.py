"""Traces parts of a graph again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def open_sizes(mode: FakeTensorMode | None) -> AbstractContextManager[Any]:
    """A context in which sizes stay dynamic while something is traced: specializing one raises RuntimeError. (torch 2.11
    has no such mode, and may specialize it.)
    """
    env = None if mode is None else mode.shape_env
    forbid = getattr(env, "error_on_new_guards", nullcontext)
    context: AbstractContextManager[Any] = forbid()
    return context
