"""The table of ONNX operators, and what a rule for one is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.capture.onnx.onnx_graph import DTYPES, OnnxGraph, OnnxNode, kind_of
from lapilli.capture.onnx.onnx_values import ConstantTensor, Numbers, numbers
from lapilli.errors import CompileError

Rule = Callable[..., Any]
OPERATORS: dict[tuple[str, str], Rule] = {}
"""Rules by domain and name. A rule is called with a `Call` and the node's inputs as tensors (None: left out), and returns the
output, or a tuple of the outputs."""
SYMBOLIC: dict[str, Rule] = {}
"""Rules of the default domain for numbers that may be symbols. They get arrays and return one, or None if they do not apply."""

MICROSOFT = "com.microsoft"


def operator(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Enters a rule for operators."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = rule
        return rule

    return enter


def symbolic(*names: str) -> Callable[[Rule], Rule]:
    """Enters a rule for arithmetic with numbers that may be symbols."""

    def enter(rule: Rule) -> Rule:
        SYMBOLIC.update(dict.fromkeys(names, rule))
        return rule

    return enter


class OnnxCall:
    """A node and the values of its inputs. interpreter: the `OnnxInterpreter` that runs it."""

    def __init__(self, node: OnnxNode, values: Sequence[Any], interpreter: Any) -> None:
        self.node, self.values, self.interpreter = node, values, interpreter
        self.version = node.version

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return self.node.attributes.get(name, default)

    def graph(self, name: str) -> OnnxGraph:
        value = self.node.attributes.get(name)
        if not isinstance(value, OnnxGraph):
            raise CompileError(f"it has no graph {name}")
        return value

    def value(self, index: int) -> Any:
        """An input as it is; None if it is left out."""
        return self.values[index] if index < len(self.values) else None

    def has(self, index: int) -> bool:
        return self.value(index) is not None

    def wants(self, index: int) -> bool:
        """Whether the output is read."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def kind(self, index: int) -> int:
        """The element type of an input."""
        kinds, name = self.interpreter.kinds, self.node.inputs[index]
        return kinds[name] if name in kinds else kind_of(self.value(index).dtype)

    def result(self, index: int = 0) -> int | None:
        """The element type of an output, if it is one that is computed in a wider dtype."""
        return self.interpreter.kinds.get(self.node.outputs[index])

    def numbers(self, index: int) -> list[Any] | None:
        """The elements of an input as a list of numbers, which may be symbols; None if it is left out.

        Elements that are computed are read when the program runs, as torch's `item` does.
        """
        value = self.value(index)
        if value is None:
            return None
        if isinstance(value, ConstantTensor | Numbers):
            return list(numbers(value).array.reshape(-1))
        tensor = value.reshape(-1)
        if not isinstance(tensor.shape[0], int):
            raise CompileError(f"the number of elements of its input {self.node.inputs[index]} is not known")
        return [tensor[k].item() for k in range(tensor.shape[0])]

    def number(self, index: int, default: Any = None) -> Any:
        """The only element of an input, which may be a symbol."""
        found = self.numbers(index)
        if not found:
            return default
        return found[0]

    def dtype(self, kind: int) -> torch.dtype:
        """The dtype in which an element type is computed."""
        if kind not in DTYPES:
            raise CompileError(f"element type {kind} is not supported")
        return DTYPES[kind]


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the beginning. Raises CompileError if there is no such axis."""
    if not -rank <= axis < max(rank, 1):
        raise CompileError(f"it has no axis {axis}: its rank is {rank}")
    return axis + rank if axis < 0 else axis
