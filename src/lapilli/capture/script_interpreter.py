"""Interprets TorchScript graphs on Python values; models are captured by interpreting them on torch.export's fake tensors.

Sizes stay symbols unless the model branches on them. Functions and methods are inlined. The values of a run are in one
dictionary, by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from lapilli.capture import script_quantized
from lapilli.capture.script_composed import COMPOSED
from lapilli.capture.script_operators import KEPT, NUMBERS, TENSOR, argument, number, python_operator
from lapilli.errors import CompileError

Graph = Any  # the stubs of torch._C.Graph, Block, Node and Value lack members used here
Node = Any
Environment = dict[str, Any]
Rule = Callable[[Node, list[Any], Environment], Sequence[Any]]


@dataclass(frozen=True)
class ScriptModuleRef:
    """A module as a value of the graph: the C++ object, and its path in the model."""

    script: Any
    path: str

    def child(self, name: str, script: Any) -> ScriptModuleRef:
        return ScriptModuleRef(script, f"{self.path}.{name}" if self.path else name)


@dataclass
class Instance:
    """An instance of a class that is compiled with the model (`@torch.jit.script class`)."""

    attributes: dict[str, Any] = field(default_factory=dict)


Attributes = Callable[[ScriptModuleRef, str, bool], Any]
"""Returns the value of a module's attribute that is not a module. The flag: only the number in it is wanted, if it is a tensor."""

_TO_NUMBER = frozenset(
    {
        "aten::FloatImplicit",
        "aten::IntImplicit",
        "aten::ScalarImplicit",
        "aten::item",
        "aten::Int",
        "aten::Float",
        "aten::Bool",
    }
    | {"aten::quantize_per_tensor"}
)


