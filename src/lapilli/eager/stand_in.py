"""STAND-IN until the native stream is here: the same interface over host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StreamMemory:
    allocated: int
    peak_allocated: int
    reserved: int
    limit: int
    allocations: int


class Buffer:
    __slots__ = ("address", "bytes", "data", "stream")

    def __init__(self, stream: Stream, size: int) -> None:
        self.stream, self.bytes, self.data, self.address = stream, size, bytearray(size), id(self)
        stream.allocated += size
        stream.peak = max(stream.peak, stream.allocated)

    def write(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.data[offset : offset + len(view)] = view

    def read(self, offset: int, into: Any) -> Any:
        target = bytearray(into) if isinstance(into, int) else into
        view = memoryview(target).cast("B")
        view[:] = self.data[offset : offset + len(view)]
        return target

    def __del__(self) -> None:
        self.stream.allocated -= self.bytes


class Stream:
    def __init__(self, device: str | int | None = None) -> None:
        self.device, self.allocated, self.peak, self.limit = device, 0, 0, 0
        self.alignment, self.max_allocation = 16, 1 << 30
        self.info: dict[str, Any] = {"memory": 1 << 32}

    def allocate(self, size: int) -> Buffer:
        from lapilli.errors import OutOfMemoryError

        if self.limit and self.allocated + size > self.limit:
            raise OutOfMemoryError(f"{size} bytes")
        return Buffer(self, size)

    def copy(self, source: tuple[Buffer, int], target: tuple[Buffer, int], size: int) -> None:
        target[0].data[target[1] : target[1] + size] = source[0].data[source[1] : source[1] + size]

    def fill(self, target: tuple[Buffer, int], size: int, pattern: int) -> None:
        target[0].data[target[1] : target[1] + size] = pattern.to_bytes(4, "little") * (size // 4)

    def flush(self) -> None: ...
    def synchronize(self) -> None: ...
    def reset_peak_memory(self) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None: ...
    def set_memory_limit(self, size: int | None) -> None:
        self.limit = size or 0

    def memory(self) -> StreamMemory:
        return StreamMemory(self.allocated, self.peak, self.allocated, self.limit, 0)
