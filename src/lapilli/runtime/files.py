"""Reads files, and writes them atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lapilli.errors import InvalidFileError, ReadError


@contextmanager
def named(source: object) -> Iterator[None]:
    """Adds the path to errors in the block."""
    try:
        yield
    except InvalidFileError as error:
        if isinstance(source, bytes | memoryview):
            raise
        raise type(error)(f"{source}: {error}") from None


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Raises ReadError, also unless it is a regular file (reading a FIFO could block forever)."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ReadError(f"{os.fspath(path)} is not a regular file.")
            return file.read()
    except ReadError:
        raise
    except OSError as error:
        raise ReadError(f"{os.fspath(path)} cannot be read: {error.strerror or error}.") from error


@contextmanager
def replace(path: str | os.PathLike[str], private: bool = False) -> Iterator[IO[bytes]]:
    """Opens a temporary file next to `path` for writing, and renames it to that when the block ends without an exception.

    private: only for this user, and not flushed to disk at once; for caches, whose entries carry digests. Raises OSError if
    it cannot be written; then nothing is left behind, and an older file is unchanged. What is there and no file (/dev/null, a
    pipe) is not replaced unless private: it is written to.
    """
    target = Path(path)
    if not private and _takes_bytes(target):
        with target.open("wb") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()  # raises if the disk is full
            if not private:
                os.fsync(file.fileno())
        if not private:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # mkstemp creates private files
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if not private:
        _sync(target.parent)


def _takes_bytes(target: Path) -> bool:
    """Whether a path is that of a device, a pipe or a socket."""
    try:
        mode = target.stat().st_mode
    except OSError:  # nothing is there, or it shows when it is written
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _sync(folder: Path) -> None:
    """Flushes a folder's entries to disk, if the system supports that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
