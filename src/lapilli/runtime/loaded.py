"""A program loaded on a device: what its methods share until it is closed."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapilli.errors import InvalidInputError, ReadError
from lapilli.player import NativeProgram
from lapilli.runtime.check import admit
from lapilli.runtime.description import Description, Plan
from lapilli.runtime.devices import Device
from lapilli.runtime.files import named
from lapilli.runtime.futures import Future
from lapilli.runtime.host import Permission
from lapilli.runtime.interface import Interface, interfaces
from lapilli.runtime.interpreter import HostInterpreter
from lapilli.runtime.limits import Limits
from lapilli.runtime.notice import COMPILING, Work, working


class Loaded:
    """The player's program, and the content of its file.

    Attributes:
        description: the content of the file.
        interfaces: the functions that it offers.
        interpreter: of the scripts of functions that are more than one method of the player.
        device: where it runs.
        plan: the one chosen for the device.
        missing: for every better plan, what the device lacks.
        futures: runs in flight; `close` waits for them.

    Raises as `lapilli.load`.
    """

    def __init__(
        self,
        source: Path | bytes | memoryview,
        device: str | int | None,
        permission: Permission,
        limits: Limits | None,
        first_run: bool,
    ) -> None:
        file = _File(source, _stamp(source))
        native_limits = None if limits is None else limits.native
        host = not permission.none
        with named(source), working(_work(file)):
            self._native = NativeProgram.load(
                source, device=device, allow_host=host, limits=native_limits, first_run=first_run
            )
        if self._native.warning:
            warnings.warn(self._native.warning, RuntimeWarning, stacklevel=4)
        self._close = weakref.finalize(self, self._native.close)
        try:
            self.description = Description.from_json(source, self._native.describe())
            with named(source):
                self.interfaces: list[Interface] = interfaces(self.description)
                scripts = [(i.script, i.inputs, len(i.outputs)) for i in self.interfaces if i.script is not None]
                operators = admit(scripts, self.description, permission)
            file.check("load it again")
        except BaseException:
            self._close()
            raise
        self.interpreter = HostInterpreter(
            self._native, self.description, operators, limits, _Constants(self.description, file)
        )
        self.file = file
        info = self._native.info()
        self.device = Device.from_json(info["device"])
        taken = info["methods"][0]
        self.plan: Plan = self.description.methods[0].plans[taken["plan_index"]]
        self.missing: dict[str, list[str]] = {r["plan"]: list(r["reasons"]) for r in taken["missing"]}
        self.futures: weakref.WeakSet[Future] = weakref.WeakSet()

    @property
    def native(self) -> NativeProgram:
        """The player's program. Raises InvalidInputError if it is closed."""
        if not self._close.alive:
            raise InvalidInputError("This program is closed; load it again to use it.")
        return self._native

    def close(self) -> None:
        """Frees the device memory after the runs in flight; their futures keep their results."""
        for future in list(self.futures):
            future.finish()
        self._close()


@dataclass(frozen=True)
class _File:
    """The source of a program, and a way to tell whether it has changed."""

    source: Path | bytes | memoryview
    stamp: tuple[int, ...]

    def check(self, advice: str) -> None:
        """Raises ReadError if the file was changed; advice: what to do in that case."""
        if _stamp(self.source) != self.stamp:
            raise ReadError(f"{self.source!s} was changed since the program was loaded from it; {advice}.")


_LARGE = 1 << 27
"""Bytes from which on loading is reading; smaller files take long where the driver compiles."""


def _work(file: _File) -> Work:
    size = len(file.source) if isinstance(file.source, bytes | memoryview) else file.stamp[2]
    if size < _LARGE:
        return COMPILING
    return Work(f"loading {size / 1e9:.1f} GB", f"loaded {size / 1e9:.1f} GB")


@dataclass(frozen=True)
class _Constants:
    """Constants of a file that is still the one that was loaded."""

    description: Description
    file: _File

    def __call__(self, index: int) -> Any:
        value = self.description.constant(index)
        self.file.check("load it again")
        return value


def _stamp(source: Path | bytes | memoryview) -> tuple[int, ...]:
    """A value that differs if the file is no longer the one that was loaded."""
    if isinstance(source, bytes | memoryview):
        return ()
    try:
        stat = source.stat()
    except OSError as error:
        raise ReadError(f"{source} cannot be read: {error.strerror or error}.") from error
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
