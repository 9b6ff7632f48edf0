"""Program files through Ray's object store: to each node once, and shared by the processes there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from lapilli.errors import ReadError
from lapilli.runtime.description import Description


@dataclass(frozen=True)
class Shipped:
    """A program file in the object store. It stays there as long as the process that shipped it keeps this.

    Attributes:
        content: reference to its bytes.
        name: for messages.
    """

    content: Any
    name: str

    def bytes(self) -> memoryview:
        """The file, in memory that all processes of the node share."""
        array = ray.get(self.content)
        return memoryview(array)


def ship(path: str | os.PathLike[str]) -> Shipped:
    """Puts a program file into the object store.

    Args:
        path: the file.

    Raises:
        ReadError: the file cannot be read.
        InvalidFileError: it is no program.
    """
    Description.of(path)
    try:
        return Shipped(ray.put(np.asarray(np.memmap(path, np.uint8, "r"))), os.path.basename(os.fspath(path)))
    except OSError as error:
        raise ReadError(f"{os.fspath(path)} cannot be read: {error.strerror or error}.") from error
