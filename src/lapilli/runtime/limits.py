"""What a program may take at most, for callers who open files of strangers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, fields
from typing import Any

from lapilli.errors import InvalidFileError, InvalidInputError, RunTimeoutError
from lapilli.player import NativeLimits

METADATA_BYTES = 16 << 20
"""Characters of one metadata entry that is read as JSON (methods, preprocess, labels)."""

_CALLS = 10_000_000


@dataclass(frozen=True)
class Limits:
    """What a file and its runs may take; None: the default. Given to `lapilli.load`. A file beyond them raises InvalidFileError,
    a run InvalidInputError, OutOfMemoryError or RunTimeoutError. `lapilli.h` (`lapilli_limits`) says which limits of a file
    cannot be changed."""

    bytes: int | None = None
    """Of a value that an operator on the CPU may make: what the machine has."""
    seconds: float | None = None
    """Of a run's part on the host, looked at between its calls, and of each wait for the device: no limit."""
    calls: int = _CALLS
    """Of operators, segments and numbers on the host in one run, every turn of a loop counted."""
    device_bytes: int | None = None
    """Memory of the program and its runs on the device and for transfers: all that there is."""
    groups: int | None = None
    """Work groups of one command: 2^30."""
    structure_bytes: int | None = None
    """Of a file's tables: 64 MiB."""
    code_bytes: int | None = None
    """Of the SPIR-V of all kernels: 256 MiB."""
    entries: int | None = None
    """Items of all lists in the tables: 4,194,304."""
    expressions: int | None = None
    """Of all methods: 1,048,576."""
    description_bytes: int | None = None
    """Of the JSON that describes the file to Python: 64 MiB."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and not 0 < value < 2**63:
                raise InvalidInputError(f"Limits: {entry.name} is {value}; give a number above 0, or leave it out.")

    @property
    def native(self) -> NativeLimits:
        """Those that the player keeps."""
        found: dict[str, int] = {name: value for name in _NATIVE if (value := getattr(self, name)) is not None}
        if self.seconds is not None:
            found["run_nanoseconds"] = max(1, min(int(self.seconds * 1e9), _NO_LIMIT))
        return found


_NATIVE = ("structure_bytes", "code_bytes", "entries", "expressions", "description_bytes", "device_bytes", "groups")
_NO_LIMIT = 2**63 - 1


def load_json(text: str, what: str) -> Any:
    """JSON of a file's metadata. Raises InvalidFileError where it is none, or too long or too deep to be read."""
    if len(text) > METADATA_BYTES:
        raise InvalidFileError(f"{what} has {len(text)} characters; at most {METADATA_BYTES} are read.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{what} is no JSON: {str(error)[:200]}.") from error


@dataclass
class Budget:
    """What is left of the limits in one run."""

    limits: Limits
    calls: int = 0
    started: float = field(default_factory=time.monotonic)

    def spend(self) -> None:
        """Before every call. Raises InvalidInputError or RunTimeoutError where a limit is reached."""
        self.calls += 1
        if self.calls > self.limits.calls:
            raise InvalidInputError(
                f"The run makes more than {self.limits.calls} calls on the host; load the program with "
                "limits=lapilli.Limits(calls=...) if its loops are meant to be that long."
            )
        if self.limits.seconds is not None and time.monotonic() - self.started > self.limits.seconds:
            raise RunTimeoutError(
                f"The run took longer on the host than the {self.limits.seconds} s that it was given."
            )
