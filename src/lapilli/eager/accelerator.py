"""``torch.accelerator``, PyTorch's interface to whichever device there is. ``torch.vulkan`` answers what it would
ask C++.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import accelerator
from torch._C import DispatchKey, DispatchKeySet

from lapilli.torch_compat import replace

_ELSEWHERE = DispatchKeySet(DispatchKey.Meta)  # a key for which kernels for all devices are not replaced

_ANSWERS = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "get_memory_info": "mem_get_info",
}
"""Functions of ``torch.accelerator``, and their names in ``torch.vulkan``."""


def patch(vulkan: Any) -> None:
    """Replaces the functions by those of the device, which is the accelerator whenever PyTorch says so. vulkan:
    ``torch.vulkan``.
    """
    for name, answer in _ANSWERS.items():
        if hasattr(accelerator, name):
            _instead(name, getattr(vulkan, answer))


def _instead(name: str, ours: Any) -> None:
    theirs = getattr(accelerator, name)

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        device = accelerator.current_accelerator()
        return (ours if device is not None and device.type == "vulkan" else theirs)(*args, **kwargs)

    replace(accelerator, name, function)


def pin(library: Any, other: torch.device | None) -> None:
    """Pins CPU tensors for the other accelerator, as if this device did not exist; PyTorch would ask this device for pinned
    memory. It has none that is faster than other memory, so that without another accelerator an ordinary copy is as good.
    """
    if other is None:
        library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
        return
    library.impl("_pin_memory", functools.partial(_for_other, torch.ops.aten._pin_memory.default, other), "CPU")
    library.impl("is_pinned", functools.partial(_for_other, torch.ops.aten.is_pinned.default, other), "CPU")


def _for_other(
    op: torch._ops.OpOverload, other: torch.device, tensor: torch.Tensor, device: torch.device | None = None
) -> Any:
    """PyTorch's own kernel of the operator, which is the same for all devices, called with the device."""
    with warnings.catch_warnings():  # it deprecates naming the device
        warnings.filterwarnings("ignore", "The argument 'device'", DeprecationWarning)
        return op.redispatch(_ELSEWHERE, tensor, other if device is None else device)
