"""Programs over Ray's data sets: an actor for each device."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray

from lapilli.errors import DeviceLostError, InvalidInputError, LapilliError
from lapilli.ray import batch_runs, columns
from lapilli.ray.claims import RESOURCE, Claim, claim
from lapilli.ray.shipping import Shipped, ship
from lapilli.runtime.method import Method
from lapilli.runtime.program import Program

Array = NDArray[Any]
ERROR = "error"
"""The column that says which rows failed."""
_IN_ACTOR = 2
"""Batches in an actor at once: one comes from or goes to the object store while another one is computed. Ray calls the predictor
for one at a time."""
_QUEUED = 2 * _IN_ACTOR
"""Batches that wait for an actor or are there. Ray's driver sees what is done every tenth of a second or so, and a device should
have work until then. No more: an actor beside the data is given all of these first, and another one that waits has none."""


class Predictor:
    """A program on a device of its own, for `ray.data.Dataset.map_batches`; `predict` calls that.

    A batch has any number of rows: it is cut where the program takes fewer, and its last row is repeated where it takes more. A
    device that is lost is opened anew, and the batch is run again, once.
    """

    def __init__(
        self,
        model: Shipped | str | os.PathLike[str],
        *,
        method: str | None = None,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        keep_inputs: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        share: int = 1,
    ) -> None:
        """Takes a device of the node that no other process has, and loads the program.

        Args:
            model: what `ship` gave, or the path of a file that every node has.
            method: the program's method; None: its first.
            inputs: the column of each input, by the input's name; None: the column of that name, or the only one.
            outputs: the column for each output, by the output's name; None: its name.
            keep_inputs: whether columns that are inputs stay. All others do.
            on_error: what becomes of a batch in which a row fails: "raise", or "return": its rows are run one by one, those that
                fail have NaN (integers: 0) as their outputs, and the column "error" says why; it is empty for the others.
            share: how many processes may have one device.

        Raises:
            NoDeviceError: all devices of the node are taken.
            InvalidInputError: the program has no such method, input or output, or does not work on rows.
        """
        if on_error not in ("raise", "return"):
            raise InvalidInputError(f'on_error is {on_error!r}; it can be "raise" or "return".')
        self._source = model.bytes() if isinstance(model, Shipped) else Path(model)
        self._name, self._share, self._on_error, self._keep = method, share, on_error, keep_inputs
        self._claim: Claim = claim(share)
        try:
            self._program = Program(self._source, self._claim.device.uuid)
            self._inputs = _names("input", [spec.name for spec in self.method.inputs], inputs)
            self._outputs = _names("output", [spec.name for spec in self.method.outputs], outputs)
            self._guess = inputs is None and len(self._inputs) == 1
            batch_runs.rows_of(self.method)
        except BaseException:
            self._claim.release()
            raise

    @property
    def method(self) -> Method:
        """The method that it calls."""
        methods = self._program.methods
        if self._name is not None and self._name not in methods:
            raise InvalidInputError(f"The program has no method {self._name!r}; it has {', '.join(methods)}.")
        return next(iter(methods.values())) if self._name is None else methods[self._name]

    @property
    def device(self) -> str:
        """The UUID of its device."""
        return self._claim.device.uuid

    def __call__(self, batch: Any) -> Any:
        """Runs the program on a batch.

        Args:
            batch: a dict of NumPy arrays, or an Arrow table (`batch_format="numpy"` or `"pyarrow"`).

        Returns:
            the batch in the same form: with a column for each output, without those of the inputs.

        Raises:
            InvalidInputError: a column is missing, or a row does not fit (with on_error="raise").
        """
        names = self._columns(batch)
        arrays = [columns.to_array(batch[name]) for name in names]
        results, errors = self.run(arrays)
        new = dict(zip(self._outputs, results, strict=True))
        if errors is not None:
            new[ERROR] = np.array(errors)
        return columns.with_columns(batch, set() if self._keep else set(names), new)

    def run(self, arrays: Sequence[Array]) -> tuple[list[Array], list[str] | None]:
        """Runs on arrays of rows: an array for each output, and for each row why it failed, or "" (None with "raise")."""
        try:
            results = self._tried(arrays)
            return results, None if self._on_error == "raise" else [""] * len(arrays[0])
        except LapilliError:
            if self._on_error == "raise":
                raise
        return self._one_by_one(arrays)

    def check(self) -> None:
        """Raises an exception if the device does not work any more: runs the program on zeros, if it has no states."""
        specs = self.method.inputs
        if self._program.description.states:
            self._program.state()
            return
        with suppress(InvalidInputError):  # sizes that are computed from others
            zeros = [np.zeros(s.least_shape(), "uint16" if s.dtype == "bfloat16" else s.dtype) for s in specs]
            self.method.run_flat(zeros, bits=True)

    def _columns(self, batch: Any) -> list[str]:
        given = list(getattr(batch, "column_names", None) or batch)
        if self._guess and self._inputs[0] not in given and len(given) == 1:
            return given
        missing = [name for name in self._inputs if name not in given]
        if missing:
            raise InvalidInputError(
                f"The batch has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, given)) or 'none'}. Say "
                f"which one is which input: inputs={{{missing[0]!r}: 'column'}}."
            )
        return self._inputs

    def _tried(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs, and once more on the device anew if it is lost."""
        for array, spec in zip(arrays, self.method.inputs, strict=True):
            if array.dtype == object:
                raise InvalidInputError(
                    f"Rows for {spec} have different shapes or types, or are null; give equal ones."
                )
        try:
            return batch_runs.run(self.method, arrays)
        except DeviceLostError as error:
            warnings.warn(
                f"{self._claim.device.name} was lost; it is opened anew. {error}", RuntimeWarning, stacklevel=2
            )
            self._again()
            return batch_runs.run(self.method, arrays)

    def _again(self) -> None:
        """Loads the program anew, on the same device or else on one that is free."""
        self._program.close()
        try:
            self._program = Program(self._source, self._claim.device.uuid)
        except LapilliError:
            other = claim(self._share, [self._claim.device.uuid])
            self._claim.release()
            self._claim = other
            self._program = Program(self._source, other.device.uuid)

    def _one_by_one(self, arrays: Sequence[Array]) -> tuple[list[Array], list[str] | None]:
        rows: list[list[Array] | None] = []
        errors: list[str] = []
        for number in range(len(arrays[0])):
            given = [columns.row(array, number) for array in arrays]
            try:
                if any(entry is None for entry in given):
                    raise InvalidInputError("The row is null.")
                rows.append(self._tried([entry for entry in given if entry is not None]))
                errors.append("")
            except LapilliError as error:
                rows.append(None)
                errors.append(f"{type(error).__name__}: {error}")
                if isinstance(error, DeviceLostError):
                    self._again()
        good = next((row for row in rows if row is not None), None)
        blanks = [
            batch_runs.blank(spec, None if good is None else good[k]) for k, spec in enumerate(self.method.outputs)
        ]
        full = [blanks if row is None else row for row in rows]
        return [np.concatenate(parts) for parts in zip(*full, strict=True)], errors


