"""Converts values of a call: the caller's arguments to the program's inputs, and its outputs to the model's results."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lapilli.errors import InvalidInputError
from lapilli.runtime import tensors
from lapilli.runtime.description import TensorSpec
from lapilli.runtime.interface import Interface
from lapilli.runtime.interpreter import as_array


class Convention:
    """How one method is called.

    Attributes:
        inputs, outputs: name, dtype and shape of every tensor, as the model has them (images: channels first). An input that is
            an argument has the argument's name; in the file it has the name that torch.export gave it.
        structure: how they nest.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface, self.structure = interface, interface.structure
        names = self.structure.argument_names()
        self._specs = tuple(replace(s, name=names.get(k, s.name)) for k, s in enumerate(interface.inputs))
        self.inputs = tensors.channels_first(self._specs, self.structure.inputs_last)
        self.outputs = tensors.channels_first(interface.outputs, self.structure.outputs_last)

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any], bool]:
        """The tensors of a call, the values to run with, and whether any tensor is torch's. Raises InvalidInputError."""
        leaves = self.structure.flatten_call(args, kwargs)
        values, torch = self.values(leaves)
        for number in self.structure.updates:
            tensors.check_writable(leaves[number], self.inputs[number])
            for k, leaf in enumerate(leaves):
                if k != number and tensors.share_memory(leaves[number], leaf):
                    raise InvalidInputError(
                        f"The model changes its input {self.inputs[number]}, which shares memory with what was given as "
                        f"{self.inputs[k].name!r}; the program was compiled for inputs that do not. Give a copy of one."
                    )
        return leaves, values, torch

    def values(self, leaves: Sequence[Any], bits: bool = False) -> tuple[list[Any], bool]:
        """The values to run with, given the flat list of inputs, and whether any tensor is torch's. bits: bfloat16 as
        uint16.

        Raises InvalidInputError if one does not fit.
        """
        specs = self._specs
        if self.structure.inputs_last and len(leaves) == len(specs):
            leaves = tensors.permuted(leaves, self.structure.inputs_last, self.inputs)
        if self.interface.script is None or len(leaves) != len(specs):
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

    def told(self, error: InvalidInputError) -> InvalidInputError:
        """What the player refused, with the input's name here: it knows the number, and the name in the file."""
        found = re.match(r'Input (\d+) \(".*?"\) ', str(error))
        if found is None:
            return error
        return InvalidInputError(f"Input {self.inputs[int(found[1])].name!r} {str(error)[found.end() :]}")

    def results(self, outputs: list[Any], torch: bool, bits: bool = False) -> list[Any]:
        """The flat list of outputs, as torch tensors or NumPy arrays."""
        if self.interface.script is None:
            values = tensors.from_arrays(outputs, self.outputs, torch, bits)
        else:
            values = [_converted(value, spec, torch, bits) for value, spec in zip(outputs, self.outputs, strict=True)]
        for k in self.structure.outputs_last:
            values[k] = tensors.transposed(values[k], (0, 3, 1, 2))
        return values

    def wrap(self, outputs: list[Any], torch: bool) -> Any:
        """The model's result, made of output values."""
        return self.structure.unflatten_outputs(self.results(outputs, torch))

    def update(self, leaves: Sequence[Any], outputs: Sequence[Any], torch: bool) -> None:
        """Writes the new values of inputs that the model changes, which are the last outputs."""
        numbers = self.structure.updates
        if numbers:
            new = self.results(list(outputs), torch)[-len(numbers) :]
            for number, value in zip(numbers, new, strict=True):
                tensors.update(leaves[number], value, self.inputs[number])


def _converted(value: Any, spec: TensorSpec, torch: bool, bits: bool) -> Any:
    """A value of a script in the form that the caller wants."""
    if spec.dtype in ("int", "float", "bool") and not hasattr(value, "dtype"):
        return value
    if torch and isinstance(value, sys.modules["torch"].Tensor):
        return value
    return tensors.from_arrays([as_array(value)], [spec], torch, bits)[0]
