"""``torch.accelerator``, PyTorch's name for whatever device there is: what it asks of C++ is answered by ``torch.vulkan``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import accelerator

from lapilli.eager import api


def patch() -> None:
    """Lets the functions be ours where the accelerator is the vulkan device."""
    for name, ours in {
        "current_device_index": api.current_device,
        "current_device_idx": api.current_device,
        "set_device_index": api.set_device,
        "set_device_idx": api.set_device,
        "synchronize": api.synchronize,
        "empty_cache": api.empty_cache,
        "memory_allocated": api.memory_allocated,
        "max_memory_allocated": api.max_memory_allocated,
        "memory_reserved": api.memory_reserved,
        "reset_peak_memory_stats": api.reset_peak_memory_stats,
        "get_memory_info": api.mem_get_info,
    }.items():
        _instead(name, ours)


def _instead(name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(accelerator, name)

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        device = torch._C._accelerator_getAccelerator()
        return (ours if device is not None and device.type == "vulkan" else theirs)(*args, **kwargs)

    setattr(accelerator, name, function)
