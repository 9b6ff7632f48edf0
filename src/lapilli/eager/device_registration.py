"""Makes the device "vulkan" known to PyTorch, in three steps:

- `announce`, at import time: its name, the methods of tensors and modules, ``torch.vulkan``. This takes milliseconds, touches
  no driver, and replaces nothing of PyTorch's.
- `ready`: the kernels of its operators. It needs no name, and does not interfere with an accelerator that PyTorch has.
- `begin`, at the first use: kernels, and patches of PyTorch's Python code. PyTorch calls it by ``torch.vulkan._lazy_init``.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import serialization

from lapilli import torch_compat
from lapilli.after_import import after_import
from lapilli.eager import accelerator, backward_passes, device_state, neighbours, vulkan
from lapilli.runtime.compiler_packages import require_compiler

_torch: Any = torch  # its registration functions have no types
_libraries: list[Any] = []
_lock = threading.RLock()
_announced = _ready = _patched = _begun = False
_is_vulkan: Any = None


_NOT_FIRST = "{} cannot be the first use of the device. Call torch.vulkan.init() before it."


class _Hook(torch._C._acc.PrivateUse1Hooks):
    """PyTorch's queries about the device type."""

    def is_available(self) -> bool:
        return vulkan.is_available()

    def has_primary_context(self, index: int) -> bool:
        return index in device_state.streams

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    """PyTorch's queries about the current device."""

    def type_(self) -> Any:
        backward_passes.keep()
        if not _ready and _caller() == "torch.autograd.graph._engine_run_backward":
            # At its first backward pass, autograd asks for which devices it needs threads. With threads, a forked child
            # could not run a backward pass. The device needs none.
            return torch._C._autograd.DeviceType.CPU
        return torch._C._autograd.DeviceType.PrivateUse1


def _caller() -> str:
    """The Python function that called a function of ours through C++; "" if a C++ thread did."""
    frame = sys._getframe(1).f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


_hook, _guard = _Hook(), _Guard()


def enable() -> None:
    """As `lapilli.eager.enable`."""
    other = neighbours.built_in()
    announce()
    if other is not None and torch.get_device_module(other).is_available():
        name = other.type.upper()
        warnings.warn(
            f"'vulkan' is PyTorch's accelerator in this process now, instead of '{other.type}': backward() on {name} tensors fails "
            f"from here on, and so does all training on {name}, torch.compile's too; train on {name} in another process.",
            RuntimeWarning,
            stacklevel=3,
        )


def announce() -> None:
    """Makes "vulkan" a device of PyTorch; further calls do nothing.

    Raises RuntimeError if another package has registered its device in the only place there is.
    """
    global _announced
    with _lock:
        if _announced:
            return
        other = neighbours.built_in()
        registration.rename_privateuse1_backend("vulkan")
        _announced = True
        _add_methods()
        _torch._register_device_module("vulkan", vulkan)
        _introduce()
        library = _torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # it warns that this replaces the old backend's answer
            warnings.simplefilter("ignore")
            library.impl("is_vulkan_available", vulkan.is_available, "CompositeImplicitAutograd", allow_override=True)
        accelerator.pin(library, other)
        if not _ready:
            for name in _FIRST:
                library.impl(name, _FIRST[name], "PrivateUse1")
        _libraries.append(library)
        # Takes precedence over PyTorch's own entry for the device, which would save its name.
        serialization.register_package(15, _saved_as, _load_first)


def _introduce() -> None:
    """Registers the hooks and the guard in C++; further calls do nothing."""
    torch._C._acc.register_python_privateuseone_hook(_hook)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)


def _add_methods() -> None:
    """Adds ``Tensor.vulkan`` and the like. ``Tensor.is_vulkan`` already exists, from the old Vulkan backend, and is False
    in wheels. It is kept until there are tensors for which that is wrong.
    """
    global _is_vulkan
    check = registration._check_register_once
    registration._check_register_once = lambda module, attr: None
    try:
        registration.generate_methods_for_privateuse1_backend(for_storage=True)
    finally:
        registration._check_register_once = check
    _is_vulkan = torch.Tensor.__dict__["is_vulkan"]
    del torch.Tensor.is_vulkan


def _saved_as(storage: Any) -> str | None:
    return "cpu" if storage.device.type == "vulkan" else None


def _load_first(storage: Any, location: str) -> None:
    """Makes the device ready if ``torch.load(map_location="vulkan")`` is its first use."""
    if isinstance(location, str) and location.startswith("vulkan"):
        begin()


