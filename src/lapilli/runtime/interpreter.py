"""Runs scripts that `check.py` has accepted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from lapilli.errors import InvalidInputError, LapilliError, OutOfMemoryError
from lapilli.player import NativeProgram
from lapilli.runtime import arithmetic, host, tensors
from lapilli.runtime.description import Description
from lapilli.runtime.host_script import HostCall, HostScript, Json
from lapilli.runtime.limits import Budget, Limits
from lapilli.runtime.sizes import Tree, evaluate


class HostInterpreter:
    """Runs the scripts of a file. operators: the overloads that scripts call, by name; None if torch is missing."""

    def __init__(
        self,
        native: NativeProgram,
        description: Description,
        operators: Mapping[str, Any] | None,
        limits: Limits | None = None,
        constant: Callable[[int], Any] | None = None,
    ) -> None:
        """constant: returns the constants of the file; by default those of the description."""
        self.native, self.description = native, description
        self.states: dict[str, Any] = {}  # buffers of methods with several segments only
        self.shared = {s.name: k for k, s in enumerate(description.states)}  # the others, by index in the player
        self._operators, self._limits = operators, Limits() if limits is None else limits
        self._read = description.constant if constant is None else constant
        self._constants: dict[int, Any] = {}

    def run(
        self,
        script: HostScript,
        inputs: Sequence[Any],
        budget: Budget | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> list[Any]:
        """Runs a script. Inputs and results are arrays, tensors or numbers. sizes: the symbols that the script is given.

        Raises InvalidInputError if a value does not fit an operation, or a limit is reached.
        """
        inner = budget is not None
        budget = Budget(self._limits) if budget is None else budget
        env = Environment(script, dict(zip(script.inputs, inputs, strict=True)), self._constant, budget, sizes or {})
        for value, (name, first, _) in script.states.items():
            env.values[value] = self._state(name, first)
        for call in script.calls:
            budget.spend()
            results = self._guarded(call, env)
            for name, value in zip(call.outs, results, strict=True):
                env.values[name] = value
        outputs = [env.argument(o) for o in script.outputs]
        if not inner:  # the caller may change constants that it gets
            outputs = [deepcopy(o) if any(o is c for c in self._constants.values()) else o for o in outputs]
        for name, new in [(n, env.argument(new)) for n, _, new in script.states.values() if new is not None]:
            if name in self.shared:
                self.native.write_state(self.shared[name], as_array(new))
            else:
                self.states[name] = new
        return outputs

    def _guarded(self, call: HostCall, env: Environment) -> list[Any]:
        """Runs a call, and converts its exceptions to LapilliErrors."""
        try:
            return self._call(call, env)
        except MemoryError as error:
            raise OutOfMemoryError(f"{_called(call)} needs more memory than there is.") from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, LapilliError):
                raise
            raise InvalidInputError(f"{_called(call)} failed: {error}") from error

    def _state(self, name: str, first: int) -> Any:
        if name in self.shared:
            spec = self.description.states[self.shared[name]]
            return tensors.typed(self.native.read_state(self.shared[name]), spec.dtype)
        return self.states[name] if name in self.states else self._constant(first)

    def _call(self, call: HostCall, env: Environment) -> list[Any]:
        if call.op == "gpu":
            method = self.description.methods[call.method]
            given = env.argument(call.args)
            count = len(method.inputs)
            outputs = self.native.run([as_array(value) for value in given[:count]], call.method, given[count:])
            return [tensors.typed(o, s.dtype) for o, s in zip(outputs, method.outputs, strict=True)]
        if call.op == "number":
            return [arithmetic.number(call.args[0], [_number(a) for a in env.argument(call.args[1:])])]
        if call.op == "item":
            return [_number(env.argument(call.args[0]))]
        if call.op == "getitem":
            return [env.argument(call.args[0])[call.args[1]]]
        if call.op == "cond":
            return self._cond(call, env)
        if call.op == "while":
            return self._while(call, env)
        if call.op == "scan":
            return self._scan(call, env)
        return [self._torch(call, env)]

    def _cond(self, call: HostCall, env: Environment) -> list[Any]:
        chosen = call.scripts[0 if bool(_number(env.argument(call.args[0]))) else 1]
        return self.run(chosen, env.argument(call.args[1]), env.budget)

    def _while(self, call: HostCall, env: Environment) -> list[Any]:
        carried, fixed = env.argument(call.args[0]), env.argument(call.args[1])
        going, body = call.scripts
        while bool(_number(self.run(going, [*carried, *fixed], env.budget)[0])):
            env.budget.spend()
            carried = self.run(body, [*carried, *fixed], env.budget)
        return list(carried)

    def _scan(self, call: HostCall, env: Environment) -> list[Any]:
        """combine(carry, slice of every sequence) -> carry, output of the step; outputs are stacked."""
        carry, sequences, fixed = (env.argument(a) for a in call.args)
        count = len(carry)
        steps: list[list[Any]] = []
        for k in range(len(sequences[0])):
            env.budget.spend()
            results = self.run(call.scripts[0], [*carry, *(s[k] for s in sequences), *fixed], env.budget)
            carry = results[:count]
            steps.append(results[count:])
        return [*carry, *(_stacked(column) for column in zip(*steps, strict=True))]

    def _torch(self, call: HostCall, env: Environment) -> Any:
        torch = torch_module(call.op)
        if self._operators is None:
            raise LapilliError("torch was installed after the program was loaded; load the program again.")
        overload = self._operators[call.op]
        args = _tensors(env.argument(call.args), torch)
        kwargs = {k: _tensors(env.argument(v), torch) for k, v in call.kwargs.items()}
        with torch.no_grad():
            host.check_call(overload, args, kwargs, self._limits.bytes, torch)
            return overload(*args, **kwargs)

    def _constant(self, index: int) -> Any:
        if index not in self._constants:
            self._constants[index] = self._read(index)
        return self._constants[index]


class Environment:
    """Values by name, and sizes by symbol."""

    def __init__(
        self, script: HostScript, values: dict[str, Any], constant: Callable[[int], Any], budget: Budget,
        sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.script, self.values, self.budget, self._constant = script, values, budget, constant
        self._sizes = dict(sizes)

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
        if kind == "complex":
            return complex(*value)
        return tag(kind, value)

    def _value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = self._constant(self.script.constants[name])
        return self.values[name]

    def size(self, tree: Tree) -> int:
        return int(evaluate(tree, self._of_symbol, arithmetic.size))

    def _of_symbol(self, name: str) -> int:
        if name not in self._sizes:
            self._sizes[name] = self._symbol(name)
        return self._sizes[name]

    def _symbol(self, name: str) -> int:
        source = self.script.symbols[name]
        if source[0] == "fixed":
            return int(source[1])
        if source[0] == "value":
            return int(arithmetic.bounded(int(_number(self._value(source[1])))))
        _, value, axis, *trees = source
        factor, offset = map(self.size, trees)
        size = int(self._value(value).shape[axis]) - offset
        if factor <= 0:
            return 0
        if size % factor:
            raise InvalidInputError(
                f"Size {axis} of {value!r} is {size + offset}; it must be a multiple of {factor}{f' plus {offset}' * bool(offset)}."
            )
        return int(size // factor)


def tag(kind: str, name: str) -> Any:
    """A constant of torch that a script may name."""
    if name not in host.TAGS.get(kind, ()):
        raise InvalidInputError(f"A program may not name the {kind} {name!r}.")
    return name if kind == "device" else getattr(torch_module(f"an argument of type {kind}"), name)


def as_array(value: Any) -> Any:
    """A value as a contiguous NumPy array; bfloat16 tensors as their bits."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return (
            tensor.view(torch_module("bfloat16").uint16) if str(tensor.dtype) == "torch.bfloat16" else tensor
        ).numpy()
    return np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)


def _stacked(values: Sequence[Any]) -> Any:
    if any(hasattr(v, "detach") for v in values):
        torch = torch_module("scan")
        return torch.stack(_tensors(list(values), torch))
    return np.stack([as_array(v) for v in values])


def _called(call: HostCall) -> str:
    return f"{call.op}, which runs in torch on the CPU," if "." in call.op else f"A call {call.op!r} on the host"


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _tensors(value: Any, torch: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return tensors.tensor_of(np.ascontiguousarray(value).reshape(np.shape(value)), torch)
    return [_tensors(v, torch) for v in value] if isinstance(value, list | tuple) else value


def torch_module(what: str) -> Any:
    """The module torch. Raises LapilliError if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise LapilliError(
            f"The program runs {what} on the CPU in torch, which is not installed: pip install torch, or compile the model "
            'with fallback="error" and replace what the GPU cannot do.'
        ) from error
