"""Runs programs on tensors of the device "vulkan": the work is queued after that of the tensors, and nothing is copied to
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lapilli.eager import storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.device_state import is_ours
from lapilli.eager.method_call import MethodCall, shapes_of
from lapilli.eager.transfer import on_device
from lapilli.errors import InvalidInputError
from lapilli.runtime import tensors
from lapilli.runtime.description import TensorSpec
from lapilli.runtime.method import Method


@dataclass
class _Prepared:
    """launch: the method on a stream. shapes: those that its inputs must have, as a function of its symbols."""

    launch: MethodCall
    shapes: Callable[..., Sequence[tuple[int, ...]]] | None


_prepared: WeakKeyDictionary[Method, _Prepared] = WeakKeyDictionary()


def run(method: Method, leaves: Sequence[Any], sizes: Mapping[str, int] | None = None) -> list[Any]:
    """Runs a method on tensors of the device that its program is on. The outputs are on that device as well, as the model
    has them.

    Methods with several segments, and values that the device cannot compute with, take the way over the host. sizes: those
    that the method is given. Raises InvalidInputError if a tensor does not fit the method, or is on another device.
    """
    index = method.loaded.device.index
    _check_places(method.inputs, leaves, index)
    numbers = method.structure.updates
    for number in numbers:
        for k, leaf in enumerate(leaves):
            if k != number and storage.buffer_of(leaf) is storage.buffer_of(leaves[number]):
                raise InvalidInputError(
                    f"The model changes its input {method.inputs[number]}, which shares memory with what was given as "
                    f"{method.inputs[k].name!r}; the program was compiled for inputs that do not. Give a copy of one."
                )
    with torch.no_grad():
        try:
            made = _launched(method, leaves, sizes, index)
        except CannotRun:
            made = None
        if made is None:
            made = [
                _back(value, index)
                for value in method.run_tensors([x.cpu() if isinstance(x, torch.Tensor) else x for x in leaves], sizes)
            ]
        for number, value in zip(numbers, made[len(made) - len(numbers) :], strict=True):
            tensors.update(leaves[number], value, method.inputs[number])
    return made


def _launched(method: Method, leaves: Sequence[Any], sizes: Mapping[str, int] | None, index: int) -> list[Any] | None:
    """The outputs of a method of the player; None if there is a script, or sizes that are too long to be written out."""
    if method.number is None:
        return None
    native = method.loaded.native  # raises if the program is closed
    described = method.loaded.description.methods[method.number]
    prepared = _prepared.get(method)
    if prepared is None:
        launch = MethodCall(native, method.number, method.loaded.description, index)
        names = [s.name for s in described.symbols]
        prepared = _prepared[method] = _Prepared(launch, shapes_of(names, [spec.shape for spec in described.inputs]))
    if prepared.shapes is None:
        return None
    given = tensors.permuted(leaves, method.structure.inputs_last, method.inputs)
    for tensor, spec in zip(leaves, method.inputs, strict=True):
        if str(tensor.dtype) != f"torch.{spec.dtype}" or tensor.dim() != len(spec.shape):
            raise InvalidInputError(f"Input {spec} was given as {tensors.described(tensor)}.")
    symbols = described.symbol_values(given, sizes)
    for k, shape in enumerate(prepared.shapes(*symbols)):
        if tuple(given[k].shape) != shape:
            known = ", ".join(f"{s.name} = {n}" for s, n in zip(described.symbols, symbols, strict=True))
            says = f" (and the inputs say {known})" if known else ""
            raise InvalidInputError(f"Input {method.inputs[k]} was given as {tensors.described(leaves[k])}{says}.")
    made: list[Any] = list(prepared.launch(symbols, [on_device(t, None, index) for t in given]))
    for k in method.structure.outputs_last:
        made[k] = tensors.transposed(made[k], (0, 3, 1, 2))
    return made


def _check_places(specs: Sequence[TensorSpec], leaves: Sequence[Any], index: int) -> None:
    if len(leaves) != len(specs):
        raise InvalidInputError(
            f"{len(leaves)} tensors were given; the program takes {len(specs)}: {tensors.listed(specs)}."
        )
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec.dtype == "int" and not isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, torch.Tensor):
            raise InvalidInputError(
                f"Input {spec} was given as {type(leaf).__name__}, and others as tensors of the device; give a tensor there too."
            )
        if not is_ours(leaf):
            raise InvalidInputError(
                f"Input {spec} is on {leaf.device}, and others on the device; give it there too (tensor.to('vulkan:{index}'))."
            )
        if leaf.get_device() != index:
            raise InvalidInputError(
                f"Input {spec} is on {leaf.device}, and the program on vulkan:{index}: load it with device={leaf.get_device()}, "
                f"or give tensors on vulkan:{index}."
            )


def _back(value: Any, index: int) -> Any:
    return value.to(f"vulkan:{index}") if isinstance(value, torch.Tensor) else value
