"""Moving modules: parameters that were one stay one, and scripted modules move too.

PyTorch changes a parameter's data in place where both devices are its own; for others it makes new parameters, one for
every place where a module holds it. What was tied would come apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_moving = threading.local()


def patch() -> None:
    """Wraps ``Module._apply``, on which ``to``, ``vulkan``, ``cpu`` and the like are built."""
    apply: Any = torch.nn.Module._apply

    def tied(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if getattr(_moving, "inside", False):
            return apply(self, fn, recurse)
        ties = _ties(self)
        _moving.inside = True
        try:
            return apply(self, fn, recurse)
        finally:
            _moving.inside = False
            for (values, name), *others in ties:
                for other_values, other_name in others:
                    other_values[other_name] = values[name]

    tied.__doc__ = apply.__doc__
    torch.nn.Module._apply = tied  # type: ignore[method-assign]
    torch.jit.ScriptModule._apply = _apply_to_script  # type: ignore[method-assign]


_Place = tuple[dict[str, Any], str]


def _ties(root: torch.nn.Module) -> list[list[_Place]]:
    """The places of every parameter and buffer that has several."""
    places: dict[int, list[_Place]] = {}
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    places.setdefault(id(value), []).append((values, name))
    return [several for several in places.values() if len(several) > 1]


def _apply_to_script(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """``Module._apply`` for scripted modules, whose parameters are plain tensors that C++ holds."""
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