def predict(
    dataset: Any,
    model: Shipped | str | os.PathLike[str],
    *,
    batch_size: int = 256,
    actors: int | None = None,
    batch_format: Literal["numpy", "pyarrow"] = "pyarrow",
    share: int = 1,
    **options: Any,
) -> Any:
    """Runs a program over a data set, on every device of the cluster.

    Args:
        dataset: a `ray.data.Dataset`.
        model: what `ship` gave, or the path of a file of this machine, which is shipped.
        batch_size: rows of a call. Those of a run are the program's: a batch of several runs overlaps copies and work.
        actors: how many; None: all that the cluster has devices for now.
        batch_format: as of `map_batches`; "pyarrow" copies less where there are columns that are no inputs.
        share: how many actors may have one device.
        **options: further options of `Predictor`.

    Returns:
        a `ray.data.Dataset` with the outputs as columns: each row once, whatever actors, devices and nodes are lost meanwhile.

    Raises:
        InvalidInputError: no node has the resource "vulkan".
    """
    shipped = model if isinstance(model, Shipped) else ship(model)
    if actors is None:
        actors = round(ray.cluster_resources().get(RESOURCE, 0) * share)
    if actors < 1:
        raise InvalidInputError(
            f"No node of this cluster has the resource {RESOURCE!r}; start them with: "
            f"ray start --resources='{{\"{RESOURCE}\": 1}}', where the number is that of the node's devices."
        )
    return dataset.map_batches(
        Predictor,
        batch_size=batch_size,
        batch_format=batch_format,
        fn_constructor_args=(shipped,),
        fn_constructor_kwargs={**options, "share": share},
        num_cpus=0,  # an actor waits for its device; what decodes and writes has the processors
        resources={RESOURCE: 1 / share},
        **_pool(actors),
    )


def _pool(actors: int) -> dict[str, Any]:
    """Options of `map_batches`: actors that always have a batch to go on with."""
    of_pool: dict[str, Any] = {"size": actors, "max_tasks_in_flight_per_actor": _QUEUED}
    name = "max_concurrent_calls_per_actor"
    if name in inspect.signature(ray.data.ActorPoolStrategy).parameters:
        return {"compute": ray.data.ActorPoolStrategy(**of_pool, **{name: _IN_ACTOR})}
    return {"compute": ray.data.ActorPoolStrategy(**of_pool), "max_concurrency": _IN_ACTOR}  # an older Ray


def _names(kind: str, known: Sequence[str], given: Mapping[str, str] | None) -> list[str]:
    unknown = [name for name in given or {} if name not in known]
    if unknown:
        raise InvalidInputError(f"The program has no {kind} {unknown[0]!r}; it has {', '.join(known)}.")
    return [(given or {}).get(name, name) for name in known]
