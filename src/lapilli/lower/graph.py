"""From an exported FX graph to the kernel IR: every node by its registered lowering."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from lapilli.errors import UnsupportedOperatorError
from lapilli.graph.module import Module
from lapilli.ir.dtype import DType
from lapilli.ir.expr import cast_to, load
from lapilli.ir.integer import Int, as_int, maximum, minimum, symbol
from lapilli.ir.node import Constant, Graph, Input, Map, Node
from lapilli.lower.registry import Call, fresh_axes, from_torch, lowerings


class Symbols:
    """torch's size symbols as ours, made on demand with torch's bounds."""

    def __init__(self, ranges: Mapping[sympy.Symbol, Any]) -> None:
        self.ranges = ranges
        self.known: dict[str, Int] = {}

    def size(self, value: int | torch.SymInt | sympy.Expr) -> Int:
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, int | sympy.Integer):
            return as_int(int(value))
        return self._expr(value)

    def _expr(self, e: Any) -> Int:
        if isinstance(e, int | sympy.Integer):
            return as_int(int(e))
        if isinstance(e, sympy.Symbol):
            return self._symbol(e)
        args = [self._expr(a) for a in e.args]
        if isinstance(e, sympy.Add):
            return sum(args[1:], args[0])
        if isinstance(e, sympy.Mul):
            result = args[0]
            for a in args[1:]:
                result = result * a
            return result
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and e.exp > 0:
            result = args[0]
            for _ in range(int(e.exp) - 1):
                result = result * args[0]
            return result
        kind = type(e).__name__
        binary: dict[str, Callable[[Int, Int], Int]] = {
            "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
            "PythonMod": lambda a, b: a % b, "Min": minimum, "Max": maximum,
        }  # fmt: skip
        if kind in binary:
            result = args[0]
            for a in args[1:]:
                result = binary[kind](result, a)
            return result
        raise TypeError(f"sizes of the form {e} ({kind}) are not supported")

    def _symbol(self, s: sympy.Symbol) -> Int:
        if s.name not in self.known:
            bounds = self.ranges.get(s)
            lo, hi = 0, None
            if bounds is not None:
                lo = int(bounds.lower) if bounds.lower.is_Integer else 0
                hi = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**40 else None
            self.known[s.name] = symbol(s.name, lo, hi)
        return self.known[s.name]


def lower(module: Module, precision: str = "fp32", half_storage: bool = True) -> Graph:
    """The kernel IR of an exported module.

    precision: "fp16" keeps constants of two or more dimensions in half precision, and, with half_storage, intermediates too.
    Raises UnsupportedOperatorError naming every operator that has no lowering."""
    half_constants = precision == "fp16"
    half = half_constants and half_storage
    missing = sorted({str(n.target) for n in module.graph.nodes if _needs_lowering(n) and n.target not in lowerings})
    if missing:
        raise UnsupportedOperatorError(
            f"{len(missing)} operator(s) of this model have no GPU lowering yet: {', '.join(missing)}. "
            "Replace them in the model, or cut the model before them."
        )
    symbols = Symbols(module.ranges)
    values: dict[fx.Node, Any] = {}
    inputs: list[Input] = []
    outputs: list[Node] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(module, node, symbols, half_constants, inputs)
        elif node.op == "call_function":
            values[node] = _call(node, values, symbols, half)
        elif node.op == "output":
            outputs = [_as_output(values, arg) for arg in module.outputs]
    return Graph(inputs, outputs, symbols.known)


def _needs_lowering(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and not _is_size(node.meta.get("val"))


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.is_contiguous() and value.storage_offset() == 0)


def _placeholder(module: Module, node: fx.Node, symbols: Symbols, half: bool, inputs: list[Input]) -> Any:
    constant = module.constants.get(node)
    if constant is not None:
        dtype = from_torch(constant.dtype)
        if dtype is DType.float64:
            raise TypeError(
                f"{node.name} is float64, which is not supported on the GPU; convert the model with .float()"
            )
        rounded = half and dtype is DType.float32 and constant.dim() > 1
        shape = tuple(as_int(s) for s in constant.shape)
        kept = DType.float16 if rounded else dtype
        return Constant(shape, kept, node.name, "constant", value=module.array(node, rounded))
    val = node.meta["val"]
    if isinstance(val, torch.SymInt):
        raise TypeError(
            f"input {node.name} is a number that varies between calls; pass it as a tensor, or fix its value"
        )
    if not isinstance(val, torch.Tensor):
        return val
    dtype = from_torch(val.dtype)
    made = Input(tuple(symbols.size(s) for s in val.shape), dtype, node.name, "input", index=len(inputs))
    inputs.append(made)
    return made


def _call(node: fx.Node, values: Mapping[fx.Node, Any], symbols: Symbols, half: bool) -> Any:
    val = node.meta.get("val")
    if _is_size(val):
        return symbols.size(val) if isinstance(val, int | torch.SymInt) and not isinstance(val, bool) else val
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]

    def value(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return values[a]
        if isinstance(a, list | tuple):
            return [value(x) for x in a]
        return symbols.size(a) if isinstance(a, torch.SymInt) else a

    results = [v for v in (val if isinstance(val, list | tuple) else [val]) if isinstance(v, torch.Tensor)]
    call = Call(
        node.name,
        str(node.target),
        tuple(tuple(symbols.size(s) for s in r.shape) for r in results),
        tuple(from_torch(r.dtype) for r in results),
        half,
        "as_strided" not in str(node.target) or all(_is_dense(n.meta.get("val")) for n in node.all_input_nodes),
    )
    target: Any = node.target
    made = lowerings[target](call, *value(node.args), **{k: value(v) for k, v in node.kwargs.items()})
    return made


def _as_output(values: Mapping[fx.Node, Any], arg: fx.Node) -> Node:
    """Outputs have torch's own type and are dense: a Map of their own unless the value is made so already."""
    node = values[arg]
    dtype = from_torch(arg.meta["val"].dtype)
    axes, at = fresh_axes(node.shape)
    body = cast_to(load(node, at), dtype.compute)
    return Map(node.shape, dtype, f"{node.name}_out", "output", axes=axes, body=body)
