"""Input and output tensors bound to a method once and reused by every run, which allocates nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lapilli.errors import InvalidInputError
from lapilli.player import NativeBinding
from lapilli.runtime import tensors
from lapilli.runtime.convention import Convention
from lapilli.runtime.description import TensorSpec
from lapilli.runtime.loaded import Loaded


class Binding:
    """A method bound to the caller's tensors by `Program.bind`: change the inputs, call it, read the outputs.

    Any thread may call it, one at a time. Other runs of the program may be in flight.
    """

    def __init__(
        self,
        loaded: Loaded,
        player: int,
        convention: Convention,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Any,
    ) -> None:
        """Binds the tensors; use `Program.bind`.

        Args:
            loaded: the program.
            player: index of the player's method.
            convention: converts arguments and results.
            args: as for `Program.bind`.
            kwargs: as for `Program.bind`.
            outputs: as for `Program.bind`.

        Raises:
            InvalidInputError: a tensor does not fit, or cannot be used without a copy.
        """
        self._inputs, arrays, torch = convention.leaves(args, kwargs)
        for leaf, array, spec in zip(self._inputs, arrays, convention.inputs, strict=True):
            if not array.flags.c_contiguous or (array.nbytes and _address(leaf) != array.ctypes.data):
                raise InvalidInputError(
                    f"Input {spec} cannot be bound: its memory is not laid out as the program reads it. Give a contiguous tensor "
                    f"(tensor.contiguous()), or compile with an example in the memory format that you bind."
                )
        native = loaded.native
        described = loaded.description.methods[player]
        try:
            shapes = native.shapes(player, native.symbols(arrays, len(described.symbols), player))
        except InvalidInputError as error:
            raise convention.told(error) from None
        made = [
            np.empty(s, "uint16" if o.dtype == "bfloat16" else o.dtype)
            for s, o in zip(shapes, described.outputs, strict=True)
        ]
        self._convention, self._updates = convention, convention.structure.updates
        shown = convention.results(list(made), torch)
        kept = len(shown) - len(self._updates)
        if outputs is not None:
            made[:kept] = self._given(outputs, convention.outputs[:kept], made[:kept])
            shown = convention.results(list(made), torch)
        self._made = made
        self._new = shown[kept:]
        self.outputs: Any = convention.structure.unflatten_outputs(shown) if outputs is None else outputs
        self._native = NativeBinding(native, player, arrays, made)
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        """Runs on the current values of the inputs, waits, and returns `outputs`: the same tensors with new values."""
        with self._lock:
            try:
                self._native.run()
            except InvalidInputError as error:
                raise self._convention.told(error) from None
            for number, value in zip(self._updates, self._new, strict=True):
                tensors.update(self._inputs[number], value, self._convention.inputs[number])
        return self.outputs

    def _given(self, outputs: Any, specs: Sequence[TensorSpec], like: Sequence[Any]) -> list[Any]:
        """Arrays that share the memory of the caller's outputs. Raises InvalidInputError where one does not fit."""
        leaves = self._convention.structure.flatten_outputs(outputs)
        for k in self._convention.structure.outputs_last:
            if len(getattr(leaves[k], "shape", ())) == 4:
                leaves[k] = tensors.transposed(leaves[k], (0, 2, 3, 1))
        arrays, _ = tensors.to_arrays(leaves, specs)
        for leaf, array, spec, made in zip(leaves, arrays, specs, like, strict=True):
            if array.shape != made.shape or array.dtype != made.dtype or _address(leaf) != array.ctypes.data:
                raise InvalidInputError(
                    f"Output {spec} cannot be bound to {array.dtype}{list(array.shape)}: give a contiguous tensor of the shape and "
                    "dtype that the program computes."
                )
            tensors.check_writable(leaf, spec)
        for k, leaf in enumerate(leaves):
            for n in range(k):
                if tensors.share_memory(leaf, leaves[n]):
                    raise InvalidInputError(
                        f"Outputs {specs[n].name!r} and {specs[k].name!r} were given memory that they share; give each its own."
                    )
        return arrays


def _address(leaf: Any) -> int:
    return np.asarray(leaf).ctypes.data if isinstance(leaf, np.ndarray | np.generic) else int(leaf.data_ptr())
