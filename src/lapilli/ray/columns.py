"""Columns of Ray's blocks as arrays, and back, without copies where the memory allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[Any]


def to_array(column: Any) -> Array:
    """A column as an array with a row for each of its entries: a view of its memory, if that is one dense piece.

    An array of objects where entries have no common shape, or some are null.
    """
    if isinstance(column, np.ndarray):
        return _stacked(list(column)) if column.dtype == object else column
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # extension types that do not combine
            parts = [to_array(chunk) for chunk in column.chunks]
            return np.concatenate(parts) if parts else np.empty(0)
    if isinstance(column, pa.ExtensionArray):
        return _tensors(column)
    if column.null_count:
        return _stacked(column.to_pylist())
    if pa.types.is_fixed_size_list(column.type):
        inner = to_array(column.flatten())
        return inner.reshape(len(column), column.type.list_size, *inner.shape[1:])
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        inner = to_array(column.flatten())
        if len(lengths) and (lengths == lengths[0]).all():
            return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])
        bounds = np.cumsum(lengths)[:-1]
        return _objects(np.split(inner, bounds))
    values: Array = column.to_numpy(zero_copy_only=False)
    return values


def _tensors(column: Any) -> Array:
    """Arrow's and Ray's tensor columns."""
    if column.null_count:
        return _stacked([None if not entry.is_valid else np.asarray(entry.to_numpy()) for entry in column])
    if hasattr(column, "to_numpy_ndarray"):
        dense: Array = column.to_numpy_ndarray()
        return dense
    array = column.to_numpy(zero_copy_only=False)
    return _stacked(list(array)) if array.dtype == object else array


def _stacked(rows: list[Any]) -> Array:
    arrays = [None if row is None else np.asarray(row) for row in rows]
    kinds = {None if a is None else (a.dtype, a.shape) for a in arrays}
    if len(kinds) == 1 and None not in kinds:
        return np.stack([a for a in arrays if a is not None])
    return _objects(arrays)


def _objects(rows: list[Any]) -> Array:
    made = np.empty(len(rows), object)
    made[:] = rows
    return made


def row(array: Array, number: int) -> Array | None:
    """One entry, as an array with one row; None where it is null."""
    entry = array[number]
    return None if entry is None else np.asarray(entry)[None]


def with_columns(batch: Any, dropped: set[str], new: Mapping[str, Array]) -> Any:
    """A batch in the form of the one given (a table, or a dict of arrays), without some columns, and with new ones."""
    if isinstance(batch, pa.Table):
        table = batch.drop_columns([name for name in batch.column_names if name in dropped or name in new])
        for name, array in new.items():
            table = table.append_column(name, _arrow(array))
        return table
    return {name: column for name, column in batch.items() if name not in dropped and name not in new} | dict(new)


def _arrow(array: Array) -> Any:
    if array.ndim == 1:
        return pa.array(array)
    from ray.data.extensions import ArrowTensorArray

    return ArrowTensorArray.from_numpy(array)