def _first(name: str) -> Callable[..., Any]:
    """A kernel for a first tensor that is created by C++, which does not call `torch.vulkan._lazy_init`."""
    made: list[Callable[..., Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            begin()
            from lapilli.eager import memory_ops  # imports the compiler: not at import time

            made.append(getattr(memory_ops, name))
            if _caller().endswith("_serialization.load"):  # C++ would fill its storage
                raise RuntimeError(_NOT_FIRST.format("torch.jit.load(map_location='vulkan')"))
        return made[0](*args, **kwargs)

    return kernel


_FIRST = {"empty.memory_format": _first("empty"), "empty_strided": _first("empty_strided")}


def has_begun() -> bool:
    return _begun


def ready() -> None:
    """Registers the kernels; further calls do nothing.

    Raises RuntimeError if there is no device, or another package's device has its place; CompileError if packages of the
    extra `compile` are missing, or this version of PyTorch is not supported.
    """
    global _ready
    if _ready:
        return
    with _lock:
        if _ready:
            return
        torch_compat.require_supported("The device 'vulkan'")
        require_compiler()
        if not device_state.found():
            raise device_state.no_such_device(0)
        name = torch._C._get_privateuse1_backend_name()
        if name not in device_state.NAMES:
            raise RuntimeError(f"PyTorch supports one device from outside, and {name!r} is already registered.")
        # Not at import time: these import the compiler.
        from lapilli.eager import (  # noqa: F401  # some register operators by being imported
            autocast,
            composite_ops,
            dispatch,
            fft,
            lists,
            memory_ops,
            optimizers,
            refused_numbers,
            resident,
            sparse,
            transformer,
        )
        from lapilli.runtime import method

        _introduce()
        library = _torch.library.Library("aten", "IMPL")
        memory_ops.register(library, but=_FIRST if _announced else ())
        every = _torch.library.Library("_", "IMPL")
        dispatch.register(library)
        layers = _torch.library.Library("lapilli", "IMPL")
        dispatch.register_layers(layers)
        transformer.register(library)
        every.fallback(dispatch.boxed, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        sparse.register(library, every)
        for key in ("QuantizedPrivateUse1", "NestedTensorPrivateUse1"):
            every.fallback(memory_ops.refuse_layout, key)
        autocast.register(library)
        method.runners.update(dict.fromkeys(device_state.NAMES, resident.run))
        _libraries.extend((library, layers, every))
        _ready = True
        after_import("torch._dynamo.trace_rules", _leave_us_alone)


def _leave_us_alone(trace_rules: Any) -> None:
    """Makes Dynamo skip our code, which runs between graphs. In an editable install, files created by the build are
    elsewhere. What models call themselves is traced.
    """
    for name in ("lapilli", "lapilli.abi", "lapilli.program.schema", "flatbuffers"):
        trace_rules.add(name)
    inlined: set[str] = getattr(
        trace_rules, "BUILTIN_INLINE_WHEN_CALLED", set()
    )  # which PyTorch before 2.13 need not have
    for name in ("lapilli.sampling", "lapilli.eager.torchao_tensors", "lapilli.eager.packed_codes"):
        traced = find_spec(name)
        assert traced is not None and traced.origin is not None
        inlined.add(Path(traced.origin).as_posix())


def patch() -> None:
    """Patches PyTorch's Python code for the device; further calls do nothing. Touches no driver."""
    global _patched
    if _patched:
        return
    with _lock:
        if _patched:
            return
        _patched = True
        # Not at import time, which would slow down all programs.
        from lapilli.eager import autocast, generators, modules, saving, storages, tensor_methods

        accelerator.patch(vulkan)
        for part in (autocast, generators, modules, saving, storages, tensor_methods):
            part.patch()
        torch_compat.replace(torch.Tensor, "is_vulkan", _is_vulkan)


def begin() -> None:
    """Makes the device ready for use; PyTorch calls it before the first tensor on the device is created. Raises as
    `ready`.
    """
    global _begun
    if _begun:
        return
    with _lock:
        if _begun:
            return
        ready()
        patch()
        backward_passes.patch()  # not before: `_Guard` knows PyTorch's engine by its caller
        _begun = True
        # Not at import time: each file takes its share of a millisecond, and torchao_tensors imports the compiler.
        from lapilli.eager import generation, inductor, torchao_tensors

        after_import("torch._inductor.codegen.common", inductor.refuse)
        after_import("transformers.generation.utils", generation.prefer_compiled_steps)
        for name in torchao_tensors.EXTENSIONS:
            after_import(name, torchao_tensors.extend)


vulkan.set_steps(has_begun, patch, begin)
