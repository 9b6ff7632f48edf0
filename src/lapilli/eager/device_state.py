"""The available devices, the current one, and their streams."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lapilli.errors import LapilliError, OutOfMemoryError

# `import torch` imports this module: the player (and with it NumPy) is imported by the first function that needs it.
if TYPE_CHECKING:
    import torch

    from lapilli.stream import Stream

NAMES = ("vulkan", "privateuseone")
"""PyTorch's name of the device type; before the announcement, that of the dispatch key."""

streams: dict[int, Stream] = {}
"""The streams in use, by device index."""

on_loss: list[Callable[[int], None]] = []
"""Functions called with the index of a lost device; they drop cached programs and launches for it."""

_lost: set[int] = set()
_lock = threading.Lock()
_thread = threading.local()
_forked = False


@functools.cache
def found() -> tuple[dict[str, Any], ...]:
    """The Vulkan devices of this machine as described by `lapilli.player.devices`; none without a driver."""
    from lapilli import player

    try:
        return tuple(player.devices())
    except LapilliError:
        return ()


def current_device() -> int:
    """The index of the device that "vulkan" without an index refers to in this thread."""
    return getattr(_thread, "index", 0)


def set_current_device(index: int) -> None:
    _thread.index = index


def index_of(device: torch.device | str | int | None) -> int:
    """The index of a device, given as such, by name, by index, or as None (the current one).

    Raises ValueError for another type of device, and RuntimeError if there is no such device.
    """
    if device is None:
        index = None
    elif isinstance(device, int):
        index = device
    else:
        import torch

        device = torch.device(device)
        if device.type not in NAMES:
            raise ValueError(f"Expected a vulkan device, but got {device}.")
        index = device.index
    if index is None:
        return current_device()
    if not 0 <= index < len(found()):
        raise no_such_device(index)
    return index


def is_ours(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device of this type."""
    return tensor.device.type in NAMES


def place(index: int) -> torch.device:
    """The device `vulkan:<index>`, whether or not it has been announced."""
    import torch

    return torch.device("privateuseone", index)


def no_such_device(index: int) -> RuntimeError:
    """The error for an index out of range."""
    names = [f"vulkan:{place} ({device['name']})" for place, device in enumerate(found())]
    if names:
        return RuntimeError(f"There is no device vulkan:{index}. There are: {', '.join(names)}.")
    from lapilli import player

    try:
        player.devices()
        reason = "The Vulkan drivers of this machine offer no device."
    except LapilliError as error:
        reason = str(error)
    return RuntimeError(f"There is no Vulkan device: {reason} torch.vulkan.is_available() tells beforehand.")


def open_stream(index: int) -> Stream:
    """Creates the stream of a device.

    Raises RuntimeError if there is no such device, and in a forked child of a process that used one.
    """
    from lapilli import player
    from lapilli.stream import Stream

    check_fork()
    with _lock:
        if index not in streams:
            if not 0 <= index < len(found()):
                raise no_such_device(index)
            if _forget_lost not in player.on_loss:
                player.on_loss.append(_forget_lost)
                atexit.register(_finish)
            stream = Stream(str(index))
            stream.check = functools.partial(_check, index)
            fraction = os.environ.get("LAPILLI_VULKAN_MEMORY_FRACTION")
            if fraction is not None:
                stream.set_memory_limit(memory_limit(index, fraction))
            streams[index] = stream
    return streams[index]


def _finish() -> None:
    """Waits for what is queued: a software driver that is still compiling its kernels when the process ends crashes."""
    for stream in list(streams.values()):
        with contextlib.suppress(Exception):
            check_fork()
            stream.synchronize()


def _check(index: int, status: int) -> None:
    """Converts errors of the player to PyTorch's exceptions, where it has a corresponding one."""
    from lapilli import player

    try:
        player.check(status)
    except OutOfMemoryError as error:
        import torch

        raise torch.OutOfMemoryError(
            f"vulkan:{index} is out of memory: {error} torch.vulkan.memory_allocated() shows how much tensors hold."
        ) from None


def _forget_lost() -> None:
    """Drops the streams of lost devices. The next tensor opens the device again; existing tensors stay lost."""
    for index, stream in list(streams.items()):
        if stream.lost:
            _lost.add(index)
            streams.pop(index, None)
    for index in _lost:  # including what another thread cached meanwhile for the lost device
        for forget in on_loss:
            forget(index)


def stream_of(index: int) -> Stream:
    """The stream of a device, created at its first use. Raises as `open_stream`."""
    return streams.get(index) or open_stream(index)


def memory_limit(index: int, fraction: str | float) -> int:
    """A fraction of a device's memory, in bytes. Raises ValueError if it is not in (0, 1]."""
    try:
        value = float(fraction)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"The fraction of a device's memory is more than 0 and at most 1, but {fraction!r} was given.")
    return int(value * found()[index]["memory"])


def check_fork() -> None:
    """Raises RuntimeError in a forked child of a process that had used a device: drivers do not survive a fork."""
    if _forked:
        raise RuntimeError(
            "A vulkan device cannot be used in a forked child of a process that has used one. To use it in several "
            "processes start them by 'spawn': torch.multiprocessing.set_start_method('spawn')."
        )


def in_bad_fork() -> bool:
    return _forked


def _after_fork() -> None:
    global _forked
    if streams:
        _forked = True
        streams.clear()
        # Autograd's threads are not here, and PyTorch would wait ten seconds for their end at exit.
        os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")


os.register_at_fork(after_in_child=_after_fork)