class Interpreter:
    """One run of a method. `assigned` has the values of the attributes that the run assigned, by path."""

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes
        self.assigned: dict[str, Any] = {}

    def run(self, graph: Graph, values: Sequence[Any]) -> Any:
        """The graph's output for its inputs; the first input of a method is its module.

        Raises CompileError, which names the operator and its location in the model's source.
        """
        names = [value.debugName() for value in graph.inputs()]
        env = dict(zip(names, values, strict=True))
        self._block(graph, env)
        outputs = [env[value.debugName()] for value in graph.outputs()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _block(self, block: Graph, env: Environment) -> list[Any]:
        for node in block.nodes():
            inputs = [env[value.debugName()] for value in node.inputs()]
            with _located(node):
                results = self._node(node, inputs, env)
            names = [value.debugName() for value in node.outputs()]
            env.update(zip(names, results, strict=True))
        return [env[value.debugName()] for value in block.outputs()]

    def _node(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        """The values of the node's outputs."""
        kind = node.kind()
        method: Rule | None = getattr(self, "_" + kind.replace("::", "_"), None) if kind.startswith("prim::") else None
        if method is not None:
            return method(node, inputs, env)
        results = call(node, inputs)
        count = node.outputsSize()
        return (results,) if count == 1 else () if count == 0 else tuple(results)

    # -- values

    def _prim_Constant(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        if node.output().type().kind() == "FunctionType":
            return (None,)  # its calls are inlined
        return (node.output().toIValue(),)

    def _prim_ListConstruct(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (inputs,)

    def _prim_TupleConstruct(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (tuple(inputs),)

    def _prim_DictConstruct(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (dict(zip(inputs[::2], inputs[1::2], strict=True)),)

    def _prim_TupleUnpack(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        if len(inputs[0]) != node.outputsSize():
            raise CompileError(f"{len(inputs[0])} values cannot be unpacked into {node.outputsSize()}")
        return tuple(inputs[0])

    _prim_ListUnpack = _prim_TupleUnpack

    def _prim_TupleIndex(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (inputs[0][inputs[1]],)

    def _prim_TupleSlice(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (inputs[0][node.i("beg") : node.i("end")],)

    def _prim_isinstance(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (any(_is_instance(inputs[0], kind) for kind in node.tys("types")),)

    # -- attributes

    def _prim_GetAttr(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        (owner,), name = inputs, node.s("name")
        if isinstance(owner, Instance):
            return (owner.attributes[name],)
        if not isinstance(owner, ScriptModuleRef):
            return (getattr(owner, name),)
        path = f"{owner.path}.{name}" if owner.path else name
        if path in self.assigned:
            return (self.assigned[path],)
        value = owner.script.getattr(name)
        if isinstance(value, torch._C.ScriptModule):
            return (owner.child(name, value),)
        as_number = all(use.user.kind() in _TO_NUMBER for use in node.output().uses())
        return (self._attributes(owner, name, as_number),)

    def _prim_SetAttr(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        owner, value = inputs
        name = node.s("name")
        if isinstance(owner, Instance):
            owner.attributes[name] = value
        else:
            self.assigned[f"{owner.path}.{name}" if owner.path else name] = value
        return ()

    def _prim_CreateObject(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return (Instance(),)

    def _prim_CallMethod(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        """A method of a module whose type is only known as an interface; calls of other methods are inlined."""
        owner = inputs[0]
        if not isinstance(owner, ScriptModuleRef):
            raise CompileError(f"the method {node.s('name')} of a {type(owner).__name__} cannot be called")
        return (self.run(inlined(owner.script._get_method(node.s("name")).graph), inputs),)

    # -- control flow

    def _prim_If(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        then, otherwise = node.blocks()
        return self._block(then if bool(inputs[0]) else otherwise, env)

    def _prim_Loop(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        (body,) = node.blocks()
        names = [value.debugName() for value in body.inputs()]
        limit, going, carried = inputs[0], bool(inputs[1]), inputs[2:]
        count = 0
        while going and count < limit:
            env.update(zip(names, [count, *carried], strict=True))
            condition, *carried = self._block(body, env)
            going = bool(condition)
            count += 1
        return carried

    def _prim_RaiseException(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        kind = inputs[1].rpartition(".")[2] if len(inputs) > 1 and isinstance(inputs[1], str) else "an exception"
        raise CompileError(f"for these inputs the model itself raises {kind}: {inputs[0]}")

    def _prim_Enter(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        return [None] * node.outputsSize()  # `with torch.no_grad()`: there are no gradients here

    _prim_Exit = _prim_Enter

    def _prim_PythonOp(self, node: Node, inputs: list[Any], env: Environment) -> Sequence[Any]:
        raise CompileError("a Python function that TorchScript has not compiled cannot be captured")


def inlined(graph: Graph) -> Graph:
    """A copy of a graph with all calls inlined."""
    copy = graph.copy()
    torch._C._jit_pass_inline(copy)
    return copy


def nodes(block: Graph) -> Iterator[Node]:
    """All nodes of a graph, including those of inner blocks."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes(inner)


def call(node: Node, values: list[Any]) -> Any:
    """The result of an operator."""
    name = node.kind()
    schema = node.schema()
    if script_quantized.is_quantized(name, schema, values):
        return script_quantized.call(name, schema, values, lambda given: _called(name, schema, given))
    return _called(name, schema, values)


def _called(name: str, schema: str, values: list[Any]) -> Any:
    overload = schema.partition("(")[0].removeprefix(name).removeprefix(".") if "::" in schema else ""
    first = values[0] if values else None
    target = dispatched(name, overload)
    if isinstance(first, torch.Tensor) and name in TENSOR and (target is None or name in KEPT):
        return TENSOR[name](*values)
    if name in COMPOSED:
        return COMPOSED[name](*values)
    if name == "aten::_unwrap_optional":
        if first is None:
            raise CompileError("an optional value that is None was used as a value")
        return first
    if target is not None:
        kinds = [str(a.real_type) for a in target._schema.arguments]
        if name in NUMBERS and _are_numbers(values, kinds):
            return NUMBERS[name](*map(number, values))
        return _call(target, kinds, values)
    function = python_operator(name, values)
    if function is None:
        raise CompileError("there is no such operator; if a package defines it, import that package")
    return function(*values)


@functools.cache
def dispatched(name: str, overload: str) -> Any:
    """torch's operator; None if TorchScript implements it itself."""
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return None
    space, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def _call(target: Any, kinds: Sequence[str], values: Sequence[Any]) -> Any:
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for spec, kind, value in zip(target._schema.arguments, kinds, values, strict=False):
        value = argument(kind, value)
        if spec.kwarg_only:
            keywords[spec.name] = value
        else:
            positional.append(value)
    return target(*positional, **keywords)


def _are_numbers(values: Sequence[Any], kinds: Sequence[str]) -> bool:
    """Whether the tensors among a trace's operands are numbers (`prim::NumToTensor`) and constants."""
    given = [v for v, kind in zip(values, kinds, strict=False) if kind == "Tensor"]
    if all(isinstance(v, torch.Tensor) for v in given):
        return False
    return all(not isinstance(v, torch.Tensor) or (v.dim() == 0 and type(v) is torch.Tensor) for v in given)


def _is_instance(value: Any, kind: Any) -> bool:
    """Whether a value is an instance of a TorchScript type."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _is_instance(value, kind.getElementType())
    if name in _PYTHON_TYPES:
        return isinstance(value, _PYTHON_TYPES[name])
    if name == "ListType":
        return isinstance(value, list) and all(_is_instance(v, kind.getElementType()) for v in value)
    if name == "TupleType":
        elements = kind.elements()
        return (
            isinstance(value, tuple)
            and len(value) == len(elements)
            and all(_is_instance(v, k) for v, k in zip(value, elements, strict=True))
        )
    raise CompileError(f"isinstance(value, {kind}) cannot be decided at capture")


_PYTHON_TYPES: dict[str, Any] = {
    "TensorType": torch.Tensor,
    "IntType": (int, torch.SymInt),
    "FloatType": (float, torch.SymFloat),
    "BoolType": bool,
    "StringType": str,
    "NoneType": type(None),
    "DictType": dict,
    "AnyType": object,
}


@contextmanager
def _located(node: Node) -> Iterator[None]:
    """A context in which errors get the operator of a node and its location in the model's source."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        raise _at(
            node,
            "the control flow of the model depends on the values of a tensor here, not only on sizes and flags. Rewrite it "
            "with torch.where, or compile the parts before and after it separately",
        ) from error
    except Exception as error:
        if isinstance(error, CompileError) and error.located:
            raise
        raise _at(node, str(error)) from error


def _at(node: Node, message: str) -> CompileError:
    """An error with the location of its node."""
    error = CompileError(f"{_place(node)}: {message}")
    error.located = True
    return error


def _place(node: Node) -> str:
    """`aten::conv2d in model.py, line 12: return conv(x)`."""
    source = node.sourceRange()
    found = re.search(r'File "([^"]*)", line (\d+)', source)
    where = f" in {found[1]}, line {found[2]}" if found else ""
    lines = source.splitlines()
    marked = next((k for k, line in enumerate(lines) if "<--- HERE" in line), 0)
    text = lines[marked - 1].strip() if marked else ""
    return f"{node.kind()}{where}" + (f": `{text}`" if text else "")
