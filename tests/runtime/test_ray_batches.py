"""What actors of `lapilli.ray` do with a batch: columns as arrays, any number of rows through a program. Without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

import lapilli
from lapilli import InvalidInputError, Program

pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray")

from ray.data.extensions import ArrowTensorArray  # noqa: E402

from lapilli.ray import batch_runs, columns  # noqa: E402

X = np.arange(24, dtype=np.float32).reshape(8, 3)


def chunked(array: Any) -> Any:
    return pa.chunked_array([array])


@pytest.mark.parametrize(
    ("column", "shared"),
    [
        (X, True),
        (chunked(ArrowTensorArray.from_numpy(X)), True),
        (chunked(pa.FixedShapeTensorArray.from_numpy_ndarray(X)), True),
        (chunked(pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3)), True),
        (chunked(pa.array(X.tolist(), pa.list_(pa.float32()))), True),
        (chunked(pa.array(X.tolist(), pa.large_list(pa.float32()))), True),
        (np.array([*X, None], object)[:8], False),
        (pa.chunked_array([ArrowTensorArray.from_numpy(X[:5]), ArrowTensorArray.from_numpy(X[5:])]), False),
    ],
    ids=["numpy", "ray", "tensor", "fixed", "list", "large_list", "objects", "chunks"],
)
def test_columns_are_arrays(column: Any, shared: bool) -> None:
    found = columns.to_array(column)
    np.testing.assert_array_equal(found, X)
    assert found.dtype == X.dtype
    if shared and not isinstance(column, np.ndarray):
        assert (
            not found.flags.owndata and found.ctypes.data == columns.to_array(column).ctypes.data
        )  # a view, each time
    if isinstance(column, np.ndarray) and column.dtype != object:
        assert found is column


@pytest.mark.parametrize("cut", [0, 3])
def test_slices_of_tables_are_views_of_their_part(cut: int) -> None:
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3), "n": pa.array(np.arange(8))})
    part = table.slice(cut, 4)
    np.testing.assert_array_equal(columns.to_array(part["x"]), X[cut : cut + 4])
    np.testing.assert_array_equal(columns.to_array(part["n"]), np.arange(cut, cut + 4))


def test_rows_without_a_common_shape_stay_apart() -> None:
    ragged = chunked(pa.array([[1.0, 2.0], [3.0], None], pa.list_(pa.float32())))
    found = columns.to_array(ragged)
    assert found.dtype == object and found[2] is None
    assert columns.row(found, 2) is None
    np.testing.assert_array_equal(columns.row(found, 0), [[1, 2]])
    no_null = columns.to_array(chunked(pa.array([[1.0, 2.0], [3.0], []], pa.list_(pa.float32()))))
    assert [len(entry) for entry in no_null] == [2, 1, 0]


def test_new_columns_keep_the_form() -> None:
    new: dict[str, NDArray[Any]] = {"y": X * 2, "n": np.arange(8), "error": np.array([""] * 8)}
    table = columns.with_columns(pa.table({"x": pa.array(np.zeros(8)), "name": pa.array(list("abcdefgh"))}), {"x"}, new)
    assert table.column_names == ["name", "y", "n", "error"]
    np.testing.assert_array_equal(columns.to_array(table["y"]), X * 2)
    made = columns.with_columns({"x": X, "name": np.array(list("abcdefgh"))}, {"x"}, new)
    assert list(made) == ["name", "y", "n", "error"]


@pytest.mark.parametrize("rows", ["N", 1, 4, 7])
def test_any_number_of_rows(rows: int | str) -> None:
    """Sweep: 0 to 40 rows through programs of 1 to 16 rows, of one, of four, and of seven."""
    weights = np.array([1, 2, 3], np.float32)
    rng = np.random.default_rng(0)
    with Program(tiny.scales(weights, rows=rows)) as program:
        method = program.methods["forward"]
        for n in (*range(0, 20), 31, 32, 33, 40):
            x = rng.random((n, 3), dtype=np.float32)
            (y,) = batch_runs.run(method, [x])
            assert y.shape == (n, 3) and y.dtype == np.float32
            np.testing.assert_array_equal(y, x * weights * weights)


def test_programs_without_rows_are_refused(tmp_path: Path) -> None:
    with Program(tiny.copies("float32", "int32", shape=(4,))) as program:
        assert batch_runs.rows_of(program.methods["forward"]) == (4, 4)
    with Program(tiny.classes(2, {})) as program:
        assert batch_runs.rows_of(program.methods["forward"]) == (1, 1)

    import torch

    class Reduces(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    program = lapilli.compile(Reduces(), (torch.ones(2, 3),))
    with pytest.raises(InvalidInputError, match="first sizes differ"):
        batch_runs.rows_of(program.methods["forward"])


def test_two_columns_of_unequal_length() -> None:
    with Program(tiny.copies("float32", "int32", shape=(4,))) as program:
        given: list[NDArray[Any]] = [np.zeros(3, np.float32), np.zeros(4, np.int32)]
        with pytest.raises(InvalidInputError, match=r"\[3, 4\] rows"):
            batch_runs.run(program.methods["forward"], given)
