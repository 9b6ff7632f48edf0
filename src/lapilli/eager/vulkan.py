"""``torch.vulkan``: devices, memory and random numbers.

The functions and their arguments are those of ``torch.cuda``, as far as they make sense for the device. ``device`` is
always a device, its name or its index; None means the current device. Functions that take it raise ValueError for another
kind of device, and RuntimeError if there is no such device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lapilli import torch_compat
from lapilli.eager import device_state
from lapilli.runtime.compiler_packages import missing_packages

if TYPE_CHECKING:
    from lapilli.eager.properties import DeviceProperties

Where: TypeAlias = "torch.device | str | int | None"


_has_begun: Callable[[], bool]
_patch: Callable[[], None]
_begin: Callable[[], None]


def set_steps(has_begun: Callable[[], bool], patch: Callable[[], None], begin: Callable[[], None]) -> None:
    """Connects this module to `lapilli.eager.device_registration`, which registers it with PyTorch.

    Args:
        has_begun: whether the device has been used in this process.
        patch: patches PyTorch, once a program names the device.
        begin: initializes the device, at its first use.
    """
    global _has_begun, _patch, _begin
    _has_begun, _patch, _begin = has_begun, patch, begin


def is_available() -> bool:
    """Whether there is a Vulkan device, and the packages needed to compile for it are installed.

    Loads the driver at the first call; never raises.
    """
    return device_count() > 0 and not missing_packages()


def device_count() -> int:
    """The number of Vulkan devices."""
    if _pytorch_wonders(_has_begun()):
        return 0
    if not _has_begun():
        if not torch_compat.supported():
            torch_compat.warn_unsupported("The device 'vulkan'", "Until then there is none.")
            return 0
        _patch()
    return 0 if device_state.in_bad_fork() else len(device_state.found())


def _pytorch_wonders(begun: bool) -> bool:
    """Whether the caller is PyTorch itself, looking for any accelerator.

    Compilers, optimizers, data loaders and others do so even in programs that run on the CPU. Until the program has named the
    device, they find none, and behave as without Lapilli. `nn.DataParallel` and similar classes never find it: they need
    C++ parts that a device registered from Python does not have.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    asks = "" if frame is None else frame.f_globals.get("__name__", "")
    if asks == "torch._utils" and frame is not None:
        return not begun or frame.f_code.co_name == "_get_available_device_type"
    if begun:
        return False
    while frame is not None and asks.startswith("torch.accelerator"):
        frame = frame.f_back
        asks = "" if frame is None else frame.f_globals.get("__name__", "")
        if not asks.startswith("torch.accelerator"):
            return asks.startswith("torch.")
    return False


def is_initialized() -> bool:
    """Whether the device has been used in this process."""
    return _has_begun()


def __getattr__(name: str) -> Any:
    """PyTorch's checkpoints keep the state of random numbers of devices whose module has a true `_initialized`."""
    if name == "_initialized":
        return _has_begun()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init() -> None:
    """Initializes the device. Optional: the first use does it."""
    _lazy_init()


def _lazy_init() -> None:
    _begin()


def _is_in_bad_fork() -> bool:
    return device_state.in_bad_fork()


def get_device_name(device: Where = None) -> str:
    """The device's name, as the driver reports it."""
    return get_device_properties(device).name


def get_device_properties(device: Where = None) -> DeviceProperties:
    """Name, type, driver, memory in bytes, limits and features of a device."""
    from lapilli.eager.properties import DeviceProperties

    node = _found(device)
    return DeviceProperties(
        node["name"],
        node["type"],
        node["driver"],
        node["api_version"],
        node["memory"],
        node["limits"],
        node["features"],
    )


def _found(device: Where) -> dict[str, Any]:
    index = device_state.index_of(device)
    found = device_state.found()
    if index >= len(found):
        raise device_state.no_such_device(index)
    return found[index]


def current_device() -> int:
    """Index of the current device of this thread: the one that "vulkan" without an index means."""
    _patch()  # somebody is about to name the device
    return device_state.current_device()


