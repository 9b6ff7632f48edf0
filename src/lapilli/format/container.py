"""Builds a program file: the header, the structure (a FlatBuffer) and the data section.

The layout is described in ``native/src/format/container.h``; the player reads it.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from lapilli import player
from lapilli.errors import InvalidFileError

FORMAT_VERSION = 2
HEADER_SIZE = 64
ALIGNMENT = 64
"""Sections of a file, and the parts of the data section, begin at multiples of this."""

_MAGIC = b"LAPILLI\0"
_HEADER = struct.Struct("<8sII5Q8x")


def aligned(offset: int) -> int:
    """The first offset, at or after ``offset``, at which a part of the data section may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def data(source: str | os.PathLike[str] | bytes | memoryview, offset: int, size: int) -> bytes:
    """Bytes of the data section of a program file, which is given by its path or its content."""
    if isinstance(source, bytes | memoryview):
        begin: int = _HEADER.unpack_from(source)[5] + offset
        return bytes(source[begin : begin + size])
    with open(source, "rb") as file:
        start = _HEADER.unpack(file.read(HEADER_SIZE))[5]
        file.seek(start + offset)
        return file.read(size)


@dataclass(frozen=True)
class Header:
    """The header of a program file: offsets and sizes in bytes, and the checksum."""

    structure_offset: int
    structure_size: int
    data_offset: int
    data_size: int
    checksum: int


def read_header(data: bytes) -> Header:
    """The header of a program file. Raises InvalidFileError unless it is that of a complete program of this version."""
    if len(data) < HEADER_SIZE:
        raise InvalidFileError("This is not a Lapilli program: it is shorter than a header.")
    magic, version, size, *rest = _HEADER.unpack_from(data)
    header = Header(*rest)
    if magic != _MAGIC:
        raise InvalidFileError("This is not a Lapilli program.")
    if version != FORMAT_VERSION:
        raise InvalidFileError(
            f"The program has format version {version}, and this Lapilli reads version {FORMAT_VERSION}: compile the model again."
        )
    if size != HEADER_SIZE or any(data[HEADER_SIZE - 8 : HEADER_SIZE]):
        raise InvalidFileError("The program is damaged: its header is invalid.")
    if header.data_offset + header.data_size != len(data) or header.structure_size > header.data_offset - HEADER_SIZE:
        raise InvalidFileError("The program is truncated or damaged.")
    return header


def to_bytes(structure: bytes, data_chunks: Iterable[Any] = ()) -> bytes:
    """A program file in memory.

    Args:
        structure: the finished FlatBuffer.
        data_chunks: the parts of the data section (anything with a contiguous buffer), in order; each begins at the next
            multiple of ``ALIGNMENT``.
    """
    file = io.BytesIO()
    sizes = _write_sections(file, structure, data_chunks)
    body = file.getbuffer()
    header = _header(sizes, body[HEADER_SIZE:])
    body[:HEADER_SIZE] = header
    body.release()
    return file.getvalue()


def _write_sections(file: BinaryIO, structure: bytes, data_chunks: Iterable[Any]) -> tuple[int, int, int, int]:
    """Writes an empty header and the sections; returns the offsets and sizes for the header."""
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


def pack_header(sizes: tuple[int, int, int, int], checksum: int) -> bytes:
    """The bytes of a header."""
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_SIZE, *sizes, checksum)


def from_body(sizes: tuple[int, int, int, int], body: bytes) -> bytes:
    """A file from the bytes after its header."""
    return _header(sizes, memoryview(body)) + body


def _header(sizes: tuple[int, int, int, int], body: memoryview) -> bytes:
    """The header, whose checksum covers itself (with the checksum zero) and everything after it."""
    empty = pack_header(sizes, 0)
    with body:
        checksum = player.checksum(body, seed=player.checksum(empty))
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_SIZE, *sizes, checksum)
