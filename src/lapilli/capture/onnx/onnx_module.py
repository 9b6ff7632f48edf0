"""The module of an ONNX model, which torch.export traces, with example inputs and dynamic sizes as the model declares them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_graph import DTYPES, OnnxInput, OnnxModel
from lapilli.capture.onnx.onnx_interpreter import OnnxInterpreter
from lapilli.capture.onnx.onnx_reading import from_numpy, read
from lapilli.capture.onnx.onnx_values import ConstantTensor
from lapilli.errors import CompileError

_LARGE = 64
"""Elements from which on a constant is a buffer of the module, under its name."""
_EXAMPLE = 2
"""An example of a dynamic size: torch.export takes 0 and 1 for fixed."""


class OnnxModule(nn.Module):
    """A module with the initializers of a model as buffers, and a forward that runs its graph."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self.model = model
        self.declares_sizes = False
        """Whether the dynamic sizes of the present capture are those of the file, not the caller's."""
        self._constants: dict[str, ConstantTensor] = {}
        taken: set[str] = set(dir(self))
        for name, tensor in model.graph.constants.items():
            buffer = None
            if tensor.numel() >= _LARGE:
                buffer = identifier(name, taken)
                self.register_buffer(buffer, tensor)
            self._constants[name] = ConstantTensor(tensor, buffer)
        names: set[str] = set()
        self.names = [identifier(x.name, names) for x in model.graph.inputs]

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = self.signature.bind(*args, **kwargs)
            return self._run(list(bound.arguments.values()))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(name, kind) for name in self.names])
        forward.__signature__ = self.signature  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def described(self) -> str:
        """The inputs for error messages: `input_ids int64[batch, sequence]`."""
        return ", ".join(
            f"{x.name} {str(DTYPES.get(x.kind, '?')).removeprefix('torch.')}"
            + ("" if x.sizes is None else f"[{', '.join('?' if s is None else str(s) for s in x.sizes)}]")
            for x in self.model.graph.inputs
        )

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of all inputs. Raises CompileError if the given ones do not fit."""
        try:
            return list(self.signature.bind(*args, **kwargs).arguments.values())
        except TypeError as error:
            raise CompileError(
                f"the example inputs do not fit the ONNX model, which takes {self.described}: {error}"
            ) from error

    def _run(self, values: Sequence[Any]) -> Any:
        graph = self.model.graph
        interpreter = OnnxInterpreter(self.get_buffer, self.model.kinds)
        given = [_value(x, v) for x, v in zip(graph.inputs, values, strict=True)]
        results = interpreter.graph(graph, given, self._constants)
        outputs = tuple(interpreter.tensor(r) for r in results)
        return outputs[0] if len(outputs) == 1 else outputs


def identifier(name: str, taken: set[str]) -> str:
    """A name of Python for a name of ONNX, one that is not taken yet."""
    base = re.sub(r"\W", "_", name) or "value"
    base = f"x{base}" if base[0].isdigit() or base[0] == "_" else base
    found, count = base, 1
    while found in taken:
        count += 1
        found = f"{base}_{count}"
    taken.add(found)
    return found


def _value(declared: OnnxInput, value: Any) -> Any:
    """What the graph computes with: tensors as they are, Python's numbers as constants."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if declared.container == "sequence" or (
        isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    ):
        return [_value(OnnxInput(declared.name, declared.kind, None), v) for v in value]
    with _disable_current_modes():
        return ConstantTensor(torch.tensor(value, dtype=DTYPES[declared.kind]))


def load(path: Path) -> OnnxModule:
    """The module of an ONNX file. Raises CompileError if it is damaged or has operators that are not known."""
    return OnnxModule(read(path))


def examples(module: OnnxModule, given: Any, shapes: Any) -> tuple[tuple[Any, ...], Any]:
    """Example inputs and dynamic_shapes of a model.

    given: the caller's, a sequence, a mapping by name, or None: then tensors of the declared shapes. shapes: the caller's; None:
    sizes that the model declares as open are dynamic.
    """
    declared = module.model.graph.inputs
    values = _bound(module, given)
    dims: dict[str, Any] = {}
    args, specs = [], []
    for x, value in zip(declared, values, strict=True):
        if value is _OPEN:
            value = _example(x, module)
        spec: dict[int, Any] = {}
        if shapes is None and isinstance(value, torch.Tensor) and x.sizes is not None and len(x.sizes) == value.ndim:
            for axis, size in enumerate(x.sizes):
                if not isinstance(size, int):
                    name = identifier(size or f"{x.name}_{axis}", set())
                    spec[axis] = dims.setdefault(name, Dim(name, min=1))
                    if value.shape[axis] < 2:  # torch.export would take it for fixed
                        value = value.repeat_interleave(2, axis) if value.shape[axis] else _longer(value, axis)
        args.append(value)
        specs.append(spec or None)
    module.declares_sizes = shapes is None
    if shapes is not None:
        return tuple(args), shapes
    return tuple(args), tuple(specs) if dims else None


_OPEN = object()


def _bound(module: OnnxModule, given: Any) -> list[Any]:
    """The caller's example of each input, `_OPEN` where there is none."""
    declared = module.model.graph.inputs
    if given is None:
        return [_OPEN] * len(declared)
    if isinstance(given, Mapping):
        names = {**{x.name: k for k, x in enumerate(declared)}, **{name: k for k, name in enumerate(module.names)}}
        unknown = [name for name in given if name not in names]
        if unknown:
            raise CompileError(f"the ONNX model has no input {unknown[0]!r}; its inputs are {module.described}")
        values: list[Any] = [_OPEN] * len(declared)
        for name, value in given.items():
            values[names[name]] = value
    else:
        values = list(given)
        if len(values) != len(declared):
            raise CompileError(f"{len(values)} example inputs were given, and the ONNX model takes {module.described}")
    return [_checked(x, v) for x, v in zip(declared, values, strict=True)]


def _checked(x: OnnxInput, value: Any) -> Any:
    """An example as a tensor or Python's numbers. Raises CompileError if the dtype is not the declared one."""
    if isinstance(value, np.ndarray | np.generic):
        value = from_numpy(np.asarray(value))
    if isinstance(value, torch.Tensor) and value.dtype != DTYPES.get(x.kind, value.dtype):
        raise CompileError(f"the example of the input {x.name} is {value.dtype}, and the model takes {DTYPES[x.kind]}")
    if isinstance(value, list | tuple) and x.container == "sequence":
        return [_checked(OnnxInput(x.name, x.kind, None), v) for v in value]
    return value


def _example(x: OnnxInput, module: OnnxModule) -> torch.Tensor:
    if x.sizes is None or x.container != "tensor":
        raise CompileError(
            f"the ONNX model does not say the shape of its input {x.name}: give example_inputs for {module.described}"
        )
    shape = [size if isinstance(size, int) else _EXAMPLE for size in x.sizes]
    dtype = DTYPES[x.kind]
    values = (
        torch.rand(shape, generator=torch.Generator().manual_seed(0)) if dtype.is_floating_point else torch.zeros(shape)
    )
    return values.to(dtype)


def _longer(value: torch.Tensor, axis: int) -> torch.Tensor:
    shape = list(value.shape)
    shape[axis] = _EXAMPLE
    return value.new_zeros(shape)
