"""A method of a program: a function that it offers, such as `forward`, or `prefill` and `decode`.

What the compiler knows beyond the player's own description of a method stands in the metadata: how inputs and outputs nest,
the script of a run that is more than one method of the player, and where the operators run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidFileError, InvalidInputError, RunTimeoutError
from lapilli.player import NativeProgram, NativeRun
from lapilli.runtime import host, limits, report, tensors
from lapilli.runtime.binding import Binding
from lapilli.runtime.description import Description, Symbol, TensorSpec
from lapilli.runtime.interpreter import as_array
from lapilli.runtime.report import Operator, Report
from lapilli.runtime.script import Script, segments
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
            name, player = node["name"], node.get("player")
            structure = Structure.from_json(node["structure"])
            operators = report.from_json(node.get("operators", []))
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
                raise TypeError(f"{str(name)[:80]!r} is no name of a method")
            if "script" in node:
                script = Script.from_json(node["script"])
                inputs, outputs = (_specs(node[k]) for k in ("inputs", "outputs"))
            else:
                script = None
                if type(player) is not int or not 0 <= player < len(description.methods):
                    raise TypeError(f"there is no method {player!r}")
                inputs, outputs = description.methods[player].inputs, description.methods[player].outputs
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidFileError(
                f"The description of methods in the program's metadata is damaged: {error}."
            ) from error
        structure.check(len(inputs), len(outputs))
        images = [inputs[k] for k in structure.inputs_last] + [outputs[k] for k in structure.outputs_last]
        if any(len(spec.shape) != 4 for spec in images):
            raise InvalidFileError(
                "The description of methods in the program's metadata is damaged: an image has four axes."
            )
        return Interface(name, structure, operators, None if script else player, script, inputs, outputs)


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
    nodes = limits.load_json(text, "The description of methods in the program's metadata")
    if not isinstance(nodes, list) or not 0 < len(nodes) <= _MOST_METHODS:
        raise InvalidFileError("The program's metadata describes no method, or too many.")
    found = [Interface.from_json(node, description) for node in nodes]
    if len({i.name for i in found}) != len(found):
        raise InvalidFileError("The program's metadata describes two methods of one name.")
    return found


_LONGEST_NAME = 4096
_MOST_METHODS = 4096
_SIZE_FIELDS = {"name": (str,), "min": (int,), "max": (int, type(None)), "input": (int,), "axis": (int,), "factor": (int,),
                "offset": (int,), "given": (bool,)}  # fmt: skip
_DTYPES = (*host.DTYPES, "int", "float")


def _specs(nodes: Any) -> tuple[TensorSpec, ...]:
    """Raises TypeError or KeyError where the JSON is no list of tensors."""
    if not isinstance(nodes, list):
        raise TypeError(f"{str(nodes)[:80]!r} is no list of tensors")
    return tuple(map(_spec, nodes))


def _spec(node: Any) -> TensorSpec:
    name, dtype, shape = node["name"], node["dtype"], node["shape"]
    sizes = isinstance(shape, list) and len(shape) <= 64 and all(type(size) in (int, str) for size in shape)
    if (
        not isinstance(name, str)
        or dtype not in _DTYPES
        or not sizes
        or node.keys() - {"name", "dtype", "shape", "symbols"}
    ):
        raise TypeError(f"{str(node)[:80]!r} is no tensor")
    symbols = []
    for given in node["symbols"]:
        if given.keys() - _SIZE_FIELDS.keys() or any(type(given[k]) not in _SIZE_FIELDS[k] for k in given):
            raise TypeError(f"{str(given)[:80]!r} is no size")
        symbols.append(Symbol(**given))
    return TensorSpec(name, dtype, tuple(shape), tuple(symbols))


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
    def program(self) -> Program:
        """What it is a method of."""
        return self._program

    @property
    def structure(self) -> Structure:
        """How inputs and outputs nest."""
        return self._interface.structure

    @property
    def number(self) -> int | None:
        """The player's method that does it all; None: it is computed in several segments."""
        return self._interface.player

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
        if elsewhere:
            given = self._interface.structure.flatten_call(args, kwargs)
            run = _place_of(given)
            if run is not None:
                return self._interface.structure.unflatten_outputs(run(self, given, None))
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

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """As `Program.run_flat`."""
        values, _ = self._values(inputs, bits)
        return self._unwrapped(self._run(values), torch=False, bits=bits)

    def run_tensors(self, inputs: Sequence[Any], sizes: Mapping[str, int] | None = None) -> list[Any]:
        """Runs on the flat list of inputs and gives the flat list of outputs, as torch tensors and numbers, where the inputs
        are. sizes: values of symbols, for a method that is given some."""
        run = _place_of(inputs)
        if run is not None:
            return run(self, inputs, sizes)
        values, _ = self._values(inputs)
        return self._unwrapped(self._run(values, sizes), torch=True)

    def takes(self, device: str, index: int | None) -> bool:
        """Whether it runs on tensors of a device of torch, by its type and index, without copying them to the host."""
        return device in elsewhere and index == self._program.device.index

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
                tensors.update(leaves[number], value, self.inputs[number])

    @property
    def _player(self) -> int:
        """The player's method. Raises InvalidInputError where there is a script instead."""
        if self._interface.player is None:
            raise InvalidInputError(f"The method {self.name} runs in several segments; this needs a single one.")
        return self._interface.player

    def _run(self, values: list[Any], sizes: Mapping[str, int] | None = None) -> list[Any]:
        native: NativeProgram = self._program._open()
        script = self._interface.script
        if script is None:
            given = self._program.description.methods[self._player].given
            known = sizes if given and sizes else {}
            return native.run(values, self._player, [known[name] for name in given if name in known])
        specs = self._interface.inputs
        given = [tensors.typed(v, s.dtype) if s.dtype != "int" else v for v, s in zip(values, specs, strict=True)]
        return self._program._interpreter.run(script, given)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any], bool]:
        """The tensors of a call, the values that run, and whether any is torch's."""
        leaves = self._interface.structure.flatten_call(args, kwargs)
        values, torch = self._values(leaves)
        for number in self._interface.structure.updates:
            tensors.check_writable(leaves[number], self.inputs[number])
            for k, leaf in enumerate(leaves):
                if k != number and tensors.share_memory(leaves[number], leaf):
                    raise InvalidInputError(
                        f"The model changes its input {self.inputs[number]}, which shares memory with what was given as "
                        f"{self.inputs[k].name!r}; the program was compiled for inputs that do not. Give a copy of one."
                    )
        return leaves, values, torch

    def _values(self, leaves: Sequence[Any], bits: bool = False) -> tuple[list[Any], bool]:
        specs = self._interface.inputs
        if self._interface.structure.inputs_last and len(leaves) == len(specs):
            leaves = tensors.permuted(leaves, self._interface.structure.inputs_last, self.inputs)
        if self._interface.script is None or len(leaves) != len(specs):
            return tensors.to_arrays(leaves, specs, bits)
        values: list[Any] = list(leaves)
        places = [k for k, spec in enumerate(specs) if spec.dtype != "int"]
        arrays, torch = tensors.to_arrays([leaves[k] for k in places], [specs[k] for k in places], bits)
        for k, array in zip(places, arrays, strict=True):
            tensors.check(array, specs[k])
            values[k] = array
        for k, spec in enumerate(specs):
            if spec.dtype == "int" and not isinstance(values[k], int):
                raise InvalidInputError(f"Input {spec.name!r} was given as {type(values[k]).__name__}; give an int.")
        return values, torch

    def _unwrapped(self, outputs: list[Any], torch: bool, bits: bool = False) -> list[Any]:
        if self._interface.script is None:
            values = tensors.from_arrays(outputs, self.outputs, torch, bits)
        else:
            values = [_converted(value, spec, torch, bits) for value, spec in zip(outputs, self.outputs, strict=True)]
        for k in self._interface.structure.outputs_last:
            values[k] = tensors.transposed(values[k], (0, 3, 1, 2))
        return values


Elsewhere = Callable[["Method", Sequence[Any], "Mapping[str, int] | None"], list[Any]]

elsewhere: dict[str, Elsewhere] = {}
"""What runs a method on a flat list of tensors that are on a device of torch, by the type of that device. Whoever makes such
tensors adds it."""


def _place_of(leaves: Sequence[Any]) -> Elsewhere | None:
    """What runs a method on these, where it is not the player with tensors of the host."""
    types = (leaf.device.type for leaf in leaves if hasattr(leaf, "device") and hasattr(leaf.device, "type"))
    return next((elsewhere[t] for t in types if t in elsewhere), None)


def _converted(value: Any, spec: TensorSpec, torch: bool, bits: bool) -> Any:
    """A value of a script as the caller wants it."""
    if spec.dtype in ("int", "float", "bool") and not hasattr(value, "dtype"):
        return value
    if torch and isinstance(value, sys.modules["torch"].Tensor):
        return value
    return tensors.from_arrays([as_array(value)], [spec], torch, bits)[0]


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
