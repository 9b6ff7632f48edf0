"""The program inside a saved module: what the player of C++, Java and Kotlin runs, which knows no torch.

A module for the GPU is compiled when it is saved, for every kind of device, and the program is stored in the file as the attribute
`lapilli_program`: a tensor of bytes, which lies in the zip archive as it is. The sizes of its inputs are those that it was run
with, or else those of its bundled inputs, or else those that it was traced with, or else what its first layer tells of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lapilli.errors import LapilliError
from lapilli.mobile.model import Sizes, model_of

PROGRAM = "lapilli_program"
_RecursiveScriptModule: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]

_LIKELY = 224  # of a picture, where only its rank is known: what dynamic sizes are tried with
_SAME = {"aten::contiguous", "aten::to", "aten::relu", "aten::relu_", "aten::hardtanh", "aten::detach", "aten::clone"}


class SavedModule(_RecursiveScriptModule):  # type: ignore[misc]
    """An optimized module: the same as torch's, but a program is put into it before it is saved."""

    def save(self, f: Any, **kwargs: Any) -> Any:
        embed(self)
        return super().save(f, **kwargs)

    def save_to_buffer(self, *args: Any, **kwargs: Any) -> Any:
        embed(self)
        return super().save_to_buffer(*args, **kwargs)

    def _save_for_lite_interpreter(self, *args: Any, **kwargs: Any) -> Any:
        embed(self)
        return super()._save_for_lite_interpreter(*args, **kwargs)

    def _save_to_buffer_for_lite_interpreter(self, *args: Any, **kwargs: Any) -> Any:
        embed(self)
        return super()._save_to_buffer_for_lite_interpreter(*args, **kwargs)


def embed(module: Any) -> None:
    """Puts a program of the module's forward into it, for what is known of its inputs; warns where it can have none."""
    model = model_of(module.lapilli_model)
    sizes = model.seen("forward") or _bundled(module) or model.traced() or _told(model.method("forward"))
    if not sizes:
        _warn("the sizes of its inputs are not known. Run it once with an example before it is saved")
        return
    try:
        program = model.portable("forward", sizes)
    except LapilliError as error:
        _warn(f"it cannot be compiled for {list(sizes)}: {error}")
    else:
        module._c.setattr(PROGRAM, torch.frombuffer(bytearray(program), dtype=torch.uint8))


def _warn(why: str) -> None:
    warnings.warn(
        f"the saved module has no program for C++, Java and Kotlin, and runs in Python alone: {why}", stacklevel=4
    )


def _bundled(module: Any) -> tuple[Sizes, ...]:
    """Of the first bundled inputs, if they are tensors."""
    if not hasattr(module, "get_all_bundled_inputs"):
        return ()
    try:
        first = (module.get_all_bundled_inputs() or [()])[0]
    except RuntimeError:  # the method is another module's of the same class, which share a type in TorchScript
        return ()
    if not first or not all(isinstance(value, torch.Tensor) for value in first):
        return ()
    return tuple(Sizes(value.dtype, tuple(value.shape)) for value in first)


def _told(method: Any) -> tuple[Sizes, ...]:
    """What the first layers say: a convolution takes (1, channels, any, ...), a linear layer (1, features)."""
    inputs = list(method.graph.inputs())[1:]
    found = [_first_layer(value) for value in inputs]
    return tuple(s for s in found if s) if all(found) else ()


def _first_layer(value: Any) -> Sizes | None:
    for use in value.uses():
        node = use.user
        if node.kind() in _SAME and use.offset == 0:
            found = _first_layer(node.output())
            if found:
                return found
        weight = list(node.inputs())[1].toIValue() if node.inputsSize() > 1 else None
        if use.offset != 0 or not isinstance(weight, torch.Tensor):
            continue
        if node.kind() in ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution", "aten::convolution"):
            groups = list(node.inputs())[
                {"aten::_convolution": 8, "aten::convolution": 8}.get(node.kind(), 6)
            ].toIValue()
            if isinstance(groups, int) and weight.dim() > 2:
                spatial = tuple(range(2, weight.dim()))
                return Sizes(weight.dtype, (1, weight.shape[1] * groups, *(_LIKELY for _ in spatial)), spatial)
        if node.kind() == "aten::linear":
            return Sizes(weight.dtype, (1, weight.shape[1]))
    return None
