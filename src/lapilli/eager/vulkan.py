"""``torch.vulkan``: devices, memory and random numbers.

The functions and their arguments are those of ``torch.cuda``, as far as they make sense for the device. ``device`` is
always a device, its name or its index; None means the current device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lapilli import torch_compat
from lapilli.eager import devices
from lapilli.runtime.compiler_packages import missing_packages

if TYPE_CHECKING:
    from lapilli.eager.properties import DeviceProperties

Where: TypeAlias = "torch.device | str | int | None"


_has_begun: Callable[[], bool]
_patch: Callable[[], None]
_begin: Callable[[], None]


def set_steps(has_begun: Callable[[], bool], patch: Callable[[], None], begin: Callable[[], None]) -> None:
    """Of `lapilli.eager.device`, which hands this module to PyTorch: whether the device was used, what PyTorch is told when
    somebody names it, and what the first use does."""
    global _has_begun, _patch, _begin
    _has_begun, _patch, _begin = has_begun, patch, begin


def is_available() -> bool:
    """Whether there is a Vulkan device, and what it takes to compile for it. Touches the driver at the first call; never
    raises."""
    return device_count() > 0 and not missing_packages()


def device_count() -> int:
    """How many Vulkan devices there are."""
    if _pytorch_wonders(_has_begun()):
        return 0
    if not _has_begun():
        if not torch_compat.supported():
            torch_compat.warn_unsupported("The device 'vulkan'", "Until then there is none.")
            return 0
        _patch()
    return 0 if devices.in_bad_fork() else len(devices.found())


def _pytorch_wonders(begun: bool) -> bool:
    """Whether PyTorch itself asks for any accelerator that there may be: compilers, optimizers, data loaders and others do in
    programs of the CPU. As long as the program has not named the device, they find none, and do what they did without it.
    `nn.DataParallel` and its like never find it: they need parts in C++ that a device of Python does not have."""
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


def init() -> None:
    """Makes the device ready. Not needed: the first use does it."""
    _lazy_init()


def _lazy_init() -> None:
    _begin()


def _is_in_bad_fork() -> bool:
    return devices.in_bad_fork()


def get_device_name(device: Where = None) -> str:
    """The name that the driver gives the device."""
    return get_device_properties(device).name


def get_device_properties(device: Where = None) -> DeviceProperties:
    """What a device is and can. Raises RuntimeError where there is no such device."""
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
    index = devices.index_of(device)
    found = devices.found()
    if index >= len(found):
        raise devices.no_such_device(index)
    return found[index]


def current_device() -> int:
    """Index of the device that "vulkan" means in this thread."""
    _patch()  # somebody is about to name the device
    return devices.current_device()


def set_device(device: Where) -> None:
    """Makes a device the current one of this thread."""
    devices.set_current_device(devices.index_of(device))


class device:
    """Context manager: makes a device the current one of this thread."""

    def __init__(self, device: Where) -> None:
        self._index = devices.index_of(device)

    def __enter__(self) -> None:
        self._before = devices.current_device()
        devices.set_current_device(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        devices.set_current_device(self._before)


class device_of(device):
    """Context manager: makes the device of a tensor the current one; does nothing for tensors of the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == "vulkan" else None)


def synchronize(device: Where = None) -> None:
    """Waits until the device has done all work that is queued."""
    stream = devices.streams.get(devices.index_of(device))
    if stream is not None:
        stream.synchronize()


# --- memory


def _memory(device: Where) -> Any:
    stream = devices.streams.get(devices.index_of(device))
    return None if stream is None else stream.memory()


def memory_allocated(device: Where = None) -> int:
    """Bytes that tensors hold now."""
    memory = _memory(device)
    return 0 if memory is None else memory.allocated


def max_memory_allocated(device: Where = None) -> int:
    """The most bytes that tensors held since the start or `reset_peak_memory_stats`."""
    memory = _memory(device)
    return 0 if memory is None else memory.peak_allocated


def memory_reserved(device: Where = None) -> int:
    """Bytes taken from the driver: in use, or kept for the tensors to come."""
    memory = _memory(device)
    return 0 if memory is None else memory.reserved


def reset_peak_memory_stats(device: Where = None) -> None:
    """Lets `max_memory_allocated` begin anew."""
    stream = devices.streams.get(devices.index_of(device))
    if stream is not None:
        stream.reset_peak_memory()


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Bytes still to be had, and all bytes of the device or of the limit set. Vulkan does not tell what other programs use."""
    total = _found(device)["memory"]
    memory = _memory(device)
    if memory is None:
        return total, total
    if memory.limit:
        total = min(total, memory.limit)
    return max(total - memory.reserved, 0), total


def empty_cache() -> None:
    """Gives memory that no tensor holds back to the drivers."""
    for stream in list(devices.streams.values()):
        stream.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Where = None) -> None:
    """Lets this process take no more than a fraction (more than 0, at most 1) of a device's memory.

    The environment variable LAPILLI_VULKAN_MEMORY_FRACTION does it for all devices.
    """
    _lazy_init()
    index = devices.index_of(device)
    limit = devices.memory_limit(index, fraction)
    devices.stream_of(index).set_memory_limit(limit)


# --- random numbers


def manual_seed(seed: int) -> None:
    """Seeds the random numbers of the current device. ``torch.manual_seed`` seeds all devices."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the random numbers of all devices."""
    from lapilli.eager import generators  # not with `import torch`

    generators.manual_seed_all(seed)


def seed() -> int:
    """Seeds the random numbers of the current device by chance; returns the seed."""
    return _generator(None).seed()


def seed_all() -> None:
    """Seeds the random numbers of all devices by chance, all alike."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """What the current device was seeded with."""
    return _generator(None).initial_seed()


def get_rng_state(device: Where = "vulkan") -> torch.Tensor:
    """The state of a device's random numbers: a uint8 tensor on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Where = "vulkan") -> None:
    """Sets what `get_rng_state` gave."""
    _generator(device).set_state(new_state.cpu())


def _generator(device: Where) -> torch.Generator:
    from lapilli.eager import generators  # not with `import torch`

    return generators.default_generator(devices.index_of(device))


# --- operators


def fallbacks() -> dict[str, int]:
    """Which operators ran on the CPU because they have no kernel for the device, and how often."""
    from lapilli.eager import dispatch  # with the compiler: not with `import torch`

    return dict(dispatch.fallbacks())


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("vulkan", dtype=...)`` takes."""
    return [torch.float16]


def is_bf16_supported() -> bool:
    """Whether bfloat16 is computed on the device."""
    return False
