"""What can go wrong, as exceptions: every message says what was given, what is possible and what to do."""

from __future__ import annotations

from lapilli.names import printable


class LapilliError(Exception):
    """Base of all errors that Lapilli raises on purpose. Its message may name what a file calls itself: control characters in
    it are written out."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidInputError(LapilliError, ValueError):
    """An argument or input does not fit: count, shape, dtype, rank or an unknown name."""


class InvalidFileError(LapilliError):
    """A file is not a Lapilli program, is damaged or truncated, or is of another version."""


class SignatureError(InvalidFileError):
    """A file is not signed, was changed after it was, or was signed with another key."""


class IntegerOverflowError(LapilliError, OverflowError):
    """A run computed int64 results that do not fit into 32 bits. Inputs are as they were; states have changed."""


class NoDriverError(LapilliError):
    """There is no Vulkan loader or driver on this machine."""


class NoDeviceError(LapilliError):
    """There is no such device, or none that satisfies a plan of the program."""


class OutOfMemoryError(LapilliError, MemoryError):
    """The host or the device has not enough memory."""


class DeviceLostError(LapilliError):
    """The device stopped working, or work that was queued on it was lost; or the process was forked from one that uses it.

    What is loaded, and what tensors are made, after the loss works again."""


class RunTimeoutError(LapilliError, TimeoutError):
    """A run was not finished within the given time."""


class PlayerError(LapilliError):
    """The native player is missing or failed in a way that it should not."""


class ReadError(LapilliError, OSError):
    """A file cannot be opened or read."""


class CompileError(LapilliError):
    """A model cannot be compiled. located: the message names the place in the model already."""

    located = False


class UnsupportedOperatorError(CompileError):
    """The model uses an operator that has no lowering."""
