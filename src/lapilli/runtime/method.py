"""A method of a program, such as `forward`, or `prefill` and `decode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.player import NativeRun
from lapilli.runtime import tensors
from lapilli.runtime.binding import Binding
from lapilli.runtime.convention import Convention
from lapilli.runtime.description import TensorSpec
from lapilli.runtime.futures import Future, ScriptRun
from lapilli.runtime.interface import Interface
from lapilli.runtime.loaded import Loaded
from lapilli.runtime.report import Report
from lapilli.runtime.structure import Structure


class Method:
    """A method of a program, called like the function that it was compiled from."""

    def __init__(self, loaded: Loaded, interface: Interface) -> None:
        self.loaded = loaded
        """The program that it is a method of."""
        self.convention = Convention(interface)
        """Converts the arguments and results of a call."""
        self._interface = interface

    @property
    def name(self) -> str:
        """The method's name: a key of `Program.methods`."""
        return self._interface.name

    @property
    def structure(self) -> Structure:
        """How inputs and outputs nest."""
        return self._interface.structure

    @property
    def number(self) -> int | None:
        """Index of the player's method; None: the method runs in several segments."""
        return self._interface.player

    @property
    def single(self) -> int:
        """Index of the player's method.

        Raises:
            InvalidInputError: the method runs in several segments.
        """
        if self._interface.player is None:
            raise InvalidInputError(f"The method {self.name} runs in several segments; this needs a single one.")
        return self._interface.player

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every input tensor, in the order of `run_flat`."""
        return self.convention.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every output tensor."""
        return self.convention.outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `Program.__call__`."""
        convention = self.convention
        if runners:
            given = convention.structure.flatten_call(args, kwargs)
            run = _runner_for(given)
            if run is not None:
                return convention.structure.unflatten_outputs(run(self, given, None))
        leaves, values, torch = convention.leaves(args, kwargs)
        outputs = self.run_values(values)
        convention.update(leaves, outputs, torch)
        return convention.wrap(outputs, torch)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """As `Program.submit`."""
        leaves, values, torch = self.convention.leaves(args, kwargs)
        run: NativeRun | ScriptRun
        if self._interface.script is None:
            try:
                run = self.loaded.native.submit(values, self.single)
            except InvalidInputError as error:
                raise self.convention.told(error) from None
        else:
            copies = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
            run = ScriptRun(lambda: self.run_values(copies))
        future = Future(  # which keeps the program alive, as long as the run may take
            run,
            lambda outputs: self.convention.update(leaves, outputs, torch),
            lambda outputs: self.convention.wrap(outputs, torch),
        )
        self.loaded.futures.add(future)
        return future

    def bind(self, *args: Any, outputs: Any = None, **kwargs: Any) -> Binding:
        """As `Program.bind`."""
        return Binding(self.loaded, self.single, self.convention, args, kwargs, outputs)

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """As `Program.run_flat`."""
        values, _ = self.convention.values(inputs, bits)
        return self.convention.results(self.run_values(values), torch=False, bits=bits)

    def run_tensors(self, inputs: Sequence[Any], sizes: Mapping[str, int] | None = None) -> list[Any]:
        """Runs on a flat list of torch tensors and numbers.

        Args:
            inputs: tensors and numbers in the order of `inputs`, all on one device.
            sizes: values of the symbols that no input determines.

        Returns:
            tensors on the same device and numbers, in the order of `outputs`.
        """
        run = _runner_for(inputs)
        if run is not None:
            return run(self, inputs, sizes)
        values, _ = self.convention.values(inputs)
        return self.convention.results(self.run_values(values, sizes), torch=True)

    def takes(self, device: str, index: int | None) -> bool:
        """Whether it runs on tensors of a torch device, given by type and index, without copying them to the host."""
        return device in runners and index == self.loaded.device.index

    def report(self) -> Report:
        """Where each operator of the method runs, and why if not on the GPU."""
        return self._interface.report()

    def run_values(self, values: list[Any], sizes: Mapping[str, int] | None = None) -> list[Any]:
        """Runs on the values that `convention` makes of a call, and waits for the player's outputs."""
        native = self.loaded.native
        script = self._interface.script
        if script is None:
            given = self.loaded.description.methods[self.single].given
            known = sizes if given and sizes else {}
            try:
                return native.run(values, self.single, [known[name] for name in given if name in known])
            except InvalidInputError as error:
                raise self.convention.told(error) from None
        specs = self._interface.inputs
        given = [tensors.typed(v, s.dtype) if s.dtype != "int" else v for v, s in zip(values, specs, strict=True)]
        return self.loaded.interpreter.run(script, given)


class Methods(dict[str, Method]):
    """The methods of a program by name."""

    def __missing__(self, name: object) -> Method:
        raise KeyError(f"The program has no method {name!r}; it has {', '.join(map(repr, self))}.")


Runner = Callable[["Method", Sequence[Any], "Mapping[str, int] | None"], list[Any]]

runners: dict[str, Runner] = {}
"""Functions that run a method on a flat list of tensors, by the type of the tensors' device. The module that implements the
device registers them."""


def _runner_for(leaves: Sequence[Any]) -> Runner | None:
    """The function that runs a method on these tensors; None: they are on the host."""
    types = (leaf.device.type for leaf in leaves if hasattr(leaf, "device") and hasattr(leaf.device, "type"))
    return next((runners[t] for t in types if t in runners), None)
