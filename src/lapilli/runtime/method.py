"""A method of a program: a function that it offers, such as `forward`, or `prefill` and `decode`.

What the compiler knows beyond the player's own description of a method stands in the metadata: how inputs and outputs nest,
the script of a run that is more than one method of the player, and where the operators run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidFileError, InvalidInputError, RunTimeoutError
from lapilli.player import NativeProgram, NativeRun
from lapilli.runtime import report, tensors
from lapilli.runtime.binding import Binding
from lapilli.runtime.description import Description, Symbol, TensorSpec
from lapilli.runtime.report import Operator, Report
from lapilli.runtime.script import Script, as_array, segments
from lapilli.runtime.structure import Structure

if TYPE_CHECKING:
    from lapilli.runtime.program import Future, Program

METADATA_KEY = "lapilli.methods"
"""Metadata key of a program that holds its interfaces as JSON."""


@dataclass(frozen=True)
class Interface:
    """What the metadata says of a method. player: the player's method that does it all; else `script` says what to do with
    which, and `inputs` and `outputs` what goes in and comes out (the dtype "int" is a number)."""

    name: str
    structure: Structure
    operators: tuple[Operator, ...] = ()
    player: int | None = None
    script: Script | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        node: dict[str, Any] = {"name": self.name, "structure": self.structure.to_json()}
        node["operators"] = report.to_json(self.operators)
        if self.script is None:
            return node | {"player": self.player}
        specs = {k: [asdict(s) for s in getattr(self, k)] for k in ("inputs", "outputs")}
        return node | {"script": self.script.to_json(), **specs}

    def report(self) -> Report:
        """Where its operators run."""
        return Report(("gpu",) if self.script is None else tuple(segments(self.script)), self.operators)

    @staticmethod
    def from_json(node: Any, description: Description) -> Interface:
        """Raises InvalidFileError where the JSON is not an interface of this file."""
        try:
            structure = Structure.from_json(node["structure"])
            operators = report.from_json(node.get("operators", []))
            if "script" not in node:
                method = description.methods[node["player"]]
                structure.check(len(method.inputs), len(method.outputs))
                return Interface(
                    node["name"], structure, operators, node["player"], None, method.inputs, method.outputs
                )
            inputs, outputs = (tuple(_spec(s) for s in node[k]) for k in ("inputs", "outputs"))
            structure.check(len(inputs), len(outputs))
            return Interface(
                node["name"], structure, operators, None, Script.from_json(node["script"]), inputs, outputs
            )
        except (KeyError, TypeError, IndexError) as error:
            raise InvalidFileError("The description of methods in the program's metadata is damaged.") from error


def dumps(interfaces: Sequence[Interface]) -> str:
    """The metadata string."""
    return json.dumps([i.to_json() for i in interfaces], separators=(",", ":"))


def interfaces(description: Description) -> list[Interface]:
    """Of the methods of a file; a file without the metadata has the player's own. Raises InvalidFileError."""
    text = description.metadata.get(METADATA_KEY)
    if text is None:
        return [
            Interface(m.name, Structure.flat(len(m.inputs), len(m.outputs)), (), k, None, m.inputs, m.outputs)
            for k, m in enumerate(description.methods)
        ]
    try:
        nodes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError("The description of methods in the program's metadata is no JSON.") from error
    found = [Interface.from_json(node, description) for node in nodes]
    if not found:
        raise InvalidFileError("The program's metadata describes no method.")
    return found


def _spec(node: Any) -> TensorSpec:
    symbols = tuple(Symbol(**s) for s in node["symbols"])
    return TensorSpec(node["name"], node["dtype"], tuple(node["shape"]), symbols)


