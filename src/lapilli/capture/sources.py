"""Sources of models: nn.Module, ExportedProgram, TorchScript, and the paths of files of the last two."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from lapilli.capture import torchscript
from lapilli.errors import CompileError

Source: TypeAlias = "torch.nn.Module | ExportedProgram | torchscript.ScriptSource | str | os.PathLike[str]"


def capture(model: Source, example_inputs: Any = None, dynamic_shapes: Any = None) -> ExportedProgram:
    """Export a model for inference.

    example_inputs: a tuple of positional arguments, or a dict of keyword arguments; an exported program needs none.
    Raises CompileError when the source is of another kind, or torch.export refuses it (with its reason)."""
    if isinstance(model, ExportedProgram):
        return model
    if isinstance(model, str | os.PathLike):
        return capture(_load(Path(model)), example_inputs, dynamic_shapes)
    if torchscript.is_torchscript(model):
        return _capture_script(model, example_inputs, dynamic_shapes)
    if not isinstance(model, torch.nn.Module):
        raise CompileError(
            f"cannot compile a {type(model).__name__}: give an nn.Module or a TorchScript module with example inputs, "
            "an ExportedProgram, or the path of a .pt2 file or of a TorchScript file"
        )
    if any(type(m).__module__.startswith("torch.ao.nn.quantized") for m in model.modules()):
        return _capture_script(_scripted(model, example_inputs), example_inputs, dynamic_shapes)
    args, kwargs = _distinct(_arguments(example_inputs))
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise CompileError(f"torch.export cannot capture {type(model).__name__}: {error}") from error
    finally:
        for m in training:
            m.training = True


def _scripted(model: torch.nn.Module, example_inputs: Any) -> torch.jit.ScriptModule:
    """A module that torch.ao.quantization.convert has made, scripted, else traced: torch.export cannot read packed weights."""
    args, kwargs = _arguments(example_inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scripted: torch.jit.ScriptModule = torch.jit.script(model)
        except Exception:
            try:
                scripted = torch.jit.trace(model, args, example_kwarg_inputs=kwargs or None, check_trace=False)  # type: ignore[no-untyped-call]
            except Exception as error:
                raise CompileError(
                    f"{type(model).__name__} has quantized modules, and torch can neither script nor trace it: {error}"
                ) from error
    return scripted


def _capture_script(model: torchscript.ScriptSource, example_inputs: Any, dynamic_shapes: Any) -> ExportedProgram:
    if example_inputs is None:
        raise CompileError(
            f"a TorchScript model does not say the sizes of its inputs: give example_inputs for {torchscript.describe(model)}"
        )
    args, kwargs = _distinct(_arguments(example_inputs))
    module = torchscript.module_of(model, args, kwargs)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"torch.export cannot capture {torchscript.describe(model)}: {error}") from error


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        raise CompileError("example_inputs is a tensor: give a tuple of the model's arguments, such as (x,)")
    if not isinstance(example_inputs, tuple | list):
        raise CompileError(
            f"example_inputs is a {type(example_inputs).__name__}: give a tuple of the model's arguments"
        )
    return tuple(example_inputs), {}


def _distinct(inputs: Any) -> Any:
    """The inputs with copies of tensors that come twice: torch.export takes those for one input."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    return tree_map(once, inputs)


def _load(path: Path) -> ExportedProgram | torch.jit.ScriptModule:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if torchscript.is_torchscript_file(path):
        return torchscript.load(path)
    if path.suffix != ".pt2":
        raise CompileError(
            f"{path.name}: only files of torch.export.save (.pt2) and of torch.jit.save can be compiled. What torch.save wrote "
            "holds no code: load it, and compile the module"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise CompileError(f"{path} cannot be read by torch.export.load: {error}") from error
