"""The native player from Python: a thin, typed binding over ``lapilli.h``, by cffi in ABI mode: the build makes ``abi.py``.

Arrays are NumPy, dense and row-major. NumPy has no bfloat16: such tensors are ``uint16`` arrays holding the bits
(arrays of the ``ml_dtypes`` type are accepted too). All functions may be called from several threads; the GIL is
released while the player works.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lapilli import errors
from lapilli.names import printable

Array: TypeAlias = npt.NDArray[Any]
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"

_EXCEPTIONS: dict[int, type[errors.LapilliError]] = {
    1: errors.InvalidInputError,
    2: errors.InvalidFileError,
    3: errors.ReadError,
    4: errors.NoDriverError,
    5: errors.NoDeviceError,
    6: errors.OutOfMemoryError,
    7: errors.DeviceLostError,
    8: errors.RunTimeoutError,
    9: errors.PlayerError,
    10: errors.UnsupportedOperatorError,
    11: errors.IntegerOverflowError,
}

# In the order of lapilli_dtype; uint16 stands for the bits of bfloat16.
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "uint16",
        "float32",
        "float64",
    )
)
_DTYPE_CODES: dict[np.dtype[Any], int] = {dtype: code for code, dtype in enumerate(_DTYPES)}
_BFLOAT16 = 7
MAX_RANK = 16
"""Dimensions of an input, output or state: LAPILLI_MAX_RANK."""
_NO_LIMIT = 2**64 - 1


def _library_file() -> Path:
    """The player's library: ``$LAPILLI_LIBRARY``, else the one installed in this package."""
    override = os.environ.get("LAPILLI_LIBRARY")
    if override:
        return Path(override)
    name = {"win32": "lapilli.dll", "darwin": "liblapilli.dylib"}.get(sys.platform, "liblapilli.so")
    for folder in sys.modules[__package__].__path__:  # an editable install has two: the source tree and site-packages
        candidate = Path(folder) / name
        if candidate.exists():
            return candidate
    raise errors.PlayerError(
        f"The native player ({name}) is not beside the lapilli package. Install the package with pip, or set "
        "LAPILLI_LIBRARY to the built library."
    )


@functools.cache
def _player() -> tuple[Any, Any]:
    """The cffi instance and the opened library."""
    path = _library_file()
    try:
        from lapilli.abi import ffi
    except ImportError as error:
        raise errors.PlayerError(
            f"Half of the native player is missing ({error}): install the package again."
        ) from None
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise errors.PlayerError(f"The native player {path} cannot be loaded: {error}") from None
    return ffi, library


_LOST = 7

on_loss: list[Callable[[], None]] = []
"""Called where a device was lost, before that is raised: for those who keep streams and programs."""


def check(status: int) -> None:
    """Raise the exception for a status other than LAPILLI_OK."""
    if status:
        ffi, library = _player()
        message = printable(ffi.string(library.lapilli_last_error()).decode("utf-8", "replace"), keep="")
        if status == _LOST:
            for told in on_loss:
                told()
        raise _EXCEPTIONS.get(status, errors.PlayerError)(message)


def _json_of(function: Any, *given: Any) -> Any:
    """What a function of the player says as JSON: it returns a status, and its last argument is a string that we free."""
    ffi, library = _player()
    text = ffi.new("char **")
    check(function(*given, text))
    try:
        return json.loads(ffi.string(text[0]).decode("utf-8", "replace"))  # names in a file may be anything
    finally:
        library.lapilli_free(text[0])


def _as_path(source: str | os.PathLike[str]) -> bytes:
    return os.fsencode(os.fspath(source))


def version() -> str:
    """The player's version."""
    ffi, library = _player()
    return str(ffi.string(library.lapilli_version()).decode())


def checksum(data: Any, seed: int = 0) -> int:
    """XXH64 of the bytes of ``data`` (anything with a contiguous buffer), as stored in the header of a program file."""
    ffi, library = _player()
    view = ffi.from_buffer(data)
    return int(library.lapilli_checksum(view, len(view), seed))


