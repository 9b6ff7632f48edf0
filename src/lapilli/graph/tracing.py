"""Tracing a part of a graph anew."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def open_sizes(mode: FakeTensorMode | None) -> AbstractContextManager[Any]:
    """Sizes stay as dynamic as they are while something is traced: what would fix one raises RuntimeError. (torch 2.11 has no
    such mode: there it may be fixed.)"""
    env = None if mode is None else mode.shape_env
    forbid = getattr(env, "error_on_new_guards", nullcontext)
    context: AbstractContextManager[Any] = forbid()
    return context
