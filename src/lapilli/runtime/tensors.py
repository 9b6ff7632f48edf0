"""Conversions between the caller's tensors (torch or NumPy) and the player's arrays. torch is only used if its tensors are
given.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.runtime.description import TensorSpec


def to_arrays(
    leaves: Sequence[Any], specs: Sequence[TensorSpec], bits: bool = False
) -> tuple[list[NDArray[Any]], bool]:
    """Contiguous arrays that share the tensors' memory if that is contiguous (otherwise copies), and whether any tensor was
    torch's.

    Shapes and dtypes that NumPy supports are left to the player to check. bits: uint16 arrays are the bits of bfloat16.
    Raises InvalidInputError for values that are not tensors, not on the CPU, not dense, or bfloat16 in a form that NumPy
    lacks.
    """
    if len(leaves) != len(specs):
        raise InvalidInputError(f"{len(leaves)} tensors were given; the program takes {len(specs)}: {listed(specs)}.")
    torch = sys.modules.get("torch")
    any_torch = False
    arrays: list[NDArray[Any]] = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            if spec.dtype == "bfloat16" and array.dtype.name != "bfloat16" and not (bits and array.dtype == np.uint16):
                raise InvalidInputError(
                    f"Input {spec} cannot be given as {array.dtype}: NumPy has no bfloat16. Give a torch tensor (or an "
                    "array of the package ml_dtypes)."
                )
            arrays.append(array)
        elif torch is not None and isinstance(leaf, torch.Tensor):
            arrays.append(_from_torch(leaf, spec, torch))
            any_torch = True
        else:
            raise InvalidInputError(
                f"Input {spec} was given as {type(leaf).__name__}; give a NumPy array or a torch tensor."
            )
    return arrays, any_torch


def from_arrays(arrays: list[NDArray[Any]], specs: Sequence[TensorSpec], torch: bool, bits: bool = False) -> list[Any]:
    """The player's outputs as torch tensors or NumPy arrays, without a copy. bits: bfloat16 as uint16 arrays of its bits,
    for NumPy.
    """
    if torch:
        module = sys.modules["torch"]
        made = [tensor_of(array, module) for array in arrays]
        return [x.view(module.bfloat16) if spec.dtype == "bfloat16" else x for x, spec in zip(made, specs, strict=True)]
    return [
        array.view(spec.numpy_dtype()) if spec.dtype == "bfloat16" and not bits else array
        for array, spec in zip(arrays, specs, strict=True)
    ]


def tensor_of(array: Any, torch: Any) -> Any:
    """A tensor in an array's memory. Nothing has strides as torch has them, not NumPy's zeros, which some operators refuse."""
    made = torch.from_numpy(array)
    return made if made.numel() else made.new_empty(made.shape)


def typed(array: Any, dtype: str) -> Any:
    """A value as operators on the host expect it: the bits of bfloat16, which NumPy lacks, as a tensor (if torch is
    installed).
    """
    if dtype != "bfloat16" or not isinstance(array, np.ndarray):
        return array
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return array
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).view(np.uint16)).view(torch.bfloat16)


def channels_first(specs: tuple[TensorSpec, ...], numbers: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The player's specs as callers see them: tensors in channels-last format, [batch, height, width, channels] in the
    file, are [batch, channels, height, width].
    """

    def seen(spec: TensorSpec) -> TensorSpec:
        batch, height, width, channels = spec.shape
        return replace(spec, shape=(batch, channels, height, width))

    return tuple(seen(spec) if k in numbers else spec for k, spec in enumerate(specs))


def permuted(leaves: Sequence[Any], numbers: Sequence[int], specs: Sequence[TensorSpec]) -> list[Any]:
    """Inputs as the player expects them; as views, so that tensors in channels-last format are not copied.

    Raises InvalidInputError if a rank is wrong.
    """
    values = list(leaves)
    for k in numbers:
        shape = getattr(values[k], "shape", ())
        sizes = zip(shape, specs[k].shape, strict=False)
        if len(shape) != 4 or any(isinstance(size, int) and size != given for given, size in sizes):
            raise InvalidInputError(f"Input {specs[k]} was given as {described(values[k])}.")
        values[k] = transposed(values[k], (0, 2, 3, 1))
    return values


def transposed(value: Any, order: tuple[int, ...]) -> Any:
    """A view with the axes in another order."""
    return value.transpose(order) if isinstance(value, np.ndarray) else value.permute(order)


