"""Tells PyTorch of the device "vulkan".

At import time (`announce`): its name, the methods of tensors and modules, ``torch.vulkan``. That is a matter of
milliseconds and touches no driver. At the first use (`begin`): the kernels of its operators.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
import torch.utils.backend_registration as registration

from lapilli.eager import accelerator, api, devices, generators, modules, saving, storages, tensors
from lapilli.runtime.compiler import require_compiler

_torch: Any = torch  # whose registration functions have no types
_libraries: list[Any] = []
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
    """Makes "vulkan" a device of PyTorch; doing it again does nothing.

    Raises RuntimeError where another package has taken the one free place.
    """
    if getattr(torch, "vulkan", None) is api:
        return
    other = torch._C._accelerator_getAccelerator()
    registration.rename_privateuse1_backend("vulkan")
    # PyTorch's generator refuses because Tensor.is_vulkan exists: of the old Vulkan backend, false for all tensors of wheels.
    check = registration._check_register_once
    registration._check_register_once = lambda module, attr: None
    try:
        registration.generate_methods_for_privateuse1_backend(for_storage=True)
    finally:
        registration._check_register_once = check
    _torch._register_device_module("vulkan", api)
    library = _torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that it replaces the old backend's answer
        warnings.simplefilter("ignore")
        library.impl("is_vulkan_available", api.is_available, "CompositeImplicitAutograd", allow_override=True)
    accelerator.pin(library, other)
    _libraries.append(library)
    torch._C._acc.register_python_privateuseone_hook(_hook)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)
    accelerator.patch(other)
    for part in (generators, modules, saving, storages, tensors):
        part.patch()


def has_begun() -> bool:
    return _begun


def begin() -> None:
    """Registers the kernels; PyTorch calls it before the first tensor of the device is made.

    Raises RuntimeError where there is no device, CompileError where packages of the extra `compile` are missing.
    """
    global _begun
    if _begun:
        return
    with _lock:
        if _begun:
            return
        require_compiler()
        if not devices.found():
            raise devices.no_such_device(0)
        from lapilli.eager import autocast, call, sparse, transformer, views

        library = _torch.library.Library("aten", "IMPL")
        views.register(library)
        every = _torch.library.Library("_", "IMPL")
        call.register(library)
        transformer.register(library)
        every.fallback(call.boxed, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        sparse.register(library, every)
        for key in ("QuantizedPrivateUse1", "NestedTensorPrivateUse1"):
            every.fallback(views.refuse_layout, key)
        autocast.register(library)
        _libraries.extend((library, every))
        _begun = True
