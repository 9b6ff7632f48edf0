"""Values that are known while a graph is captured: constants, and arrays of numbers that may be symbols.

Shapes are computed with the latter, so that a dynamic size stays a symbol through Shape, Gather, Concat and Reshape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

MOST_NUMBERS = 4096
"""Constants with more elements do not take part in arithmetic with symbols."""


@dataclass(frozen=True)
class ConstantTensor:
    """A tensor with values. buffer: the name of the module's buffer that holds it, if one does."""

    tensor: torch.Tensor
    buffer: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass(frozen=True)
class Numbers:
    """An array of Python's numbers and torch's symbols."""

    array: NDArray[np.object_]
    dtype: torch.dtype

    @property
    def is_constant(self) -> bool:
        return not any(isinstance(x, SYMBOLS) for x in self.array.reshape(-1))


def array(values: Any, shape: Any = None) -> NDArray[np.object_]:
    """An array of objects; shape: of the array, if the values are a flat list."""
    values = list(values)
    result = np.empty(len(values), dtype=object)
    for k, value in enumerate(values):
        result[k] = value
    return result if shape is None else result.reshape(shape)


def numbers(value: ConstantTensor | Numbers) -> Numbers:
    """A known value as numbers."""
    if isinstance(value, Numbers):
        return value
    with _disable_current_modes():  # a fake mode would hide the elements
        return Numbers(array(value.tensor.reshape(-1).tolist(), tuple(value.tensor.shape)), value.tensor.dtype)


def is_small(value: Any) -> bool:
    """Whether a value is known and may be an array of numbers."""
    return isinstance(value, Numbers) or (isinstance(value, ConstantTensor) and value.tensor.numel() <= MOST_NUMBERS)
