"""A compiled program, loaded on several devices at once."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError, LapilliError, NoDeviceError, ReadError
from lapilli.runtime import method as methods
from lapilli.runtime.closing import Closing
from lapilli.runtime.description import Description, TensorSpec
from lapilli.runtime.devices import Device, device_named, devices, every_device
from lapilli.runtime.dispatcher import SLOTS, Dispatcher, Job
from lapilli.runtime.futures import Future
from lapilli.runtime.host import LISTED, Permission
from lapilli.runtime.limits import Limits
from lapilli.runtime.method import Method
from lapilli.runtime.ordered import OnError, ordered
from lapilli.runtime.program import Program
from lapilli.runtime.report import Report
from lapilli.runtime.structure import Structure


class _Shared:
    """What the methods of a pool share until it is closed."""

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self.programs = programs
        self.dispatcher = Dispatcher([(program.device.name, program) for program in programs])
        weakref.finalize(
            self, _abandon, self.dispatcher, programs
        ).atexit = False  # the dispatcher ends with the process


class PoolMethod:
    """A method of a pool, called like the function that it was compiled from."""

    def __init__(self, shared: _Shared, name: str) -> None:
        self._shared, self._name = shared, name
        self._method = shared.programs[0].methods[name]

    @property
    def name(self) -> str:
        """The method's name: a key of `Pool.methods`."""
        return self._name

    @property
    def structure(self) -> Structure:
        """How inputs and outputs nest."""
        return self._method.structure

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every input tensor, in the order of `run_flat`."""
        return self._method.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every output tensor."""
        return self._method.outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `Pool.__call__`."""
        there = self._where(self._method.convention.structure.flatten_call(args, kwargs)) if methods.runners else None
        if there is not None:
            return there(*args, **kwargs)
        return self._submit(args, kwargs, copy=False).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """As `Pool.submit`."""
        return self._submit(args, kwargs, copy=True)

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """As `Pool.run_flat`."""
        convention = self._method.convention
        values, _ = convention.values(inputs, bits)
        return convention.results(self._start(values).outputs(), torch=False, bits=bits)

    def report(self) -> Report:
        """Where each operator of the method runs, and why if not on the GPU."""
        return self._method.report()

    def _submit(self, args: Sequence[Any], kwargs: Mapping[str, Any], copy: bool) -> Future:
        convention = self._method.convention
        leaves, values, torch = convention.leaves(args, kwargs)
        if copy:  # of which work that a lost device had is done again
            values = [value.copy() if isinstance(value, np.ndarray) else value for value in values]
        return Future(
            self._start(values),
            lambda outputs: convention.update(leaves, outputs, torch),
            lambda outputs: convention.wrap(outputs, torch),
            keep=self._shared,
        )

    def _start(self, values: list[Any]) -> Job[Program]:
        name = self._name
        return self._shared.dispatcher.submit(lambda program: program.methods[name].run_values(values))

    def _where(self, leaves: Sequence[Any]) -> Method | None:
        """The method on the device that the tensors are on; None: they are on the host."""
        found = [
            leaf.device for leaf in leaves if getattr(getattr(leaf, "device", None), "type", None) in methods.runners
        ]
        if not found:
            return None
        for program in self._shared.programs:
            if program.methods[self._name].takes(found[0].type, found[0].index):
                return program.methods[self._name]
        raise InvalidInputError(
            f"The inputs are on {found[0]}, where the pool has no program; give tensors on the CPU."
        )


class Pool(Closing):
    """A compiled model on several devices, with the interface of a `Program`.

    Created by `lapilli.load` with several devices. A run goes to the device that is likely to finish it first; one that is too
    slow to help gets none. Several threads may call it at once. A device that is lost is taken out with a warning, and its
    work is done on another one, once. It holds device memory until it is closed, leaves its `with` block, or is
    garbage-collected.
    """

    def __init__(
        self,
        source: Path | bytes,
        wanted: str | Sequence[str | int],
        *,
        permission: Permission = LISTED,
        limits: Limits | None = None,
    ) -> None:
        """Loads a program on several devices; use `lapilli.load`.

        Args:
            source: path or content of a file.
            wanted: as `device` of `lapilli.load`.
            permission: which operators of torch the file may call.
            limits: bounds on the resources of the file and its runs on each device.
        """
        every = wanted == "all"
        found = every_device() if every else _named(wanted)
        load = partial(_loaded, source, permission, limits)
        with ThreadPoolExecutor(len(found)) as executor:
            results = list(executor.map(load, found))
        failed = [result for result in results if isinstance(result, LapilliError)]
        programs = tuple(result for result in results if isinstance(result, Program))
        try:
            # Of all devices, those count that satisfy a plan; of those that were named, each.
            if failed and not (every and programs and all(isinstance(error, NoDeviceError) for error in failed)):
                raise failed[0]
            _check(programs, source)
        except BaseException:
            _close(programs)
            raise
        self._shared = _Shared(programs)
        self._methods = {name: PoolMethod(self._shared, name) for name in programs[0].methods}
        self._default = next(iter(self._methods.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on one of the devices and waits for the result; as `Program.__call__`.

        Args:
            *args: the model's positional arguments, with tensors of the dtypes and shapes of `inputs`.
            **kwargs: its keyword arguments.

        Raises:
            InvalidInputError: an input has the wrong dtype, shape, device or nesting.
            IntegerOverflowError: the run computed int64 results that do not fit into 32 bits.
            OutOfMemoryError: the device or the host has too little memory.
            DeviceLostError: two devices were lost with this run, or all of them.
        """
        return self._default(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """Queues a run and returns at once. Each device has two at a time; the others wait, with a copy of their inputs.

        Args:
            *args: as for a call.
            **kwargs: as for a call.

        Raises:
            InvalidInputError: an input has the wrong dtype, shape, device or nesting, or the pool is closed.
            DeviceLostError: all devices are lost.
        """
        return self._default.submit(*args, **kwargs)

    def map(self, items: Iterable[Any], in_flight: int | None = None, on_error: OnError = "raise") -> Iterator[Any]:
        """Runs the model on many items, on all devices, with the results in the items' order; as `Program.map`.

        Args:
            items: the model's argument, or a tuple of its arguments, for each run.
            in_flight: how many items are taken before the first of their results is; None: four for each device.
            on_error: what takes the place of the result of an item that fails: "raise" or "return" the exception.

        Raises:
            InvalidInputError: an option is not one of the choices.
        """
        count = 2 * SLOTS * len(self.programs) if in_flight is None else in_flight
        return ordered(self.submit, items, count, on_error)

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """Runs on a flat list of arrays, without the model's nesting; as `Program.run_flat`."""
        return self._default.run_flat(inputs, bits)

    @property
    def methods(self) -> Mapping[str, PoolMethod]:
        """The program's methods by name; calling the pool calls the first."""
        return self._methods

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program on each device, those that are lost included: for `memory`, `plan`, `profile`."""
        return self._shared.programs

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that are not lost."""
        return tuple(w.target.device for w in self._shared.dispatcher.workers if w.lost is None)

    @property
    def lost(self) -> tuple[Device, ...]:
        """The devices that were lost since the pool was loaded."""
        return tuple(w.target.device for w in self._shared.dispatcher.workers if w.lost is not None)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every input tensor, in the order of `run_flat`."""
        return self._default.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of every output tensor."""
        return self._default.outputs

    @property
    def metadata(self) -> Mapping[str, str]:
        """The strings given to `lapilli.compile`."""
        return self.programs[0].metadata

    @property
    def description(self) -> Description:
        """The content of the file: plans, kernels, constants."""
        return self.programs[0].description

    def report(self) -> Report:
        """Where each operator of the first method runs, and why if not on the GPU."""
        return self._default.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file, atomically; as `Program.save`."""
        self.programs[0].save(path)

    def close(self) -> None:
        """Frees the device memory. Waits for all runs that were submitted; their futures keep their results."""
        self._shared.dispatcher.close()
        _close(self.programs)

    def __repr__(self) -> str:
        lost = f"; {len(self.lost)} lost" if self.lost else ""
        return f"Pool({', '.join(device.name for device in self.devices) or 'no device'}{lost})"


def _named(wanted: str | Sequence[str | int]) -> list[Device]:
    if isinstance(wanted, str) or not wanted:
        raise InvalidInputError(f'device is {wanted!r}; give "all", or a list of indices, names or UUIDs.')
    found = [device_named(name) for name in wanted]
    if len({device.index for device in found}) < len(found):
        raise InvalidInputError(
            f"device is {list(wanted)!r}, which names a device twice; a device has one place in a pool. There are "
            f"{', '.join(f'{d.index}: {d.name}' for d in devices())}."
        )
    return found


def _loaded(
    source: Path | bytes, permission: Permission, limits: Limits | None, device: Device
) -> Program | LapilliError:
    try:
        return Program(source, device.index, permission=permission, limits=limits)
    except LapilliError as error:
        return error


def _check(programs: Sequence[Program], source: Path | bytes) -> None:
    """Raises where runs of one device would not give what those of another one do."""
    if len({program.stamp for program in programs}) > 1:
        raise ReadError(f"{source!s} was changed while it was loaded; load it again.")
    states = [spec.name for spec in programs[0].description.states]
    if states:
        raise InvalidInputError(
            f"The program keeps {', '.join(states)} on its device from run to run, so what a run gives depends on the device; "
            "a pool takes programs without states. Load it on one device."
        )


def _close(programs: Sequence[Program]) -> None:
    for program in programs:
        program.close()


def _abandon(dispatcher: Dispatcher[Program], programs: Sequence[Program]) -> None:
    """Closes a pool that nothing refers to any more, in a thread: this may be one of its own, or one that holds its lock."""

    def close() -> None:
        dispatcher.close()
        _close(programs)

    with suppress(RuntimeError):  # the process ends
        threading.Thread(target=close, name="lapilli-pool-close").start()
