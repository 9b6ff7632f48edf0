"""A compiled program, loaded on a device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.player import LoadTimes, MemoryInfo
from lapilli.runtime import html, tensors
from lapilli.runtime.binding import Binding
from lapilli.runtime.closing import Closing
from lapilli.runtime.description import INTERNAL, Description, TensorSpec
from lapilli.runtime.devices import Device
from lapilli.runtime.files import replace
from lapilli.runtime.futures import Future
from lapilli.runtime.host import LISTED, Permission
from lapilli.runtime.interpreter import as_array
from lapilli.runtime.limits import Limits
from lapilli.runtime.loaded import Loaded
from lapilli.runtime.method import Method, Methods
from lapilli.runtime.ordered import OnError, ordered
from lapilli.runtime.report import Report


@dataclass(frozen=True)
class KernelTime:
    """One dispatch of a run, timed alone on the device.

    Attributes:
        label: the operators that it computes.
        kernel: name of the kernel.
        seconds: median time.
        groups: number of work groups along x, y and z.
        flops: floating-point operations, by the plan.
        bytes: memory traffic in bytes, by the plan.
    """

    label: str
    kernel: str
    seconds: float
    groups: tuple[int, ...]
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Times of a run, measured by the device's clock.

    The kernels' times do not add up to that of a run, mostly to more: each is timed alone, between barriers and timestamps,
    while those of a run overlap.

    Attributes:
        kernels: every dispatch, in order.
        seconds: time of a whole run, without host time and without the extra barriers that timing each kernel needs.
    """

    kernels: tuple[KernelTime, ...]
    seconds: float


