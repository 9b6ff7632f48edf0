"""Functions and bound methods as models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class FunctionModule(torch.nn.Module):
    """A function as a module. For a bound method of a module, the object's parameters and buffers are included."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner
        name = getattr(function, "__name__", type(function).__name__)

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        self.forward = forward  # with the function's own signature, which names dynamic sizes
        self.function_name = name

    def __repr__(self) -> str:
        return f"the function {self.function_name}"
