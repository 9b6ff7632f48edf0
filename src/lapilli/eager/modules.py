"""Moves modules such that shared parameters stay shared, and scripted modules move as well.

PyTorch changes a parameter's data in place if both devices are its own. For others it creates a new parameter wherever a
module holds one, which would separate tied weights.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from lapilli.eager.device_state import is_ours
from lapilli.torch_compat import replace

_moving = threading.local()


def patch() -> None:
    """Wraps ``Module._apply``, on which ``to``, ``vulkan``, ``cpu`` and the like are based."""
    apply: Any = torch.nn.Module._apply
    _tie_what_is_moving(apply)

    @functools.wraps(apply)
    def tied(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if getattr(_moving, "inside", False):
            return apply(self, fn, recurse)
        ties = _ties(self)
        _moving.inside = True
        try:
            return apply(self, fn, recurse)
        finally:
            _moving.inside = False
            _tie(ties)

    replace(torch.nn.Module, "_apply", tied)
    replace(torch.jit.ScriptModule, "_apply", _apply_to_script)


_Place = tuple[dict[str, Any], str]
_Tie = tuple[torch.Tensor, list[_Place]]


def _tie_what_is_moving(apply: Any) -> None:
    """Handles the case that moving a module is the first use of the device: PyTorch's own `_apply` is running then, and has
    not replaced anything yet. Weights are tied again when it is done, that is, when the function that it applies is
    released.
    """
    frame: FrameType | None = sys._getframe()
    root = None
    while frame is not None:
        if frame.f_code is apply.__code__:
            root = frame
        frame = frame.f_back
    if root is not None:
        weakref.finalize(root.f_locals["fn"], _tie, _ties(root.f_locals["self"])).atexit = False


def _tie(ties: list[_Tie]) -> None:
    """Makes places that shared a parameter or buffer share it again, if it moved to or from the device."""
    for before, ((values, name), *others) in ties:
        if is_ours(before) or is_ours(values[name]):
            for other_values, other_name in others:
                other_values[other_name] = values[name]


def _ties(root: torch.nn.Module) -> list[_Tie]:
    """All places of every parameter and buffer that has several."""
    places: dict[int, list[_Place]] = {}
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    places.setdefault(id(value), []).append((values, name))
    return [(values[name], several) for several in places.values() if len(several) > 1 for values, name in several[:1]]


def _apply_to_script(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """``Module._apply`` for scripted modules, whose parameters are plain tensors owned by C++."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            with torch.no_grad():
                new = fn(tensor)
                if torch._has_compatible_shallow_copy_type(tensor, new):
                    tensor.data, new = new, tensor
                else:
                    new = new.detach().requires_grad_(tensor.requires_grad)
                if tensor.grad is not None:
                    new.grad = fn(tensor.grad)
            moved[id(tensor)] = tensor, new
        return moved[id(tensor)][1]

    for module in self.modules() if recurse else (self,):
        for name, parameter in torch._C.ParameterDict(module._c).items():  # type: ignore[attr-defined]
            module._c.setattr(name, move(parameter))
        for name, buffer in torch._C.BufferDict(module._c).items():  # type: ignore[attr-defined]
            module._c.setattr(name, move(buffer))
    return self