def described(value: Any) -> str:
    """A tensor, for an error message."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype}{list(shape)}"


def check(array: NDArray[Any], spec: TensorSpec) -> None:
    """Raises InvalidInputError if the dtype, the rank or a fixed size of an array differs from that of the input."""
    dtype = "bfloat16" if spec.dtype == "bfloat16" and array.dtype == np.uint16 else array.dtype.name
    sizes = zip(array.shape, spec.shape, strict=False)
    if dtype != spec.dtype or array.ndim != len(spec.shape) or any(isinstance(n, int) and n != s for s, n in sizes):
        raise InvalidInputError(f"Input {spec} was given as {dtype}{list(array.shape)}.")
    for size, name in zip(array.shape, spec.shape, strict=True):
        for symbol in spec.symbols:
            if symbol.name == name and not symbol.min <= size <= (size if symbol.max is None else symbol.max):
                raise InvalidInputError(f"Input {spec} was given with {name}={size}, which is out of bounds.")


def check_writable(leaf: Any, spec: TensorSpec) -> None:
    """Raises InvalidInputError if the model changes an input that is read-only."""
    if isinstance(leaf, np.ndarray):
        writable = leaf.flags.writeable
    else:
        writable = not isinstance(leaf, np.generic) and all(
            step != 0 or size < 2 for size, step in zip(leaf.shape, leaf.stride(), strict=True)
        )
    if not writable:
        raise InvalidInputError(
            f"The model changes its input {spec}, but the given array is read-only; give a writable array, or "
            "a copy of this one."
        )


def share_memory(one: Any, other: Any) -> bool:
    """Whether two tensors have bytes in common, or interleave."""
    (first, end), (other_first, other_end) = _span(one), _span(other)
    return first < other_end and other_first < end


def _span(leaf: Any) -> tuple[int, int]:
    """The range of addresses of a tensor's elements; empty for one without memory."""
    if isinstance(leaf, np.ndarray):
        start, steps = leaf.ctypes.data, leaf.strides
    elif hasattr(leaf, "data_ptr") and leaf.device.type == "cpu":
        start, steps = int(leaf.data_ptr()), tuple(step * leaf.element_size() for step in leaf.stride())
    else:
        return 0, 0
    if 0 in leaf.shape:
        return 0, 0
    reach = [(size - 1) * step for size, step in zip(leaf.shape, steps, strict=True)]
    size = leaf.itemsize if isinstance(leaf, np.ndarray) else leaf.element_size()
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + size


def update(leaf: Any, value: Any, spec: TensorSpec) -> None:
    """Writes the value that the model left in an input to the caller's tensor; both are torch's, or both NumPy's.

    Raises InvalidInputError for another shape, which only a damaged file causes.
    """
    if tuple(leaf.shape) != tuple(np.shape(value)):
        raise InvalidInputError(
            f"The program gives its input {spec} a value of another shape, {list(np.shape(value))}."
        )
    if isinstance(leaf, np.ndarray):
        np.copyto(leaf, np.asarray(value), casting="unsafe")
    else:
        leaf.detach().copy_(sys.modules["torch"].as_tensor(value))


def listed(specs: Sequence[TensorSpec]) -> str:
    """Specs for an error message."""
    return "; ".join(map(str, specs)) or "none"


def _from_torch(tensor: Any, spec: TensorSpec, torch: Any) -> NDArray[Any]:
    if tensor.device.type != "cpu":
        raise InvalidInputError(
            f"Input {spec} is on {tensor.device}; give a tensor on the CPU (tensor.cpu()). Calls take tensors of 'vulkan', too."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidInputError(f"Input {spec} is sparse or quantized; give a dense tensor.")
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.dtype is torch.bfloat16:
        if spec.dtype != "bfloat16":
            raise InvalidInputError(
                f"Input {spec} was given as torch.bfloat16; convert it with .to(torch.{spec.dtype})."
            )
        tensor = tensor.view(torch.uint16)
    elif spec.dtype == "bfloat16":
        raise InvalidInputError(f"Input {spec} was given as {tensor.dtype}; convert it with .to(torch.bfloat16).")
    try:
        array: NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidInputError(f"Input {spec} was given as {tensor.dtype}, which programs do not take.") from error
    return array
