"""A program on a device: call it, submit it, save it, ask it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError, UnsupportedOperatorError
from lapilli.format import signature
from lapilli.format.signature import Key
from lapilli.player import LoadTimes, MemoryInfo
from lapilli.runtime import tensors, validator
from lapilli.runtime.binding import Binding
from lapilli.runtime.description import INTERNAL, Description, TensorSpec
from lapilli.runtime.devices import Device
from lapilli.runtime.files import named, read_file, replace
from lapilli.runtime.futures import Future
from lapilli.runtime.host import LISTED, Permission
from lapilli.runtime.interpreter import as_array
from lapilli.runtime.limits import Limits
from lapilli.runtime.loaded import Loaded
from lapilli.runtime.method import Method
from lapilli.runtime.report import Report


@dataclass(frozen=True)
class KernelTime:
    """One dispatch of a run, timed alone on the device."""

    label: str
    kernel: str
    seconds: float
    groups: tuple[int, ...]
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Times of a run by the device's own clock."""

    kernels: tuple[KernelTime, ...]
    seconds: float
    """Of a whole run, without the host and without the extra barriers that the kernels' times need."""


class Program:
    """A compiled model on one device.

    Made by `lapilli.compile` and `lapilli.load`. It may be called from several threads at once. It holds device memory
    until it is closed, used up as a context manager, or collected.
    """

    def __init__(
        self,
        source: Path | bytes,
        device: str | int | None = None,
        *,
        permission: Permission = LISTED,
        limits: Limits | None = None,
    ) -> None:
        """permission: which operators of torch its scripts may name; limits: what the file and its runs may take."""
        self._loaded = Loaded(source, device, permission, limits)
        self._methods = {i.name: Method(self._loaded, i) for i in self._loaded.interfaces}
        self._default = next(iter(self._methods.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on its inputs, nested as the model has them; waits for the result.

        torch tensors in, torch tensors out; NumPy arrays in, NumPy arrays out. Tensors of the device "vulkan" that the program
        is on give such, without a copy to the host and without waiting: the run is queued behind what they are made of.
        Nothing is cast: dtypes and shapes must be those of `inputs`. No gradients are recorded. Inputs that the model changes
        in place are changed; buffers that it changes are kept on the device from run to run (`state`, `reset`).

        Raises InvalidInputError that says what was given and what is accepted.
        """
        return self._default(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """Starts a run and returns at once; the inputs are copied and may be changed. Several runs may be in flight.

        Inputs that the model itself changes get their new values when the future's result is taken."""
        return self._default.submit(*args, **kwargs)

    def bind(self, *args: Any, outputs: Any = None, **kwargs: Any) -> Binding:
        """Binds input and output tensors for many runs, which then allocate nothing: `run = program.bind(x)`, and for every
        run fill x, call `run()`, read `run.outputs`.

        The inputs are those of a call, and used where they lie: contiguous, or in channels-last format where the example was.
        outputs: tensors for the results, nested as the model has them; None: new ones. Raises InvalidInputError where memory
        cannot be used as it is, and for methods that are computed in several segments.
        """
        return self._default.bind(*args, outputs=outputs, **kwargs)

    def run_flat(self, inputs: Sequence[NDArray[Any]], bits: bool = False) -> list[NDArray[Any]]:
        """Runs on the flat list of `inputs` and gives the flat list of `outputs`, as NumPy arrays. The new values of inputs
        that the model changes are the last outputs; the arrays given are left alone. bits: bfloat16, which NumPy lacks, as
        its bits in uint16 arrays, in and out."""
        return self._default.run_flat(inputs, bits)

    @property
    def methods(self) -> Mapping[str, Method]:
        """The functions that the program offers, by name; calling the program calls the first."""
        return self._methods

    def report(self) -> Report:
        """Where the operators of the first method run, and why not on the GPU. `print` it for a summary."""
        return self._default.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file, which appears whole or not at all. Raises OSError where that fails."""
        origin = self._loaded.file
        if isinstance(origin.source, bytes):
            with replace(path) as file:
                file.write(origin.source)
            return
        origin.check("load it again to save it")
        with open(origin.source, "rb") as source, replace(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def state(self) -> dict[str, NDArray[Any]]:
        """The buffers of the model that its runs change, by name, as they are after the runs submitted so far.

        Programs hold their own: a second one, loaded from the same file, begins anew."""
        native = self._loaded.native
        values = [native.read_state(number) for number in range(len(self._loaded.description.states))]
        specs = self._loaded.description.states
        found = {s.name: v for s, v in zip(specs, tensors.from_arrays(values, specs, torch=False), strict=True)}
        return found | {name: as_array(value) for name, value in self._loaded.interpreter.states.items()}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """Gives buffers, by name, other values (NumPy arrays or torch tensors of their dtypes and shapes).

        Raises InvalidInputError where there is no such buffer, or the value does not fit it; then none is changed."""
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
        """Gives the buffers that runs change their initial values back, after the runs submitted so far."""
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
        """Strings that travel in the file: what `lapilli.compile` was given (`description.metadata` has the compiler's own too)."""
        return {k: v for k, v in self._loaded.description.metadata.items() if not k.startswith(INTERNAL)}

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._loaded.device

    @property
    def plan(self) -> str:
        """Name of the plan that was taken for the device."""
        return self._loaded.plan.name

    @property
    def description(self) -> Description:
        """What is in the file: plans, kernels, constants."""
        return self._loaded.description

    def memory(self) -> MemoryInfo:
        """Device memory that it takes now, in bytes."""
        return self._loaded.native.memory()

    def load_times(self) -> LoadTimes:
        """Nanoseconds that the parts of the load took."""
        return self._loaded.native.load_times()

    def missing(self) -> dict[str, list[str]]:
        """For every plan better than the one taken: what the device lacks for it."""
        return {plan: list(reasons) for plan, reasons in self._loaded.missing.items()}

    def profile(self, inputs: Sequence[NDArray[Any]], repeat: int = 10) -> Profile:
        """Times every dispatch alone, `repeat` times, and gives the medians, with the work that the plan states."""
        player = self._default.single
        arrays, _ = self._default.convention.values(inputs, bits=True)
        times = self._loaded.native.profile(arrays, repeat, player)
        method = self._loaded.description.methods[player]
        costs = self._loaded.description.memory(self._loaded.plan, method.symbol_values(arrays)).commands
        kernels = tuple(
            KernelTime(dispatch.label, dispatch.kernel, ns * 1e-9, cost.groups, cost.flops, cost.bytes)
            for dispatch, cost, ns in zip(self._loaded.plan.run, costs, times.commands, strict=True)
        )
        return Profile(kernels, times.total * 1e-9)

    def close(self) -> None:
        """Gives the device memory back. Runs in flight are waited for; their futures keep their results."""
        self._loaded.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        def show(specs: Sequence[TensorSpec]) -> str:
            return ", ".join(map(str, specs))

        return f"Program({show(self.inputs)} -> {show(self.outputs)}; plan {self.plan} on {self.device.name})"


def load(
    path: str | os.PathLike[str],
    device: str | int | None = None,
    *,
    allow_host: bool | Collection[str] = True,
    limits: Limits | None = None,
    public_key: Key | None = None,
    verify: Literal["structure", "full"] = "structure",
) -> Program:
    """Loads a program from a file and makes it ready to run.

    device: index or part of a name (see `devices`); None: the environment variable LAPILLI_DEVICE, else the best one.
    allow_host: whether the file may call operators of torch on the CPU, where the GPU has none. True: those of a list, which
        compute new tensors from tensors and numbers. False: none; a file that does is refused. Names of operators
        ("mylib.f.default") or of namespaces ("mylib"): these too, because you know them.
    limits: what the file and its runs may take.
    public_key: of who must have signed the file (`lapilli sign`): the path of a PEM file, its content, or 32 bytes. The file is
        then read into memory once, and what was verified is what is loaded. Needs the extra `sign`.
    verify: "full": SPIRV-Tools' validator looks at all kernels too, some 10 ms each. Needs the extra `validate`. The player's own
        verification of structure and kernels ("structure") always takes place.

    Raises ReadError, InvalidFileError (damaged, or no program, or one that names what it may not), SignatureError,
    UnsupportedOperatorError (with allow_host=False), NoDriverError, NoDeviceError, OutOfMemoryError.
    """
    source: Path | bytes = Path(path)
    if verify not in ("structure", "full"):
        raise InvalidInputError(f'verify is {verify!r}; it can be "structure" or "full".')
    if public_key is not None or verify == "full":
        source = read_file(path)
        with named(path):
            if public_key is not None:
                signature.verify(source, public_key)
            if verify == "full":
                validator.validate(source, None if limits is None else limits.native)
    try:
        return Program(source, device, permission=Permission.of(allow_host), limits=limits)
    except UnsupportedOperatorError as error:
        if allow_host is not False:
            raise
        raise UnsupportedOperatorError(
            f"{path}: the program calls operators of torch on the CPU, which allow_host=False refuses (`lapilli verify` names "
            'them). Load it without that, or compile it with fallback="error".'
        ) from error