def devices() -> list[dict[str, Any]]:
    """The Vulkan devices of this machine, best first; see ``lapilli_devices`` in ``lapilli.h`` for the keys.

    Raises:
        NoDriverError: there is no Vulkan loader or driver.
    """
    result: list[dict[str, Any]] = _json_of(_player()[1].lapilli_devices)
    return result


NativeLimits: TypeAlias = Mapping[str, int]
"""Members of ``lapilli_limits`` by name: what a file may cost (`lapilli.Limits`). What is not there has its default."""


def _limits(limits: NativeLimits | None) -> Any:
    ffi = _player()[0]
    if limits is None:
        return ffi.NULL
    struct = ffi.new("lapilli_limits *")
    struct.struct_size = ffi.sizeof("lapilli_limits")
    for name, value in limits.items():
        setattr(struct, name, value)
    return struct


def describe(source: Source, *, verify: bool = True, limits: NativeLimits | None = None) -> dict[str, Any]:
    """Verify a program and describe its content; needs no device.

    Args:
        source: a path, or the bytes of a file.
        verify: also verify the checksum; the structure is always verified.
        limits: what the file may cost.

    Raises:
        InvalidFileError: it is not a program, damaged, truncated or of another version.
        ReadError: the file cannot be read.
    """
    ffi, library = _player()
    result: dict[str, Any]
    if isinstance(source, (bytes, bytearray, memoryview)):
        view = ffi.from_buffer(source)
        result = _json_of(library.lapilli_describe, view, len(view), not verify, _limits(limits))
    else:
        result = _json_of(library.lapilli_describe_file, _as_path(source), not verify, _limits(limits))
    return result


def plan_memory(
    source: Source, *, method: int = 0, plan: int = 0, symbols: Sequence[int] = (), verify: bool = True
) -> dict[str, Any]:
    """Where the arena's buffers are placed, and what each command costs, for given values of the symbols.

    Returns:
        ``arena``, ``sum`` and ``lower_bound`` in bytes, ``buffers`` (``buffer``, ``block``, ``offset``, ``size``) and
        ``commands`` (``groups``, ``flops``, ``bytes``) of every run.
    """
    ffi, library = _player()
    asked = (not verify, method, plan, ffi.new("int64_t[]", list(symbols)), len(symbols))
    result: dict[str, Any]
    if isinstance(source, (bytes, bytearray, memoryview)):
        view = ffi.from_buffer(source)
        result = _json_of(library.lapilli_plan_memory, view, len(view), *asked)
    else:
        result = _json_of(library.lapilli_plan_memory_file, _as_path(source), *asked)
    return result


@dataclass(frozen=True)
class NativeMethod:
    """A method of a loaded program: its name, and how many inputs, outputs and run commands it has."""

    name: str
    inputs: int
    outputs: int
    commands: int


@dataclass(frozen=True)
class MemoryInfo:
    """Device memory of a program in bytes; see ``lapilli_memory_info``."""

    constants: int
    states: int
    arena: int
    arena_sum: int
    io: int
    device_total: int


@dataclass(frozen=True)
class LoadTimes:
    """Nanoseconds that the parts of a load took; see ``lapilli_load_times``."""

    open: int
    device: int
    pipelines: int
    constants: int
    total: int


@dataclass(frozen=True)
class NativeProfile:
    """Nanoseconds of every run command (each alone) and of one whole run."""

    commands: list[int]
    total: int


