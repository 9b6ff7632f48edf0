"""A program on a device: call it, submit it, save it, ask it."""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError, ReadError, RunTimeoutError, UnsupportedOperatorError
from lapilli.format import signature
from lapilli.format.signature import Key
from lapilli.player import LoadTimes, MemoryInfo, NativeProgram, NativeRun
from lapilli.runtime import tensors, validator
from lapilli.runtime.binding import Binding
from lapilli.runtime.check import admit
from lapilli.runtime.description import INTERNAL, Description, Plan, TensorSpec
from lapilli.runtime.devices import Device
from lapilli.runtime.files import named, read_file, replace
from lapilli.runtime.host import LISTED, OWN, Permission
from lapilli.runtime.interpreter import Interpreter, as_array
from lapilli.runtime.limits import Limits
from lapilli.runtime.method import Method, ScriptRun, interfaces
from lapilli.runtime.notice import working
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


class Future:
    """A run in flight; like `concurrent.futures.Future`, but it cannot be cancelled."""

    def __init__(self, method: Method, run: NativeRun | ScriptRun, leaves: list[Any], torch: bool) -> None:
        self._method, self._run, self._leaves, self._torch = method, run, leaves, torch
        self._lock = threading.Lock()
        self._outputs: list[NDArray[Any]] | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the run is finished."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._outputs is not None or self._error is not None or self._run.done()
        finally:
            self._lock.release()

    def result(self, timeout: float | None = None) -> Any:
        """Waits at most `timeout` seconds (None: without limit) and gives what a call of the program gives.

        Raises RunTimeoutError, a TimeoutError, where it takes longer; the run goes on and can be waited for again.
        """
        self._finish(timeout)
        if self._error is not None:
            raise self._error
        assert self._outputs is not None
        return self._method.wrap(self._outputs, self._torch)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the run failed with, or None; waits as `result` does."""
        self._finish(timeout)
        return self._error

    def _finish(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0, timeout)):
            raise RunTimeoutError(f"The run is not finished after {timeout} s; wait longer.")
        try:
            if self._outputs is None and self._error is None:
                self._run.wait(None if end is None else max(0, end - time.monotonic()))
                self._outputs = self._run.outputs()
                self._run.release()
                self._method.update(self._leaves, self._outputs, self._torch)
        except RunTimeoutError:
            raise
        except BaseException as error:
            self._error = error
            self._run.release()
        finally:
            self._lock.release()


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
        self._source = source
        self._stamp = _stamp(source)
        native = None if limits is None else limits.native
        with named(source), working():
            self._native = NativeProgram.load(source, device=device, allow_host=not permission.none, limits=native)
        self._close = weakref.finalize(self, self._native.close)
        try:
            self._description = Description.of(source, verify=False, limits=native)  # the load has verified it
            with named(source):
                found = interfaces(self._description)
                scripts = [(i.script, i.inputs, len(i.outputs)) for i in found if i.script is not None]
                operators = admit(scripts, self._description, permission)
            if _stamp(source) != self._stamp:
                raise ReadError(f"{source!s} was changed while the program was loaded from it; load it again.")
        except BaseException:
            self._close()
            raise
        self._methods = {i.name: Method(self, i) for i in found}
        self._interpreter = Interpreter(self._native, self._description, operators, limits, self._constant)
        self._default = next(iter(self._methods.values()))
        info = self._native.info()
        self._device = Device.from_json(info["device"])
        self._plan: Plan = self._description.methods[0].plans[info["methods"][0]["plan_index"]]
        self._futures: weakref.WeakSet[Future] = weakref.WeakSet()

    @classmethod
    def _from_bytes(cls, data: bytes, device: str | int | None = None, permission: Permission = OWN) -> Program:
        """A program from the bytes of a file: what the compiler ends with."""
        return cls(data, device, permission=permission)

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
        if isinstance(self._source, bytes):
            with replace(path) as file:
                file.write(self._source)
            return
        if _stamp(self._source) != self._stamp:
            raise ReadError(
                f"{self._source} was changed since the program was loaded from it; load it again to save it."
            )
        with open(self._source, "rb") as source, replace(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def state(self) -> dict[str, NDArray[Any]]:
        """The buffers of the model that its runs change, by name, as they are after the runs submitted so far.

        Programs hold their own: a second one, loaded from the same file, begins anew."""
        native = self._open()
        values = [native.read_state(number) for number in range(len(self._description.states))]
        specs = self._description.states
        found = {s.name: v for s, v in zip(specs, tensors.from_arrays(values, specs, torch=False), strict=True)}
        return found | {name: as_array(value) for name, value in self._interpreter.states.items()}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """Gives buffers, by name, other values (NumPy arrays or torch tensors of their dtypes and shapes).

        Raises InvalidInputError where there is no such buffer, or the value does not fit it; then none is changed."""
        specs = {spec.name: spec for spec in self._description.states}
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
            self._open().write_state(numbers.index(name), array)

    def reset(self) -> None:
        """Gives the buffers that runs change their initial values back, after the runs submitted so far."""
        self._open().reset()
        self._interpreter.states.clear()

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
        return {k: v for k, v in self._description.metadata.items() if not k.startswith(INTERNAL)}

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._device

    @property
    def plan(self) -> str:
        """Name of the plan that was taken for the device."""
        return self._plan.name

    @property
    def description(self) -> Description:
        """What is in the file: plans, kernels, constants."""
        return self._description

    def memory(self) -> MemoryInfo:
        """Device memory that it takes now, in bytes."""
        return self._open().memory()

    def load_times(self) -> LoadTimes:
        """Nanoseconds that the parts of the load took."""
        return self._open().load_times()

    def missing(self) -> dict[str, list[str]]:
        """For every plan better than the one taken: what the device lacks for it."""
        info = self._open().info()
        return {rejected["plan"]: list(rejected["reasons"]) for rejected in info["methods"][0]["missing"]}

    def profile(self, inputs: Sequence[NDArray[Any]], repeat: int = 10) -> Profile:
        """Times every dispatch alone, `repeat` times, and gives the medians, with the work that the plan states."""
        player = self._default._player
        arrays, _ = self._default._values(inputs, bits=True)
        times = self._open().profile(arrays, repeat, player)
        method = self._description.methods[player]
        costs = self._description.memory(self._plan, method.symbol_values(arrays)).commands
        kernels = tuple(
            KernelTime(dispatch.label, dispatch.kernel, ns * 1e-9, cost.groups, cost.flops, cost.bytes)
            for dispatch, cost, ns in zip(self._plan.run, costs, times.commands, strict=True)
        )
        return Profile(kernels, times.total * 1e-9)

    def close(self) -> None:
        """Gives the device memory back. Runs in flight are waited for; their futures keep their results."""
        for future in list(self._futures):
            future._finish()
        self._close()

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

    def _constant(self, index: int) -> Any:
        """A constant of the file, which is still the one that was loaded."""
        value = self._description.constant(index)
        if _stamp(self._source) != self._stamp:
            raise ReadError(f"{self._source!s} was changed since the program was loaded from it; load it again.")
        return value

    def _open(self) -> NativeProgram:
        if not self._close.alive:
            raise InvalidInputError("This program is closed; load it again to use it.")
        return self._native

    def _future(self, method: Method, run: NativeRun | ScriptRun, leaves: list[Any], torch: bool) -> Future:
        future = Future(method, run, leaves, torch)
        self._futures.add(future)
        return future


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


def _stamp(source: Path | bytes) -> tuple[int, ...]:
    """What tells whether a file is still the one that was loaded."""
    if isinstance(source, bytes):
        return ()
    try:
        stat = source.stat()
    except OSError as error:
        raise ReadError(f"{source} cannot be read: {error.strerror or error}.") from error
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
