"""TorchScript as a source of models: scripted and traced modules, their methods, and files of torch.jit.save.

The graph is interpreted under torch.export (`script_interpreter`), so that dynamic sizes stay symbols; torch's own converter
and freezing both lose them. Parameters and buffers keep their names.

Attributes that a run assigns (`self.state = ...`) are states, like buffers. Models often start with an empty tensor and create the
real one in the first run, but torch.export requires one shape. The model is then captured as it is from the second run on, with
zeros as the initial state, and two runs check that this gives the results of a first run.
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from lapilli.capture.script_interpreter import Interpreter, ScriptModuleRef, inlined, nodes
from lapilli.capture.script_quantized import Quantized
from lapilli.errors import CompileError

ScriptSource: TypeAlias = "torch.jit.ScriptModule | torch._C.ScriptMethod[..., Any] | torch._C.ScriptFunction[..., Any]"


def is_torchscript(model: Any) -> TypeGuard[ScriptSource]:
    """Whether this is a scripted or traced module, a method of one, or a scripted function."""
    return isinstance(model, (torch.jit.ScriptModule, torch._C.ScriptMethod, torch._C.ScriptFunction))


def is_torchscript_file(path: Path) -> bool:
    """Whether torch.jit.save (or `_save_for_lite_interpreter`) wrote the file."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        inner = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in inner and any(name.startswith("code/") for name in inner)


def load(path: Path) -> torch.jit.ScriptModule:
    """The module in a file of torch.jit.save, on the CPU. Raises CompileError if torch cannot read it."""
    try:
        return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call, no-any-return]
    except Exception as error:
        raise CompileError(f"{path} cannot be read by torch.jit.load: {error}") from error


def module_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module:
    """A module for torch.export that computes the same as a TorchScript module, method or function.

    args, kwargs: example inputs; a model with states is run on them. Raises CompileError if that fails.
    """
    module = _Interpreted(model)
    if module.assigns:
        _settle(module, module.bound(args, kwargs))
    return module


def describe(model: Any) -> str:
    """The signature of a model for error messages: `forward(Tensor x, int sr)`."""
    code = _method(model)
    return f"{code.schema.name}({', '.join(f'{a.type} {a.name}' for a in code.arguments)})"


@dataclass(frozen=True)
class _Code:
    """The graph and schema of a method or function, and the module that it belongs to."""

    graph: Any
    schema: Any
    owner: Any = None

    @property
    def arguments(self) -> list[Any]:
        """The arguments of the schema, without the module itself."""
        return list(self.schema.arguments)[self.owner is not None :]


def _method(model: Any) -> _Code:
    if isinstance(model, torch._C.ScriptFunction):
        return _Code(model.graph, model.schema)
    if isinstance(model, torch._C.ScriptMethod):
        return _Code(model.graph, model.schema, model.owner)
    if not model._c._has_method("forward"):
        have = ", ".join(model._c._method_names()) or "none"
        raise CompileError(
            f"the TorchScript module has no method forward; compile one of its methods by itself: {have}"
        )
    method = model._c._get_method("forward")
    return _Code(method.graph, method.schema, model._c)


class _Interpreted(nn.Module):
    """A module with the parameters and buffers of a model under their names, and a forward that interprets the graph.

    settled: values of assigned attributes that are not tensors, by path. Those that are tensors are buffers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        code = _method(model)
        self.graph = inlined(code.graph)
        self.assigns = any(node.kind() == "prim::SetAttr" for node in nodes(self.graph))
        self._written = _written_in_place(self.graph)
        self.states: list[str] = []
        self.settled: dict[str, Any] = {}
        self._root = None if code.owner is None else ScriptModuleRef(code.owner, "")
        if code.owner is not None:
            _take_tensors(self, code.owner)
        parameters = [
            inspect.Parameter(
                a.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            )
            for a in code.arguments
        ]
        self.signature = inspect.Signature(parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(self.bound(args, kwargs))

        forward.__signature__ = self.signature  # type: ignore[attr-defined]
        self.forward = forward

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of all arguments, including defaults. Raises CompileError if the given ones do not fit."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CompileError(f"the example inputs do not fit the TorchScript model, whose arguments are "
                               f"{self.signature}: {error}") from error  # fmt: skip
        bound.apply_defaults()
        return list(bound.arguments.values())

    def interpret(self, values: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The output, and the attributes that were assigned. attributes: values that replace the model's own."""
        interpreter = Interpreter(lambda owner, name, number: self._attribute(owner, name, number, attributes))
        given = values if self._root is None else [self._root, *values]
        return interpreter.run(self.graph, given), interpreter.assigned

    def _run(self, values: Sequence[Any]) -> Any:
        """The output; assigned values are stored in the states."""
        before = self.settled | {path: self.get_buffer(path).clone() for path in self.states}
        output, assigned = self.interpret(values, before)
        if any(isinstance(leaf, Quantized) for leaf in tree_leaves(output)):
            raise CompileError(
                "a result of the model is a quantized tensor; programs give numbers: end the model with a DeQuantStub, or with "
                "dequantize()"
            )
        for path, value in assigned.items():
            if path in self.states:
                self.get_buffer(path).copy_(value)
            elif value != self.settled[path]:
                raise CompileError(
                    f"the model assigns {value!r} to its attribute {path}, which was {self.settled[path]!r}: only tensors can "
                    f"change from run to run. Keep it in a tensor"
                )
        return output

    def _attribute(self, owner: ScriptModuleRef, name: str, as_number: bool, attributes: Mapping[str, Any]) -> Any:
        path = f"{owner.path}.{name}" if owner.path else name
        if path in attributes:
            return attributes[path]
        if name == "training":
            return False
        value = owner.script.getattr(name)
        if isinstance(value, torch.Tensor) and (not as_number or name in self._written):
            holder = self.get_submodule(owner.path)
            return getattr(holder, name) if hasattr(holder, name) else value
        return value


