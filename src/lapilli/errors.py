"""The exceptions of Lapilli. Every message says what was given, what is accepted and what to do."""

from __future__ import annotations

from lapilli.names import printable


class LapilliError(Exception):
    """Base class of all errors that Lapilli raises.

    A message may quote names from a file; control characters in them are escaped.
    """

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
    """There is no such device, or no device satisfies a plan of the program."""


class OutOfMemoryError(LapilliError, MemoryError):
    """The host or the device has too little memory."""


class DeviceLostError(LapilliError):
    """The device stopped working, or lost queued work; or the process was forked from one that uses the device.

    Programs loaded and tensors created after the loss work again.
    """


class RunTimeoutError(LapilliError, TimeoutError):
    """A run was not finished within the given time."""


class PlayerError(LapilliError):
    """The native player is missing, or failed unexpectedly."""


class MissingExtraError(LapilliError, ImportError):
    """A package is not installed that an extra of Lapilli brings; the message has the pip command."""


class ReadError(LapilliError, OSError):
    """A file cannot be opened or read."""


class CompileError(LapilliError):
    """A model cannot be compiled.

    Attributes:
        located: whether the message already names the place in the model.
    """

    located = False


class UnsupportedOperatorError(CompileError):
    """The model uses an operator that has no lowering."""
