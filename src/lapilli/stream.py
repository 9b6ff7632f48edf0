"""Work on one device in order, on memory that stays there: what the eager device and compiled graphs run on.

A `Stream` is a queue: the calls return before the device is done, and everything takes place as if one after the other.
Its `Buffer`s come from a caching allocator. All functions may be called from several threads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from lapilli.player import _LOST, NativeProgram, _json_of, _player, check

Slice: TypeAlias = "tuple[Buffer, int]"


@dataclass(frozen=True)
class StreamMemory:
    """Memory of a stream in bytes, and how many memory objects of the driver it is in.

    ``allocated``: in buffers that exist; ``peak_allocated``: the most of that so far; ``reserved``: taken from the driver,
    in use or cached; ``limit``: of ``reserved``.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    limit: int
    allocations: int


class Buffer:
    """Device memory of a stream; deleting it gives the memory back. Made by `Stream.allocate`.

    Attributes:
        stream: the stream whose memory it is.
        bytes: its size.
        address: of the native buffer, for the functions that `Stream.launch` makes.
    """

    __slots__ = ("_freed", "address", "bytes", "stream")

    def __init__(self, stream: Stream, address: int, size: int) -> None:
        self.stream = stream
        self.address = address
        self.bytes = size
        self._freed = stream._freed  # kept here: __del__ may run while the interpreter ends

    def _handle(self) -> Any:
        return self.stream._ffi.cast("lapilli_buffer *", self.address)

    def write(self, offset: int, data: Any) -> None:
        """Copy the bytes of ``data`` (anything with a contiguous buffer) to ``offset``, in the stream's order."""
        view = self.stream._ffi.from_buffer(data)
        self.stream.check(self.stream._library.lapilli_buffer_write(self._handle(), offset, view, len(view)))

    def read(self, offset: int, into: Any) -> Any:
        """Wait for what is queued and copy bytes to the host.

        Args:
            offset: where to begin, in bytes.
            into: a writable contiguous buffer, which is filled; or a number of bytes, for a new ``bytearray``.

        Returns:
            the filled buffer.
        """
        target = bytearray(into) if isinstance(into, int) else into
        view = self.stream._ffi.from_buffer(target, require_writable=True)
        self.stream.check(self.stream._library.lapilli_buffer_read(self._handle(), offset, view, len(view)))
        return target

    def __del__(self) -> None:
        self._freed.append(self.address)  # released in bulk, before the next allocation: a native call for each is slow


def _destroyer(library: Any, freed: list[int]) -> Callable[[Any], None]:
    """What ends a stream, together with the buffers that it was still to release."""
    release, destroy = library.lapilli_buffer_release, library.lapilli_stream_destroy

    def end(handle: Any) -> None:
        for address in freed:
            release(address)
        destroy(handle)

    return end