def _take_tensors(holder: nn.Module, script: Any) -> None:
    """Registers the parameters and buffers of a module and its submodules, as they are, under their names."""
    for name, value in _items(torch._C.ParameterDict(script)):
        holder.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))
    for name, value in _items(torch._C.BufferDict(script)):
        if name not in holder._parameters:
            holder.register_buffer(name, value)
    for name, child in _items(torch._C.ModuleDict(script)):
        inner = nn.Module()
        holder.add_module(name, inner)
        _take_tensors(inner, child)


def _written_in_place(graph: Any) -> set[str]:
    """Names of attributes that operators such as `aten::add_` change."""
    first = [node.inputsAt(0).node() for node in nodes(graph) if node.kind().endswith("_") and node.inputsSize()]
    return {node.s("name") for node in first if node.kind() == "prim::GetAttr"}


def _items(members: Any) -> list[tuple[str, Any]]:
    """The items of torch's dictionaries of a C++ module, which have no typed stubs."""
    return list(members.items())


# -- states


def _settle(module: _Interpreted, values: list[Any]) -> None:
    """Determines the attributes that a run assigns, and their initial values."""

    def run(attributes: Mapping[str, Any], inputs: list[Any]) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            return module.interpret(_copy(inputs), _copy({**own, **attributes}))

    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    _, assigned = run({}, values)
    own |= {path: own[path] if path in own else _value(module, path) for path in assigned}
    begin = {path: _copy(own[path]) for path in assigned}
    if not all(_same_kind(begin[path], assigned[path]) for path in assigned):
        begin = _later(run, begin, assigned, values)
    for path, value in begin.items():
        if isinstance(value, torch.Tensor):
            holder, _, name = path.rpartition(".")
            owner = module.get_submodule(holder)
            owner._buffers.pop(name, None)
            owner.register_buffer(name, value)
            module.states.append(path)
        else:
            module.settled[path] = value


def _later(run: Any, begin: dict[str, Any], first: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """The attributes' values before the second run, with zeros for new tensors, if a run from there equals a first run."""
    _, second = run(first, values)
    changing = [path for path in first if not _same_kind(first[path], second.get(path, first[path]))]
    if changing:
        raise CompileError(
            f"the attribute {changing[0]} changes its shape or value with every run ({_shown(first[changing[0]])}, then "
            f"{_shown(second[changing[0]])}): only tensors of one shape can be states"
        )
    kept = {
        path: value if not isinstance(value, torch.Tensor)
        else begin[path] if _same_kind(begin[path], value) else torch.zeros_like(value)
        for path, value in first.items()
    }  # fmt: skip
    zeros = {path: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for path, v in first.items()}
    for candidate in (kept, zeros):
        if all(_equal(*_outcomes(run, begin, candidate, inputs)) for inputs in (values, _random(values))):
            return candidate
    raise CompileError(
        f"the first run of the model differs from later ones (it creates {', '.join(first)}), and it is not as if these began as "
        "zeros. Run the model once, or give the attributes tensors of their later shapes, before compiling it"
    )


def _outcomes(run: Any, begin: dict[str, Any], candidate: dict[str, Any], inputs: list[Any]) -> list[Any]:
    """Outputs and attributes after a run from each of two initial states."""
    found = []
    for attributes in (begin, candidate):
        output, assigned = run(attributes, inputs)
        found.append((output, [assigned.get(path, attributes[path]) for path in candidate]))
    return found


def _value(module: _Interpreted, path: str) -> Any:
    assert module._root is not None
    script = module._root.script
    *owners, name = path.split(".")
    for owner in owners:
        script = script.getattr(owner)
    return script.getattr(name)


def _copy(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def _random(values: Any) -> Any:
    """Inputs of the same kind with other floating-point values."""
    generator = torch.Generator().manual_seed(0)

    def other(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        return leaf

    return tree_map(other, values)


def _same_kind(a: Any, b: Any) -> bool:
    """Whether both are tensors of one shape and dtype, or equal values."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return type(a) is type(b) and bool(a == b)


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(
        x.shape == y.shape and torch.allclose(x, y, 1e-5, 1e-6) if isinstance(x, torch.Tensor) else x == y
        for x, y in pairs
    )


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
