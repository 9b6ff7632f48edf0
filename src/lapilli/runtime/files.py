"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lapilli.errors import InvalidFileError


@contextmanager
def named(source: object) -> Iterator[None]:
    """Puts the path before what is wrong with the file."""
    try:
        yield
    except InvalidFileError as error:
        if isinstance(source, bytes):
            raise
        raise InvalidFileError(f"{source}: {error}") from None


@contextmanager
def replace(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path` for writing and moves it there when the block ends without an exception.

    Raises OSError where it cannot be written; then nothing is left behind and an older file stays as it was.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp made it private
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