def _tensors(inputs: Sequence[Array]) -> tuple[Any, list[Any]]:
    """A C array of tensors over the inputs' memory, and what must stay alive as long as it is used."""
    ffi, _ = _player()
    tensors = ffi.new("lapilli_tensor[]", len(inputs))
    alive: list[Any] = []
    for index, given in enumerate(inputs):
        array = np.asarray(given, order="C")
        code = _DTYPE_CODES.get(array.dtype)
        if code is None:
            if array.dtype.newbyteorder("=") in _DTYPE_CODES:
                raise errors.InvalidInputError(
                    f"Input {index} has dtype {array.dtype.str}, whose bytes are in another order than this machine's: give "
                    f"array.astype({array.dtype.name!r})."
                )
            if array.dtype.name != "bfloat16":
                raise errors.InvalidInputError(
                    f"Input {index} has dtype {array.dtype}, which no input has: there are bool, uint8, int8, int16, int32, "
                    "int64, float16, float32, float64 and the bits of bfloat16 as uint16."
                )
            array, code = array.view(np.uint16), _BFLOAT16
        if array.ndim > MAX_RANK:
            raise errors.InvalidInputError(
                f"Input {index} has {array.ndim} dimensions; at most {MAX_RANK} are possible."
            )
        view = ffi.from_buffer(array)
        alive.append(view)  # holds the array too
        tensor = tensors[index]
        tensor.data = view
        tensor.size = array.nbytes
        tensor.shape[0 : array.ndim] = array.shape
        tensor.rank = array.ndim
        tensor.dtype = code
    return tensors, alive


