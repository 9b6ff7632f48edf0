"""What the host does in a run that is more than one method of the player: segments on the GPU, operators on the CPU, control flow.

A `Script` is a list of calls over named values, kept as JSON in the program's metadata. GPU segments are methods of the
program file; operators that have no GPU kernel are called in torch, by name. Arguments are JSON with a few tagged forms:

    {"v": NAME}         a value made before            {"size": TREE}   an integer computed from sizes
    {"carrier": TREE}   an array of shape [size, 0], by which a segment learns the size
    {"complex": [1, 2]} {"dtype": "int64"}  {"layout": "strided"}  {"memory_format": "channels_last"}  {"device": "cpu"}

A TREE is a number, the name of a symbol, or [operator, TREE, TREE]."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lapilli.errors import InvalidFileError, InvalidInputError, LapilliError
from lapilli.player import NativeProgram
from lapilli.runtime import tensors
from lapilli.runtime.description import Description

Json = Any
Tree = int | str | list[Any]

_SIZES: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min, "max": max,
}  # fmt: skip
NUMBERS: dict[str, Callable[..., Any]] = {
    **{f: getattr(operator, f) for f in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_",
    )},
    **{f: getattr(math, f) for f in ("ceil", "floor", "trunc", "sqrt")},
    "sym_float": float, "sym_int": int, "sym_not": operator.not_, "sym_max": max, "sym_min": min, "round": round,
}  # fmt: skip
"""Functions of numbers that a model computes on the host, by name."""


@dataclass
class Call:
    """op: "gpu" (a method of the file), "number" (one of NUMBERS), "item", "cond", "while", "scan", or an operator overload
    of torch ("aten.nonzero.default"). outs: names of what it gives (one name for a torch operator, which may be a list)."""

    op: str
    args: list[Json]
    outs: list[str]
    kwargs: dict[str, Json] = field(default_factory=dict)
    method: int = -1
    scripts: list[Script] = field(default_factory=list)


@dataclass
class Script:
    """inputs, outputs: values by name (an output may be any argument form); constants: name -> index in the file;
    symbols: name -> where it is read, as ["dim", value, axis, factor, offset] or ["value", name]; states: what is kept from
    run to run, value -> [its name in the model, index of its first value in the file (-1: the player has it), argument form of
    its new one (None: it does not change here)]."""

    inputs: list[str]
    outputs: list[Json]
    calls: list[Call] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, list[Any]] = field(default_factory=dict)
    states: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> Json:
        return asdict(self)

    @staticmethod
    def from_json(node: Json) -> Script:
        """Raises InvalidFileError where the JSON is not a script."""
        try:
            calls = [Call(**{**c, "scripts": [Script.from_json(s) for s in c["scripts"]]}) for c in node["calls"]]
            return Script(node["inputs"], node["outputs"], calls, node["constants"], node["symbols"], node["states"])
        except (KeyError, TypeError) as error:
            raise InvalidFileError("The script in the program's metadata is damaged.") from error

    def operators(self) -> list[str]:
        """Operators of torch that it calls, sub-scripts included, each once."""
        found: dict[str, None] = {}
        for call in self.calls:
            if "." in call.op:
                found[call.op] = None
            for inner in call.scripts:
                found.update(dict.fromkeys(inner.operators()))
        return list(found)


class Interpreter:
    """Runs scripts."""

    def __init__(self, native: NativeProgram, description: Description) -> None:
        self.native, self.description = native, description
        self.states: dict[str, Any] = {}  # buffers that only methods of several segments have
        self.shared = {s.name: k for k, s in enumerate(description.states)}  # the others, by number in the player
        self._overloads: dict[str, Any] = {}
        self._constants: dict[int, Any] = {}

    def run(self, script: Script, inputs: Sequence[Any]) -> list[Any]:
        """inputs and results: arrays, tensors or numbers."""
        env = _Environment(script, dict(zip(script.inputs, inputs, strict=True)), self._constant)
        for value, (name, first, _) in script.states.items():
            env.values[value] = self._state(name, first)
        for call in script.calls:
            for name, value in zip(call.outs, self._call(call, env), strict=True):
                env.values[name] = value
        outputs = [env.argument(o) for o in script.outputs]
        for name, new in [(n, env.argument(new)) for n, _, new in script.states.values() if new is not None]:
            if name in self.shared:
                self.native.write_state(self.shared[name], as_array(new))
            else:
                self.states[name] = new
        return outputs

    def _state(self, name: str, first: int) -> Any:
        if name in self.shared:
            spec = self.description.states[self.shared[name]]
            values = [self.native.read_state(self.shared[name])]
            return tensors.from_arrays(values, [spec], spec.dtype == "bfloat16")[0]
        return self.states[name] if name in self.states else self._constant(first)

    def _call(self, call: Call, env: _Environment) -> list[Any]:
        if call.op == "gpu":
            outputs = self.native.run([as_array(env.argument(a)) for a in call.args], call.method)
            specs = self.description.methods[call.method].outputs
            return tensors.from_arrays(outputs, specs, any(s.dtype == "bfloat16" for s in specs))
        if call.op == "number":
            return [NUMBERS[call.args[0]](*env.argument(call.args[1:]))]
        if call.op == "item":
            return [np.asarray(as_array(env.argument(call.args[0]))).item()]
        if call.op in ("cond", "while", "scan"):
            return getattr(self, f"_{call.op}")(call, env)  # type: ignore[no-any-return]
        return [self._torch(call, env)]

    def _cond(self, call: Call, env: _Environment) -> list[Any]:
        chosen = call.scripts[0 if bool(_number(env.argument(call.args[0]))) else 1]
        return self.run(chosen, env.argument(call.args[1]))

    def _while(self, call: Call, env: _Environment) -> list[Any]:
        carried, fixed = env.argument(call.args[0]), env.argument(call.args[1])
        going, body = call.scripts
        while bool(_number(self.run(going, [*carried, *fixed])[0])):
            carried = self.run(body, [*carried, *fixed])
        return list(carried)

    def _scan(self, call: Call, env: _Environment) -> list[Any]:
        """combine(carry, slice of every sequence) -> carry, output of the step; outputs are stacked."""
        carry, sequences, fixed = (env.argument(a) for a in call.args)
        count = len(carry)
        arrays = [as_array(s) for s in sequences]
        steps: list[list[Any]] = []
        for k in range(len(arrays[0])):
            results = self.run(call.scripts[0], [*carry, *(a[k] for a in arrays), *fixed])
            carry = results[:count]
            steps.append([as_array(r) for r in results[count:]])
        return [*carry, *(np.stack(column) for column in zip(*steps, strict=True))]

    def _torch(self, call: Call, env: _Environment) -> Any:
        if call.op == "getitem":
            return env.argument(call.args[0])[call.args[1]]
        torch = _torch_module(call.op)
        args = _tensors(env.argument(call.args), torch)
        kwargs = {k: _tensors(env.argument(v), torch) for k, v in call.kwargs.items()}
        try:
            with torch.no_grad():
                return self._overload(call.op, torch)(*args, **kwargs)
        except RuntimeError as error:
            raise InvalidInputError(f"{call.op}, which runs in torch on the CPU, failed: {error}") from error

    def _constant(self, index: int) -> Any:
        if index not in self._constants:
            self._constants[index] = self.description.constant(index)
        return self._constants[index]

    def _overload(self, name: str, torch: Any) -> Any:
        if name not in self._overloads:
            found: Any = torch.ops
            for part in name.split("."):
                found = getattr(found, part, None)
                if found is None:
                    raise LapilliError(
                        f"The program calls {name}, which this torch {torch.__version__} does not have; import the package "
                        "that brings it first."
                    )
            self._overloads[name] = found
        return self._overloads[name]


class _Environment:
    """Values by name, and sizes by symbol."""

    def __init__(self, script: Script, values: dict[str, Any], constant: Callable[[int], Any]) -> None:
        self.script, self.values, self._constant = script, values, constant
        self._sizes: dict[str, int] = {}

    def argument(self, node: Json) -> Any:
        if isinstance(node, list):
            return [self.argument(a) for a in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "v":
            return self._value(value)
        if kind == "size":
            return self.size(value)
        if kind == "carrier":
            return np.empty((self.size(value), 0), np.uint8)
        if kind == "device":
            return value
        if kind == "complex":
            return complex(*value)
        return getattr(_torch_module(f"an argument of type {kind}"), value)

    def _value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = self._constant(self.script.constants[name])
        return self.values[name]

    def size(self, tree: Tree) -> int:
        if isinstance(tree, int):
            return tree
        if isinstance(tree, str):
            if tree not in self._sizes:
                self._sizes[tree] = self._symbol(tree)
            return self._sizes[tree]
        return _SIZES[tree[0]](self.size(tree[1]), self.size(tree[2]))

    def _symbol(self, name: str) -> int:
        source = self.script.symbols[name]
        if source[0] == "value":
            return int(self._value(source[1]))
        _, value, axis, factor, offset = source
        size = int(self._value(value).shape[axis]) - offset
        if size % factor:
            raise InvalidInputError(
                f"Size {axis} of {value!r} is {size + offset}; it must be a multiple of {factor}{f' plus {offset}' * bool(offset)}."
            )
        return int(size // factor)


def as_array(value: Any) -> Any:
    """A value as a contiguous NumPy array; bfloat16 tensors as their bits."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu().resolve_neg().contiguous()
        return (
            tensor.view(_torch_module("bfloat16").uint16) if str(tensor.dtype) == "torch.bfloat16" else tensor
        ).numpy()
    return np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _tensors(value: Any, torch: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))
    return [_tensors(v, torch) for v in value] if isinstance(value, list) else value


def _torch_module(what: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise LapilliError(
            f"The program runs {what} on the CPU in torch, which is not installed: pip install torch, or compile the model "
            'with fallback="error" and replace what the GPU cannot do.'
        ) from error


def segments(script: Script) -> list[str]:
    """What a run does: "gpu", "cpu" (neighbouring operators count once), "cond(gpu | gpu)" and so on."""
    found: list[str] = []
    for call in script.calls:
        kind = "cpu" if "." in call.op else call.op
        if kind in ("number", "item", "getitem") or (kind == "cpu" and found[-1:] == ["cpu"]):
            continue
        inner = " | ".join(" → ".join(segments(s)) or "nothing" for s in call.scripts)
        found.append(f"{kind}({inner})" if call.scripts else kind)
    return found
