"""Sources of models: nn.Module, ExportedProgram, and the path of a .pt2 file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from lapilli.errors import CompileError

Source = torch.nn.Module | ExportedProgram | str | os.PathLike[str]


def capture(model: Source, example_inputs: Any = None, dynamic_shapes: Any = None) -> ExportedProgram:
    """Export a model for inference.

    example_inputs: a tuple of positional arguments, or a dict of keyword arguments; needed for an nn.Module only.
    Raises CompileError when the source is of another kind, or torch.export refuses it (with its reason)."""
    if isinstance(model, ExportedProgram):
        return model
    if isinstance(model, str | os.PathLike):
        return _load(Path(model))
    if not isinstance(model, torch.nn.Module):
        raise CompileError(
            f"cannot compile a {type(model).__name__}: give an nn.Module with example inputs, "
            "an ExportedProgram, or the path of a .pt2 file"
        )
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


def _load(path: Path) -> ExportedProgram:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != ".pt2":
        raise CompileError(f"{path.name}: only files saved by torch.export.save (.pt2) can be compiled")
    try:
        return torch.export.load(path)
    except Exception as error:
        raise CompileError(f"{path} cannot be read by torch.export.load: {error}") from error
