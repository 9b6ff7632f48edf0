"""A batch of any number of rows through a program that takes a certain number of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.runtime.description import TensorSpec
from lapilli.runtime.method import Method
from lapilli.runtime.tensors import listed

Array = NDArray[Any]
_AT_ONCE = 2
"""Runs in flight: one's tensors are copied while another one is computed."""


def rows_of(method: Method) -> tuple[int, int | None]:
    """The least and the largest number of rows of a run (None: no limit): the first size of every input.

    Raises InvalidInputError if a program does not work on rows.
    """
    firsts = {spec.shape[0] if spec.shape else None for spec in (*method.inputs, *method.outputs)}
    size = next(iter(firsts))
    if len(firsts) != 1 or size is None:
        raise InvalidInputError(
            f"The program takes {listed(method.inputs)} and gives {listed(method.outputs)}, whose first sizes differ; rows of a "
            "data set need a batch: the same first size everywhere."
        )
    if isinstance(size, int):
        return size, size
    found = [symbol for spec in method.inputs for symbol in spec.symbols if symbol.name == size]
    if not found:
        raise InvalidInputError(f"The number of rows, {size}, is no plain dynamic size: {listed(method.inputs)}.")
    return max(1, found[0].min), found[0].max


def run(method: Method, inputs: Sequence[Array]) -> list[Array]:
    """Runs on arrays with equally many rows, in pieces where the program takes fewer; one that takes more gets the last row
    repeated. Returns an array for each output, bfloat16 as float32.
    """
    least, most = rows_of(method)
    n = len(inputs[0])
    if any(len(array) != n for array in inputs):
        raise InvalidInputError(f"Columns have {[len(array) for array in inputs]} rows; give as many of each.")
    if n == 0:
        return [_empty(spec) for spec in method.outputs]
    step = n if most is None else most
    pieces = [[array[k : k + step] for array in inputs] for k in range(0, n, step)]

    def one(piece: list[Array]) -> list[Array]:
        given = len(piece[0])
        if given < least:
            piece = [np.concatenate([array, np.repeat(array[-1:], least - given, 0)]) for array in piece]
        outputs = method.run_flat(piece, bits=True)[: len(method.outputs)]
        return [_widened(array[:given], spec) for array, spec in zip(outputs, method.outputs, strict=True)]

    if len(pieces) == 1:
        return one(pieces[0])
    with ThreadPoolExecutor(_AT_ONCE) as executor:
        done = list(executor.map(one, pieces))
    return [np.concatenate(parts) for parts in zip(*done, strict=True)]


def blank(spec: TensorSpec, like: Array | None) -> Array:
    """What stands in the place of a row without a result: NaN, or 0 where the type has none; of the shape of another row's."""
    if like is not None:
        made = np.zeros((1, *like.shape[1:]), like.dtype)
    else:
        made = np.zeros((1, *(s if isinstance(s, int) else 0 for s in spec.shape[1:])), _dtype(spec))
    if made.dtype.kind == "f":
        made[...] = np.nan
    return made


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(np.float32) if spec.dtype == "bfloat16" else spec.numpy_dtype()


def _empty(spec: TensorSpec) -> Array:
    return np.empty((0, *(s if isinstance(s, int) else 0 for s in spec.shape[1:])), _dtype(spec))


def _widened(array: Array, spec: TensorSpec) -> Array:
    if spec.dtype != "bfloat16" or array.dtype != np.uint16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
