"""Bounds on the resources of a program, for callers who open files from untrusted sources."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, fields
from typing import Any

from lapilli.errors import InvalidFileError, InvalidInputError, RunTimeoutError
from lapilli.player import NativeLimits

METADATA_BYTES = 16 << 20
"""Maximum length of a metadata entry that is read as JSON (methods, preprocess, labels), in characters."""

_CALLS = 10_000_000


@dataclass(frozen=True)
class Limits:
    """Bounds on the resources of a file and its runs, for `lapilli.load`. None: the default.

    A file beyond them raises InvalidFileError; a run InvalidInputError, OutOfMemoryError or RunTimeoutError. `lapilli.h`
    (`lapilli_limits`) lists further limits, which are fixed.
    """

    bytes: int | None = None
    """Size of a value that an operator on the CPU creates. Default: the machine's memory."""
    seconds: float | None = None
    """Time of a run's work on the host, checked between its calls, and of each wait for the device. Default: no limit."""
    calls: int = _CALLS
    """Operators, segments and scalar computations on the host in one run; every iteration of a loop counts."""
    device_bytes: int | None = None
    """Memory of the program and its runs, on the device and for transfers. Default: no limit."""
    groups: int | None = None
    """Work groups of one command. Default: 2^30."""
    structure_bytes: int | None = None
    """Size of a file's tables. Default: 64 MiB."""
    code_bytes: int | None = None
    """Size of the SPIR-V of all kernels. Default: 256 MiB."""
    entries: int | None = None
    """Items of all lists in the tables. Default: 4,194,304."""
    expressions: int | None = None
    """Nodes of the size expressions of all methods. Default: 1,048,576."""
    description_bytes: int | None = None
    """Size of the JSON that describes the file to Python. Default: 64 MiB."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and not 0 < value < 2**63:
                raise InvalidInputError(f"Limits: {entry.name} is {value}; give a number above 0, or leave it out.")

    @property
    def native(self) -> NativeLimits:
        """The limits that the player enforces."""
        found: dict[str, int] = {name: value for name in _NATIVE if (value := getattr(self, name)) is not None}
        if self.seconds is not None:
            found["run_nanoseconds"] = max(1, min(int(self.seconds * 1e9), _NO_LIMIT))
        return found


_NATIVE = ("structure_bytes", "code_bytes", "entries", "expressions", "description_bytes", "device_bytes", "groups")
_NO_LIMIT = 2**63 - 1


def load_json(text: str, what: str) -> Any:
    """Parses JSON from a file's metadata.

    Args:
        text: the JSON.
        what: its name in error messages.

    Raises:
        InvalidFileError: it is not JSON, or too long or too deeply nested.
    """
    if len(text) > METADATA_BYTES:
        raise InvalidFileError(f"{what} has {len(text)} characters; at most {METADATA_BYTES} are read.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{what} is no JSON: {str(error)[:200]}.") from error


@dataclass
class Budget:
    """The part of the limits that one run has used."""

    limits: Limits
    calls: int = 0
    started: float = field(default_factory=time.monotonic)

    def spend(self) -> None:
        """Counts one call on the host; to be called before it.

        Raises:
            InvalidInputError: the run makes too many calls.
            RunTimeoutError: the run takes too long.
        """
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