class NativeRun:
    """One run in flight or finished. Release it, or use it as a context manager; deleting it releases it too."""

    def __init__(self, handle: Any, n_outputs: int) -> None:
        ffi, self._library = _player()
        # A thread inside a call holds its own reference: what another one releases ends after the call.
        self._handle = ffi.gc(handle, self._library.lapilli_release)
        self._n_outputs = n_outputs

    def _run(self) -> Any:
        if self._handle is None:
            raise errors.InvalidInputError("This run is released; submit the program again for new results.")
        return self._handle

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the run is finished.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            RunTimeoutError: it is not finished by then; it goes on, and can be waited for again.
            IntegerOverflowError: it computed int64 results that do not fit into 32 bits.
        """
        nanoseconds = _NO_LIMIT if timeout is None else max(0, min(int(timeout * 1e9), _NO_LIMIT - 1))
        check(self._library.lapilli_wait(self._run(), nanoseconds))

    def done(self) -> bool:
        """Whether the run is finished."""
        try:
            self.wait(0)
        except errors.RunTimeoutError:
            return False
        except errors.IntegerOverflowError:
            return True
        return True

    def outputs(self) -> list[Array]:
        """Wait, and copy the outputs into new arrays."""
        ffi, library = _player()[0], self._library
        run = self._run()
        check(library.lapilli_wait(run, _NO_LIMIT))
        tensor = ffi.new("lapilli_tensor *")
        arrays: list[Array] = []
        for index in range(self._n_outputs):
            check(library.lapilli_output(run, index, tensor))
            array = np.empty(tuple(tensor.shape[0 : tensor.rank]), _DTYPES[tensor.dtype])
            if tensor.size:
                ffi.memmove(ffi.from_buffer(array), tensor.data, tensor.size)
            arrays.append(array)
        return arrays

    def release(self) -> None:
        """Give the run back; waits if it is still running. Calling it twice is fine."""
        self._handle = None

    def __enter__(self) -> NativeRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NativeBinding:
    """A method of a program bound to the caller's arrays. One thread at a time.

    A run copies the inputs to the device and the outputs back; it copies nothing else and allocates nothing.
    """

    def __init__(self, program: NativeProgram, method: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._program, self._method = program, method
        self._run = _player()[1].lapilli_run_sync
        self._inputs, self._alive = _tensors(inputs)
        self._outputs, alive = _tensors(outputs)
        self._alive += alive
        self._counts = len(inputs), len(outputs)

    def run(self) -> None:
        """Run on the current values of the inputs, wait, and store the results in the outputs."""
        n_inputs, n_outputs = self._counts
        handle = self._program._program()
        check(self._run(handle, self._method, self._inputs, n_inputs, self._outputs, n_outputs))


class NativeProgram:
    """A program loaded on one device. Close it, or use it as a context manager; deleting it closes it too."""

    def __init__(self, handle: Any) -> None:
        _, library = _player()
        # A thread inside a call holds its own reference: closing from another thread ends the program after the call.
        self._handle = _player()[0].gc(handle, library.lapilli_destroy)
        self.methods = [self._method(index) for index in range(library.lapilli_method_count(handle))]

    @classmethod
    def load(
        cls,
        source: Source,
        *,
        device: str | int | None = None,
        plan: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        staging_size: int = 0,
        verify: bool = True,
        validation: bool = False,
        allow_host: bool = False,
        limits: NativeLimits | None = None,
        first_run: bool = False,
    ) -> NativeProgram:
        """Load a program.

        Args:
            source: a path, or the bytes of a file.
            device: index, part of a name, or UUID; None: the environment variable ``LAPILLI_DEVICE``, else the best one.
            plan: name of the plan to run; None: the first that the device satisfies.
            cache_dir: folder of the pipeline cache; None: the user's cache folder; ``""``: none on disk.
            staging_size: bytes of the upload buffer; 0: 16 to 64 MiB, by the constants.
            verify: verify the checksum; the structure is always verified.
            validation: turn the Vulkan validation layer on.
            allow_host: load a program with host operators too, which the caller computes between its methods.
            limits: what the file may cost.
            first_run: check once for each file and driver that the device computes right; see `warning`.
        """
        ffi, library = _player()
        options = ffi.new("lapilli_load_options *")
        names = [
            ffi.NULL if text is None else ffi.new("char[]", os.fsencode(text))
            for text in (None if device is None else str(device), plan, cache_dir)
        ]
        options.device, options.plan, options.cache_dir = names
        options.staging_size = staging_size
        options.skip_checksum = not verify
        options.validation = validation
        options.allow_host = allow_host
        options.first_run = first_run
        given = _limits(limits)  # stays alive until the call returns
        options.limits = given
        program = ffi.new("lapilli_program **")
        if isinstance(source, (bytes, bytearray, memoryview)):
            view = ffi.from_buffer(source)
            check(library.lapilli_load_memory(view, len(view), options, program))
        else:
            check(library.lapilli_load(_as_path(source), options, program))
        return cls(program[0])

    def _program(self) -> Any:
        handle = self._handle
        if handle is None:
            raise errors.InvalidInputError("This program is closed; load it again to run it.")
        return handle

    @property
    def warning(self) -> str:
        """What the first-run check found, as a sentence; empty: nothing, or it was not asked for."""
        ffi, library = _player()
        return printable(
            ffi.string(library.lapilli_program_warning(self._program())).decode("utf-8", "replace"), keep=""
        )

    def _method(self, index: int) -> NativeMethod:
        ffi, library = _player()
        info = ffi.new("lapilli_method_info *")
        check(library.lapilli_method(self._program(), index, info))
        return NativeMethod(ffi.string(info.name).decode("utf-8", "replace"), info.inputs, info.outputs, info.commands)

    def run(self, inputs: Sequence[Array], method: int = 0, sizes: Sequence[int] = ()) -> list[Array]:
        """Run and wait.

        Args:
            inputs: one array for every input of the method, of the dtype and shape it declares.
            method: index of the method.
            sizes: values of the method's symbols that no input shows, in their order.

        Raises:
            InvalidInputError: count, dtype, rank or shape do not fit; the message names the input and what is accepted.
        """
        with self.submit(inputs, method, sizes) as run:
            return run.outputs()

    def shapes(self, method: int, symbols: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of the outputs for these values of the method's symbols; nothing is run.

        Raises:
            InvalidInputError: a wrong count, or a symbol out of its bounds.
        """
        ffi, library = _player()
        count = self.methods[method].outputs
        outputs = ffi.new("lapilli_tensor[]", count)
        check(library.lapilli_output_shapes(self._program(), method, list(symbols), len(symbols), outputs, count))
        return [tuple(t.shape[0 : t.rank]) for t in outputs]

    def symbols(self, inputs: Sequence[Array], count: int, method: int = 0) -> list[int]:
        """The values of the method's symbols, of which there are ``count``, that such inputs show.

        Raises:
            InvalidInputError: count, dtype or rank do not fit, or a symbol is out of its bounds; the message names the input.
        """
        ffi, library = _player()
        tensors, alive = _tensors(inputs)
        symbols = ffi.new("int64_t[]", count)
        check(library.lapilli_symbols(self._program(), method, tensors, len(inputs), symbols, count))
        del alive
        return list(symbols)

    def submit(self, inputs: Sequence[Array], method: int = 0, sizes: Sequence[int] = ()) -> NativeRun:
        """Start a run, as `run` does, without waiting for it; the inputs are copied before this returns."""
        ffi, library = _player()
        tensors, alive = _tensors(inputs)
        run = ffi.new("lapilli_run **")
        given = list(sizes)
        check(library.lapilli_submit_sized(self._program(), method, given, len(given), tensors, len(inputs), run))
        del alive
        return NativeRun(run[0], self.methods[method].outputs)

    def reset(self) -> None:
        """Give all states their initial values back, after the runs submitted so far."""
        _, library = _player()
        check(library.lapilli_reset(self._program()))

    def read_state(self, index: int) -> Array:
        """The value of a state after the runs submitted so far."""
        ffi, library = _player()
        spec = ffi.new("lapilli_spec *")
        check(library.lapilli_state_spec(self._program(), index, spec))
        array = np.empty(tuple(spec.shape[0 : spec.rank]), _DTYPES[spec.dtype])
        data = ffi.from_buffer(array) if array.nbytes else ffi.NULL
        check(library.lapilli_state_read(self._program(), index, data, array.nbytes))
        return array

    def write_state(self, index: int, value: Array) -> None:
        """Give a state another value, of its dtype and shape, after the runs submitted so far."""
        ffi, library = _player()
        array = np.ascontiguousarray(value)
        data = ffi.from_buffer(array) if array.nbytes else ffi.NULL
        check(library.lapilli_state_write(self._program(), index, data, array.nbytes))

    def profile(self, inputs: Sequence[Array], repeat: int = 10, method: int = 0) -> NativeProfile:
        """Time every run command alone with GPU timestamps, ``repeat`` times; medians in nanoseconds."""
        ffi, library = _player()
        tensors, alive = _tensors(inputs)
        program = self._program()
        count = ffi.new("uint32_t *")
        total = ffi.new("uint64_t *")
        times = ffi.new("uint64_t[]", self.methods[method].commands if method < len(self.methods) else 0)
        check(library.lapilli_profile(program, method, tensors, len(inputs), repeat, times, len(times), count, total))
        del alive
        return NativeProfile([int(time) for time in times], int(total[0]))

    def read_buffer(self, inputs: Sequence[Array], command: int, buffer: int, size: int, method: int = 0) -> Array:
        """The first ``size`` bytes of a buffer of the plan after running up to and including ``command``."""
        ffi, library = _player()
        tensors, alive = _tensors(inputs)
        data = np.empty(size, np.uint8)
        check(
            library.lapilli_read_buffer(
                self._program(), method, tensors, len(inputs), command, buffer, ffi.from_buffer(data), size
            )
        )
        del alive
        return data

    def memory(self) -> MemoryInfo:
        """Device memory that the program takes now."""
        ffi, library = _player()
        info = ffi.new("lapilli_memory_info *")
        check(library.lapilli_program_memory(self._program(), info))
        return MemoryInfo(info.constants, info.states, info.arena, info.arena_sum, info.io, info.device_total)

    def load_times(self) -> LoadTimes:
        """How long the parts of the load took."""
        ffi, library = _player()
        times = ffi.new("lapilli_load_times *")
        check(library.lapilli_program_load_times(self._program(), times))
        return LoadTimes(times.open, times.device, times.pipelines, times.constants, times.total)

    def describe(self) -> dict[str, Any]:
        """What `describe` says of its file, as it was when it was loaded."""
        result: dict[str, Any] = _json_of(_player()[1].lapilli_program_describe, self._program())
        return result

    def info(self) -> dict[str, Any]:
        """The chosen device and plans, and for every better plan what the device lacks."""
        result: dict[str, Any] = _json_of(_player()[1].lapilli_program_info, self._program())
        return result

    def close(self) -> None:
        """Release the program and its device memory, after its runs have finished. Calling it twice is fine."""
        self._handle = None

    def __enter__(self) -> NativeProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