class Stream:
    """A queue of work on one device, and the memory that it uses.

    Attributes:
        alignment: offsets of slices are multiples of this, in bytes.
        max_allocation: bytes of the largest buffer.
        info: the device as in `lapilli.player.devices`, ``alignment``, ``max_allocation`` and ``memory``.
        check: raises the exception for a status of the player that is not 0. It may be replaced, before the first launch,
            by a function that raises other exceptions.

    Raises:
        NoDriverError: there is no Vulkan driver.
        NoDeviceError: there is no such device.
    """

    def __init__(self, device: str | int | None = None, *, validation: bool = False) -> None:
        self._ffi, self._library = _player()
        self.check: Callable[[int], None] = check
        options = self._ffi.new("lapilli_load_options *")
        name = self._ffi.NULL if device is None else self._ffi.new("char[]", os.fsencode(str(device)))
        options.device = name
        options.validation = validation
        handle = self._ffi.new("lapilli_stream **")
        check(self._library.lapilli_stream_create(options, handle))
        self._acquire, self._release = self._library.lapilli_buffer_acquire, self._library.lapilli_buffer_release
        self._freed: list[int] = []  # buffers that nobody holds any more
        self._handle = self._ffi.gc(handle[0], _destroyer(self._library, self._freed))
        self.info: dict[str, Any] = _json_of(self._library.lapilli_stream_info, self._handle)
        self.alignment: int = self.info["alignment"]
        self.max_allocation: int = self.info["max_allocation"]

    def allocate(self, size: int) -> Buffer:
        """Memory of ``size`` bytes with any contents.

        Raises:
            OutOfMemoryError: there is not enough, even after the cached memory was given back to the driver.
        """
        if self._freed:
            self._release_freed()
        address = self._acquire(self._handle, size)
        if not address:
            handle = self._ffi.new("lapilli_buffer **")
            self.check(self._library.lapilli_buffer_create(self._handle, size, handle))
            address = int(self._ffi.cast("intptr_t", handle[0]))
        return Buffer(self, address, size)

    def _release_freed(self) -> None:
        with suppress(IndexError):  # another thread may be faster
            while self._freed:
                self._release(self._freed.pop())

    def _take_freed(self) -> int:
        """A buffer for the caller to release, or 0; releases all others."""
        try:
            taken = self._freed.pop()
        except IndexError:  # another thread was faster
            return 0
        if self._freed:
            self._release_freed()
        return taken

    def copy(self, source: Slice, target: Slice, size: int) -> None:
        """Copy ``size`` bytes between places (buffer, offset) of this stream that do not overlap."""
        self.check(
            self._library.lapilli_buffer_copy(source[0]._handle(), source[1], target[0]._handle(), target[1], size)
        )

    def fill(self, target: Slice, size: int, pattern: int) -> None:
        """Fill ``size`` bytes at (buffer, offset) with a pattern of 32 bits; offset and size are multiples of 4."""
        self.check(self._library.lapilli_buffer_fill(target[0]._handle(), target[1], size, pattern))

    def enqueue(
        self,
        program: NativeProgram,
        method: int,
        symbols: Sequence[int],
        inputs: Sequence[Slice],
        outputs: Sequence[Slice],
    ) -> None:
        """Run a method once, on tensors in buffers of this stream, in the stream's order.

        Args:
            program: a program on the stream's device.
            method: its index.
            symbols: the value of every symbol of the method, in its order.
            inputs: where each dense row-major input begins: (buffer, offset in bytes).
            outputs: the same for the outputs.

        Raises:
            InvalidInputError: a wrong count, a symbol out of its bounds, a slice that is too small or not aligned, or a
                program on another device.
        """
        launch = self.launch(program, method, len(symbols), len(inputs), len(outputs))
        launch(*symbols, *(word for buffer, offset in (*inputs, *outputs) for word in (buffer.address, offset)))

    def launch(
        self, program: NativeProgram, method: int, symbols: int, inputs: int, outputs: int
    ) -> Callable[..., None]:
        """A function that enqueues one method of a program with little overhead.

        It takes the values of the symbols, then `Buffer.address` and the offset of every input and of every output, all as
        positional integers. The caller keeps the buffers alive during the call.
        """
        # One packed argument, because cffi's conversion of arguments dominates the cost of a call. Each call packs new bytes,
        # so that threads do not share them.
        pack = struct.Struct(f"={4 + symbols + 2 * (inputs + outputs)}q").pack
        stream, handle, enqueue = self._handle, program._program(), self._library.lapilli_enqueue_packed
        freed, release_freed, check = self._freed, self._release_freed, self.check

        def run(*words: int) -> None:
            if freed:  # a run may need memory
                release_freed()
            status = enqueue(stream, handle, pack(method, symbols, inputs, outputs, *words))
            if status:
                check(status)

        return run

    def launch_new(
        self, program: NativeProgram, method: int, symbols: Sequence[int], inputs: int, size: int
    ) -> tuple[list[int], Callable[[list[int]], Buffer]]:
        """As `launch`, for a method with one output, to which new memory of ``size`` bytes is given by the same native call.

        Returns:
            words that end with the symbols, and a function. The caller appends the address and the offset of every input to a
            copy of the words; the function takes them, and returns the memory of the output.
        """
        words = [method, len(symbols), inputs, 1, 0, size, *symbols]
        pack = struct.Struct(f"={len(words) + 2 * inputs}q16x").pack
        stream, handle, launch = self._handle, program._program(), self._library.lapilli_launch
        freed, take_freed = self._freed, self._take_freed

        def run(words: list[int]) -> Buffer:
            if freed:
                words[4] = take_freed()
            address = launch(stream, handle, pack(*words))
            return Buffer(self, address, size) if address else enqueue_separately(words[6:])

        def enqueue_separately(words: list[int]) -> Buffer:
            """Repeats a failed launch in two calls, which say what failed."""
            buffer = self.allocate(size)
            run = self.launch(program, method, len(symbols), inputs, 1)
            run(*words, buffer.address, 0)
            return buffer

        return words, run

    @property
    def lost(self) -> bool:
        """Whether the device or queued work was lost.

        The stream then does nothing any more, and the contents of its buffers are lost. A new stream works.
        """
        return bool(self._library.lapilli_flush(self._handle) == _LOST)

    def flush(self) -> None:
        """Let the device begin with what is queued; waits for nothing."""
        self.check(self._library.lapilli_flush(self._handle))

    def synchronize(self) -> None:
        """Wait until everything that is queued is done."""
        self.check(self._library.lapilli_synchronize(self._handle))

    def memory(self) -> StreamMemory:
        """The stream's memory statistics."""
        self._release_freed()
        info = self._ffi.new("lapilli_stream_memory_info *")
        self.check(self._library.lapilli_stream_memory(self._handle, info))
        return StreamMemory(info.allocated, info.peak_allocated, info.reserved, info.limit, info.allocations)

    def reset_peak_memory(self) -> None:
        """Let ``peak_allocated`` begin anew from what is allocated now."""
        self._release_freed()
        self.check(self._library.lapilli_reset_peak_memory(self._handle))

    def empty_cache(self) -> None:
        """Give memory that no buffer uses back to the driver."""
        self._release_freed()
        self.check(self._library.lapilli_empty_cache(self._handle))

    def set_memory_limit(self, size: int | None) -> None:
        """Take no more than ``size`` bytes from the driver; None: no limit."""
        self.check(self._library.lapilli_set_memory_limit(self._handle, size or 0))
