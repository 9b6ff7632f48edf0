"""``torch.accelerator``, PyTorch's name for whatever device there is: what it asks of C++ is answered by ``torch.vulkan``.

PyTorch takes a device that was added from outside for the accelerator, also where it has one of its own. There CUDA, or
whatever it is, stays the accelerator as long as it is available.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import accelerator
from torch._C import DispatchKey, DispatchKeySet

from lapilli.eager import api

_ELSEWHERE = DispatchKeySet(DispatchKey.Meta)  # where kernels for all devices are not replaced


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


def pin(library: Any, other: torch.device | None) -> None:
    """Lets tensors on the CPU be pinned for the other accelerator, as if this device were not there; PyTorch would ask this one
    for its pinned memory. It has none that is faster than any other, so where there is no other, a copy is as good."""
    if other is None:
        library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
        return
    library.impl("_pin_memory", functools.partial(_for_other, torch.ops.aten._pin_memory.default, other), "CPU")
    library.impl("is_pinned", functools.partial(_for_other, torch.ops.aten.is_pinned.default, other), "CPU")


def _for_other(
    op: torch._ops.OpOverload, other: torch.device, tensor: torch.Tensor, device: torch.device | None = None
) -> Any:
    """PyTorch's own kernel of the operator, which is the same for all devices, told of the device."""
    with warnings.catch_warnings():  # it would rather find out for itself
        warnings.filterwarnings("ignore", "The argument 'device'", DeprecationWarning)
        return op.redispatch(_ELSEWHERE, tensor, other if device is None else device)
