"""``torch.accelerator``, PyTorch's name for whatever device there is: what it asks of C++ is answered by ``torch.vulkan``.

PyTorch takes a device that was added from outside for the accelerator, also where it has one of its own. There CUDA, or
whatever it is, stays the accelerator as long as it is available.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import accelerator

from lapilli.eager import api


def patch(other: torch.device | None) -> None:
    """Lets the functions be ours where the accelerator is the vulkan device.

    other: the accelerator that PyTorch had without it.
    """
    if other is not None:
        _prefer(other)
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


def _prefer(other: torch.device) -> None:
    theirs = accelerator.current_accelerator

    @functools.wraps(theirs)
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return other if torch.get_device_module(other).is_available() else theirs(check_available)

    accelerator.current_accelerator = current_accelerator


def _instead(name: str, ours: Any) -> None:
    theirs = getattr(accelerator, name)

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        device = accelerator.current_accelerator()
        return (ours if device is not None and device.type == "vulkan" else theirs)(*args, **kwargs)

    setattr(accelerator, name, function)


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """``aten::_pin_memory``: memory of the host that the device reads faster does not exist here, so a copy is as good."""
    return tensor.clone()