def set_device(device: Where) -> None:
    """Makes a device the current one of this thread. None changes nothing."""
    device_state.set_current_device(device_state.index_of(device))


class device:
    """Context manager: makes a device the current one of this thread."""

    def __init__(self, device: Where) -> None:
        self._index = device_state.index_of(device)

    def __enter__(self) -> None:
        self._before = device_state.current_device()
        device_state.set_current_device(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        device_state.set_current_device(self._before)


class device_of(device):
    """Context manager: makes the device of a tensor the current one; does nothing for tensors on the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == "vulkan" else None)


def synchronize(device: Where = None) -> None:
    """Waits until the device has finished all queued work."""
    stream = device_state.streams.get(device_state.index_of(device))
    if stream is not None:
        stream.synchronize()


# --- memory


def _memory(device: Where) -> Any:
    stream = device_state.streams.get(device_state.index_of(device))
    return None if stream is None else stream.memory()


def memory_allocated(device: Where = None) -> int:
    """Bytes that tensors occupy now."""
    memory = _memory(device)
    return 0 if memory is None else memory.allocated


def max_memory_allocated(device: Where = None) -> int:
    """The most bytes that tensors occupied since the start or the last `reset_peak_memory_stats`."""
    memory = _memory(device)
    return 0 if memory is None else memory.peak_allocated


def memory_reserved(device: Where = None) -> int:
    """Bytes allocated from the driver: occupied by tensors, or cached for later ones."""
    memory = _memory(device)
    return 0 if memory is None else memory.reserved


def reset_peak_memory_stats(device: Where = None) -> None:
    """Resets `max_memory_allocated` to what is allocated now."""
    stream = device_state.streams.get(device_state.index_of(device))
    if stream is not None:
        stream.reset_peak_memory()


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Free and total bytes of the device, or of the limit set for it. Memory that other processes use counts as free."""
    total = _found(device)["memory"]
    memory = _memory(device)
    if memory is None:
        return total, total
    if memory.limit:
        total = min(total, memory.limit)
    return max(total - memory.reserved, 0), total


def empty_cache() -> None:
    """Returns cached memory that no tensor occupies to the drivers, on all devices."""
    for stream in list(device_state.streams.values()):
        stream.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Where = None) -> None:
    """Limits this process to a fraction of a device's memory.

    The environment variable LAPILLI_VULKAN_MEMORY_FRACTION does so for all devices.

    Args:
        fraction: more than 0, at most 1.
        device: the device; None: the current one.

    Raises:
        ValueError: fraction is out of range.
    """
    _lazy_init()
    index = device_state.index_of(device)
    limit = device_state.memory_limit(index, fraction)
    device_state.stream_of(index).set_memory_limit(limit)


# --- random numbers


def manual_seed(seed: int) -> None:
    """Seeds the random numbers of the current device. ``torch.manual_seed`` seeds all devices."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the random numbers of all devices."""
    from lapilli.eager import generators  # not with `import torch`

    generators.manual_seed_all(seed)


def seed() -> int:
    """Seeds the random numbers of the current device randomly; returns the seed."""
    return _generator(None).seed()


def seed_all() -> None:
    """Seeds the random numbers of all devices with the same random seed."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """The seed of the current device's random numbers."""
    return _generator(None).initial_seed()


def get_rng_state(device: Where = "vulkan") -> torch.Tensor:
    """The state of a device's random numbers: a uint8 tensor on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Where = "vulkan") -> None:
    """Restores a state that `get_rng_state` returned: a uint8 tensor."""
    _generator(device).set_state(new_state.cpu())


def _generator(device: Where) -> torch.Generator:
    from lapilli.eager import generators  # not with `import torch`

    return generators.default_generator(device_state.index_of(device))


# --- operators


def fallbacks() -> dict[str, int]:
    """Operators that ran on the CPU because the device has no kernel for them, with the number of calls."""
    from lapilli.eager import dispatch  # with the compiler: not with `import torch`

    return dict(dispatch.fallbacks())


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("vulkan", dtype=...)`` accepts."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Whether tensors may be bfloat16: on every device, which keeps them in 16 bits and computes in float32."""
    return True