class Program(Closing):
    """A compiled model on one device.

    Created by `lapilli.compile` and `lapilli.load`. Several threads may call it at once. It holds device memory until it is
    closed, leaves its `with` block, or is garbage-collected.
    """

    def __init__(
        self,
        source: Path | bytes | memoryview,
        device: str | int | None = None,
        *,
        permission: Permission = LISTED,
        limits: Limits | None = None,
        first_run: bool = False,
    ) -> None:
        """Loads a program; use `lapilli.load`.

        Args:
            source: path or content of a file.
            device: as for `lapilli.load`.
            permission: which operators of torch the file may call.
            limits: bounds on the resources of the file and its runs.
            first_run: whether to check what the device computes, unless its verdict is known.
        """
        self._loaded = Loaded(source, device, permission, limits, first_run)
        self._methods = Methods({i.name: Method(self._loaded, i) for i in self._loaded.interfaces})
        self._default = next(iter(self._methods.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model and waits for the result.

        torch tensors in, torch tensors out; NumPy arrays in, NumPy arrays out. Tensors on the program's own "vulkan" device
        give tensors on that device, without a copy to the host and without waiting: the run is queued after the work that
        computes them. Nothing is cast. No gradients are recorded. Inputs that the model changes in place are changed; buffers
        that it changes are kept on the device from run to run (`state`, `reset`).

        Args:
            *args: the model's positional arguments, with tensors of the dtypes and shapes of `inputs`.
            **kwargs: its keyword arguments.

        Returns:
            what the model returns, with the same nesting.

        Raises:
            InvalidInputError: an input has the wrong dtype, shape, device or nesting.
            IntegerOverflowError: the run computed int64 results that do not fit into 32 bits.
            OutOfMemoryError: the device or the host has too little memory.
            DeviceLostError: the device was lost.
        """
        return self._default(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """Starts a run and returns at once. Several runs may be in flight.

        The inputs are copied and may be changed afterwards. Inputs that the model itself changes in place get their new values
        when the future's result is read.

        Args:
            *args: as for a call.
            **kwargs: as for a call.

        Raises:
            InvalidInputError: an input has the wrong dtype, shape, device or nesting.
        """
        return self._default.submit(*args, **kwargs)

    def map(self, items: Iterable[Any], in_flight: int = 2, on_error: OnError = "raise") -> Iterator[Any]:
        """Runs the model on many items, of which a few are in flight, with the results in the items' order.

        `items` may be endless: only those in flight are held. An exception of its own comes after the results of what came
        before it.

        Args:
            items: the model's argument, or a tuple of its arguments, for each run.
            in_flight: how many items are taken before the first of their results is.
            on_error: what takes the place of the result of an item that fails: "raise" the exception, which ends the
                iteration, or "return" it, and go on.

        Raises:
            InvalidInputError: an option is not one of the choices.
        """
        return ordered(self.submit, items, in_flight, on_error)

    def bind(self, *args: Any, outputs: Any = None, **kwargs: Any) -> Binding:
        """Binds input and output tensors for many runs that allocate nothing.

        After `run = program.bind(x)`, for every run: fill x, call `run()`, read `run.outputs`.

        Args:
            *args: as for a call, used without a copy: contiguous, or in channels-last format where the example was.
            outputs: tensors for the results, nested as the model returns them; None: new ones.
            **kwargs: as for a call.

        Raises:
            InvalidInputError: a tensor cannot be used without a copy, or the method runs in several segments.
        """
        return self._default.bind(*args, outputs=outputs, **kwargs)

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """Runs on a flat list of arrays, without the model's nesting.

        Args:
            inputs: arrays of the dtypes and shapes of `inputs`, in that order; they are not changed.
            bits: pass bfloat16, which NumPy lacks, as uint16 arrays of its bits, in and out.

        Returns:
            the arrays of `outputs`, then the new values of inputs that the model changes in place.

        Raises:
            InvalidInputError: an array does not fit.
        """
        return self._default.run_flat(inputs, bits)

    @property
    def methods(self) -> Mapping[str, Method]:
        """The program's methods by name; calling the program calls the first. For another name, KeyError lists them."""
        return self._methods

    def report(self) -> Report:
        """Where each operator of the first method runs, and why if not on the GPU. `print` it for a summary."""
        return self._default.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file, atomically.

        Raises:
            OSError: the file cannot be written.
        """
        origin = self._loaded.file
        if isinstance(origin.source, bytes | memoryview):
            with replace(path) as file:
                file.write(origin.source)
            return
        origin.check("load it again to save it")
        with open(origin.source, "rb") as source, replace(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def state(self) -> dict[str, NDArray[Any]]:
        """The model's buffers that runs change, by name, after all runs submitted so far.

        Each program has its own: another one, loaded from the same file, starts from the initial values.
        """
        native = self._loaded.native
        values = [native.read_state(number) for number in range(len(self._loaded.description.states))]
        specs = self._loaded.description.states
        found = {s.name: v for s, v in zip(specs, tensors.from_arrays(values, specs, torch=False), strict=True)}
        return found | {name: as_array(value) for name, value in self._loaded.interpreter.states.items()}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """Sets buffers that runs change.

        Args:
            values: NumPy arrays or torch tensors by the buffer's name, of its dtype and shape.

        Raises:
            InvalidInputError: there is no such buffer, or a value does not fit; then none is changed.
        """
        specs = {spec.name: spec for spec in self._loaded.description.states}
        unknown = [name for name in values if name not in specs]
        if unknown:
            raise InvalidInputError(f"The program has no state {unknown}; it has {list(specs) or 'none'}.")
        arrays, _ = tensors.to_arrays(list(values.values()), [specs[name] for name in values])
        for name, array in zip(values, arrays, strict=True):
            spec = specs[name]
            if array.shape != spec.shape or array.dtype != (np.uint16 if spec.dtype == "bfloat16" else spec.dtype):
                raise InvalidInputError(f"State {spec} cannot be given as {array.dtype} of shape {array.shape}.")
        numbers = list(specs)
        for name, array in zip(values, arrays, strict=True):
            self._loaded.native.write_state(numbers.index(name), array)

    def reset(self) -> None:
        """Restores the initial values of the buffers that runs change, after all runs submitted so far."""
        self._loaded.native.reset()
        self._loaded.interpreter.states.clear()

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
        """The strings given to `lapilli.compile`; `description.metadata` also has the compiler's own."""
        return {k: v for k, v in self._loaded.description.metadata.items() if not k.startswith(INTERNAL)}

    @property
    def device(self) -> Device:
        """The device that the program runs on."""
        return self._loaded.device

    @property
    def stamp(self) -> tuple[int, ...]:
        """What tells the file from another one at its path; empty for a program from memory."""
        return self._loaded.file.stamp

    @property
    def plan(self) -> str:
        """Name of the plan that was chosen for the device."""
        return self._loaded.plan.name

    @property
    def description(self) -> Description:
        """The content of the file: plans, kernels, constants."""
        return self._loaded.description

    def memory(self) -> MemoryInfo:
        """Device memory that the program occupies now, in bytes."""
        return self._loaded.native.memory()

    def load_times(self) -> LoadTimes:
        """Time of each step of loading, in nanoseconds."""
        return self._loaded.native.load_times()

    def missing(self) -> dict[str, list[str]]:
        """The features that the device lacks, for every plan better than the one chosen."""
        return {plan: list(reasons) for plan, reasons in self._loaded.missing.items()}

    def profile(self, inputs: Sequence[NDArray[Any]], repeat: int = 10) -> Profile:
        """Times every dispatch of a run alone.

        Args:
            inputs: as for `run_flat`; bfloat16 as uint16 arrays of its bits.
            repeat: number of measurements, of which the median counts.

        Raises:
            InvalidInputError: an array does not fit, or the method runs in several segments.
        """
        player = self._default.single
        arrays, _ = self._default.convention.values(inputs, bits=True)
        try:
            times = self._loaded.native.profile(arrays, repeat, player)
        except InvalidInputError as error:
            raise self._default.convention.told(error) from None
        method = self._loaded.description.methods[player]
        costs = self._loaded.description.memory(self._loaded.plan, method.symbol_values(arrays)).commands
        kernels = tuple(
            KernelTime(dispatch.label, dispatch.kernel, ns * 1e-9, cost.groups, cost.flops, cost.bytes)
            for dispatch, cost, ns in zip(self._loaded.plan.run, costs, times.commands, strict=True)
            if all(cost.groups)  # others have no work for these sizes, and are left out
        )
        return Profile(kernels, times.total * 1e-9)

    def close(self) -> None:
        """Frees the device memory. Waits for runs in flight; their futures keep their results."""
        self._loaded.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A program holds memory of its device, so it cannot be pickled or copied. Save it with save(path), and load it with "
            "lapilli.load(path) where it is needed; its file's bytes can be pickled."
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return html.summary(self)

    def __repr__(self) -> str:
        def show(specs: Sequence[TensorSpec]) -> str:
            return ", ".join(map(str, specs))

        return f"Program({show(self.inputs)} -> {show(self.outputs)}; plan {self.plan} on {self.device.name})"
