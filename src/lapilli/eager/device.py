"""Tells PyTorch of the device "vulkan".

At import time (`announce`): its name, the methods of tensors and modules, ``torch.vulkan``. That is a matter of
milliseconds and touches no driver. At the first use (`begin`): the kernels of its operators and the patches.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
import torch.utils.backend_registration as registration

from lapilli.eager import api, devices, generators, modules, printing, saving, storages

_libraries: list[torch.library.Library] = []
_lock = threading.RLock()
_begun = False


class _Hook(torch._C._acc.PrivateUse1Hooks):
    """What PyTorch asks about the kind of device."""

    def is_available(self) -> bool:
        return api.is_available()

    def has_primary_context(self, index: int) -> bool:
        return index in devices.streams

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


_hook, _guard = _Hook(), _Guard()


def announce() -> None:
    """Makes "vulkan" a device of PyTorch. Raises RuntimeError where another package has taken the one free place."""
    torch.utils.rename_privateuse1_backend("vulkan")
    # PyTorch's generator refuses because Tensor.is_vulkan exists: of the old Vulkan backend, false for all tensors of wheels.
    check = registration._check_register_once
    registration._check_register_once = lambda module, name: None
    try:
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    finally:
        registration._check_register_once = check
    torch._register_device_module("vulkan", api)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that it replaces the old backend's answer
        warnings.simplefilter("ignore")
        library.impl("is_vulkan_available", api.is_available, "CompositeImplicitAutograd", allow_override=True)
    _libraries.append(library)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)
    for part in (generators, storages, printing, modules, saving):
        part.patch()
    if torch._C._accelerator_getAccelerator() is None:  # else CUDA and the like would lose that place to us
        _register_hook()


_hooked = False


def _register_hook() -> None:
    global _hooked
    if not _hooked:
        torch._C._acc.register_python_privateuseone_hook(_hook)
        _hooked = True


def has_begun() -> bool:
    return _begun


def begin() -> None:
    """Registers the kernels and patches; PyTorch calls it before the first tensor of the device is made."""
    global _begun
    if _begun:
        return
    with _lock:
        if _begun:
            return
        from lapilli.eager import autocast, call, views

        _register_hook()
        library = torch.library.Library("aten", "IMPL")
        views.register(library)
        every = torch.library.Library("_", "IMPL")
        call.register(library)
        every.fallback(call.boxed, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        autocast.register(library)
        _libraries.extend((library, every))
        _begun = True