class Method:
    """A function of a program, to be called like the model that it was compiled from."""

    def __init__(self, program: Program, interface: Interface) -> None:
        self._program, self._interface = program, interface
        given = interface.structure
        self._inputs = tensors.channels_first(interface.inputs, given.inputs_last)
        self._outputs = tensors.channels_first(interface.outputs, given.outputs_last)

    @property
    def name(self) -> str:
        return self._interface.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every input tensor, in the order of `run_flat`."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every output tensor."""
        return self._outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `Program.__call__`."""
        leaves, values, torch = self._leaves(args, kwargs)
        outputs = self._run(values)
        self.update(leaves, outputs, torch)
        return self.wrap(outputs, torch)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """As `Program.submit`."""
        leaves, values, torch = self._leaves(args, kwargs)
        run: NativeRun | ScriptRun
        if self._interface.script is None:
            run = self._program._open().submit(values, self._player)
        else:
            copies = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
            run = ScriptRun(lambda: self._run(copies))
        return self._program._future(self, run, leaves, torch)

    def bind(self, *args: Any, outputs: Any = None, **kwargs: Any) -> Binding:
        """As `Program.bind`."""
        return Binding(self, args, kwargs, outputs)

    def run_flat(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """As `Program.run_flat`."""
        values, _ = self._values(inputs)
        return self._unwrapped(self._run(values), torch=False)

    def run_tensors(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs on the flat list of inputs and gives the flat list of outputs, as torch tensors and numbers."""
        values, _ = self._values(inputs)
        return self._unwrapped(self._run(values), torch=True)

    def report(self) -> Report:
        """Where its operators run."""
        return self._interface.report()

    def wrap(self, outputs: list[Any], torch: bool) -> Any:
        """The model's output around output values."""
        return self._interface.structure.unflatten_outputs(self._unwrapped(outputs, torch))

    def update(self, leaves: Sequence[Any], outputs: Sequence[Any], torch: bool) -> None:
        """Gives the inputs that the model changes their new values, which are the last outputs."""
        numbers = self._interface.structure.updates
        if numbers:
            new = self._unwrapped(list(outputs), torch)[-len(numbers) :]
            for number, value in zip(numbers, new, strict=True):
                tensors.update(leaves[number], value)

    @property
    def _player(self) -> int:
        """The player's method. Raises InvalidInputError where there is a script instead."""
        if self._interface.player is None:
            raise InvalidInputError(f"The method {self.name} runs in several segments; this needs a single one.")
        return self._interface.player

    def _run(self, values: list[Any]) -> list[Any]:
        native: NativeProgram = self._program._open()
        script = self._interface.script
        return (
            list(native.run(values, self._player)) if script is None else self._program._interpreter.run(script, values)
        )

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any], bool]:
        """The tensors of a call, the values that run, and whether any is torch's."""
        leaves = self._interface.structure.flatten_call(args, kwargs)
        values, torch = self._values(leaves)
        for number in self._interface.structure.updates:
            tensors.check_writable(leaves[number], self.inputs[number])
        return leaves, values, torch

    def _values(self, leaves: Sequence[Any]) -> tuple[list[Any], bool]:
        specs = self._interface.inputs
        if self._interface.structure.inputs_last and len(leaves) == len(specs):
            leaves = tensors.permuted(leaves, self._interface.structure.inputs_last, self.inputs)
        if self._interface.script is None or len(leaves) != len(specs):
            return tensors.to_arrays(leaves, specs)
        values: list[Any] = list(leaves)
        places = [k for k, spec in enumerate(specs) if spec.dtype != "int"]
        arrays, torch = tensors.to_arrays([leaves[k] for k in places], [specs[k] for k in places])
        for k, array in zip(places, arrays, strict=True):
            tensors.check(array, specs[k])
            values[k] = array
        for k, spec in enumerate(specs):
            if spec.dtype == "int" and not isinstance(values[k], int):
                raise InvalidInputError(f"Input {spec.name!r} was given as {type(values[k]).__name__}; give an int.")
        return values, torch

    def _unwrapped(self, outputs: list[Any], torch: bool) -> list[Any]:
        if self._interface.script is None:
            values = tensors.from_arrays(outputs, self.outputs, torch)
        else:
            values = [_converted(value, spec, torch) for value, spec in zip(outputs, self.outputs, strict=True)]
        for k in self._interface.structure.outputs_last:
            values[k] = tensors.transposed(values[k], (0, 3, 1, 2))
        return values


def _converted(value: Any, spec: TensorSpec, torch: bool) -> Any:
    """A value of a script as the caller wants it."""
    if spec.dtype in ("int", "float", "bool") and not hasattr(value, "dtype"):
        return value
    if torch and isinstance(value, sys.modules["torch"].Tensor):
        return value
    return tensors.from_arrays([as_array(value)], [spec], torch)[0]


class ScriptRun:
    """A run of a script in a thread, with the face of a run of the player."""

    def __init__(self, run: Any) -> None:
        executor = futures.ThreadPoolExecutor(1)
        self._future: futures.Future[list[Any]] = executor.submit(run)
        executor.shutdown(wait=False)

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._future.result(timeout)
        except futures.TimeoutError:
            raise RunTimeoutError(f"The run is not finished after {timeout} s; wait longer.") from None

    def outputs(self) -> list[Any]:
        return self._future.result()

    def release(self) -> None:
        """Nothing is held."""
