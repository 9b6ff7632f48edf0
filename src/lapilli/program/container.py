"""Writing a program file: the header, the structure (a FlatBuffer) and the data section around one another.

The layout is described in ``native/src/container.h``; the reader is the player's.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from lapilli import player

FORMAT_VERSION = 1
HEADER_SIZE = 64
ALIGNMENT = 64
"""Sections of a file, and the parts of the data section, begin at multiples of this."""

_MAGIC = b"LAPILLI\0"
_HEADER = struct.Struct("<8sII5Q8x")


def aligned(offset: int) -> int:
    """The first place at or after ``offset`` where a part of the data section may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes (bytes) begin within the data section, when they are written in this order."""
    result: list[int] = []
    end = 0
    for size in sizes:
        result.append(aligned(end))
        end = result[-1] + size
    return result


def data(source: str | os.PathLike[str] | bytes, offset: int, size: int) -> bytes:
    """Bytes of the data section of a program file, which is a path or the bytes of one."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        start = _HEADER.unpack(file.read(HEADER_SIZE))[5]
        file.seek(start + offset)
        return file.read(size)


def to_bytes(structure: bytes, data_chunks: Iterable[Any] = ()) -> bytes:
    """A program file in memory; arguments as for :func:`write`."""
    file = io.BytesIO()
    sizes = _write_sections(file, structure, data_chunks)
    body = file.getbuffer()
    header = _header(sizes, body[HEADER_SIZE:])
    body[:HEADER_SIZE] = header
    body.release()
    return file.getvalue()


def write(path_or_file: str | os.PathLike[str] | BinaryIO, structure: bytes, data_chunks: Iterable[Any] = ()) -> None:
    """Write a program file.

    A file at a path appears complete or not at all: it is written beside its place and then renamed.

    Args:
        path_or_file: a path, or a file opened for writing bytes.
        structure: the finished FlatBuffer.
        data_chunks: the parts of the data section (anything with a contiguous buffer), in order; each begins at the
            offset that :func:`offsets` gives. One at a time is held in memory when they are generated lazily.
    """
    if not isinstance(path_or_file, (str, os.PathLike)):
        path_or_file.write(to_bytes(structure, data_chunks))
        return
    path = Path(path_or_file)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            sizes = _write_sections(file, structure, data_chunks)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                header = _header(sizes, view[HEADER_SIZE:])
            file.seek(0)
            file.write(header)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp is stricter than an ordinary new file
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_sections(file: BinaryIO, structure: bytes, data_chunks: Iterable[Any]) -> tuple[int, int, int, int]:
    """Write an empty header and the sections; returns the offsets and sizes for the header."""
    file.write(bytes(HEADER_SIZE))
    file.write(structure)
    end = HEADER_SIZE + len(structure)
    data_offset = aligned(end)
    file.write(bytes(data_offset - end))
    end = data_offset
    for chunk in data_chunks:
        with memoryview(chunk) as view:
            file.write(bytes(aligned(end) - end))
            end = aligned(end) + view.nbytes
            if view.nbytes:  # an empty view cannot be cast
                with view.cast("B") as raw:
                    file.write(raw)
    return HEADER_SIZE, len(structure), data_offset, end - data_offset


def _header(sizes: tuple[int, int, int, int], body: memoryview) -> bytes:
    """The header, whose checksum covers itself (with the checksum zero) and everything after it."""
    empty = _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_SIZE, *sizes, 0)
    with body:
        checksum = player.checksum(body, seed=player.checksum(empty))
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_SIZE, *sizes, checksum)
