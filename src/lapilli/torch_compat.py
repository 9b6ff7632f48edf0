"""All uses of PyTorch beyond its public interface: the supported versions, the functions that are replaced and why, and the
private names that are used. A function of the package transformers is replaced, too, and methods of torchao's tensors.

Nothing is replaced at `import torch`. Only `replace` replaces anything, and only names in `PATCHES`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.fx import config as fx_config

from lapilli.errors import CompileError

OLDEST, BEYOND = (2, 13), (2, 14)
"""From this version on, below that one; as in pyproject.toml."""


def supported() -> bool:
    """Whether this version of PyTorch is supported, or LAPILLI_ANY_TORCH=1 allows any."""
    return os.environ.get("LAPILLI_ANY_TORCH") == "1" or OLDEST <= _version() < BEYOND


def _version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else BEYOND


def refusal(what: str) -> str:
    """The message about a version of PyTorch that is not supported. what: the feature."""
    oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
    return (
        f"{what} is made for torch>={oldest},<{beyond}, and this is torch {torch.__version__}. Install such a torch: "
        f"pip install 'lapilli[compile]'; or set LAPILLI_ANY_TORCH=1 to try it with this one."
    )


def require_supported(what: str) -> None:
    """Raises CompileError if this version of PyTorch is not supported. what: the feature that needs it."""
    if not supported():
        raise CompileError(refusal(what))


@lru_cache
def warn_unsupported(what: str, instead: str) -> None:
    """Warns, once, if this version of PyTorch is not supported. instead: the consequence."""
    warnings.warn(f"{refusal(what)} {instead}", RuntimeWarning, stacklevel=3)


_traceless = 0  # how many are tracing so
_before = False
_lock = threading.Lock()


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Traces graphs without the model's line for each node. Nothing here reads these lines, and they take 6 % of a compilation.

    It is a setting of the process: graphs that other threads trace meanwhile have no lines either.
    """
    global _traceless, _before
    with _lock:
        if not _traceless:
            _before = getattr(fx_config, "do_not_emit_stack_traces", False)  # PyTorch 2.11 has none
            fx_config.do_not_emit_stack_traces = True
        _traceless += 1
    try:
        yield
    finally:
        with _lock:
            _traceless -= 1
            if not _traceless:
                fx_config.do_not_emit_stack_traces = _before


@contextmanager
def without_logs() -> Iterator[None]:
    """Mutes torch's logs of calls that this thread cannot trace: the exception says what is wrong, and a log of twenty lines of
    torch's insides says it again.
    """
    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in _TRACING_LOGGERS]
    for logger in loggers:
        logger.addFilter(of_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(of_others)


_TRACING_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


class Patch:
    """A replacement of something in PyTorch."""

    def __init__(self, when: str, why: str, others: str) -> None:
        """when: at the first use of the device ("device"), when torch.compile looks up the backend "vulkan" ("compile"), when
        torch.utils.mobile_optimizer is imported ("mobile"), or once both the device was used and the package is imported
        ("transformers", "torchao"). others: the effect on other devices, and on programs without
        the device."""
        self.when, self.why, self.others = when, why, others


_SAME = "the original is called with the same arguments"
_ACCELERATOR = Patch(
    "device",
    "C++ sees one device, and no memory, of a backend in Python",
    f"{_SAME} if the accelerator is another one",
)
_STORAGE = Patch("device", "C++ cannot access the bytes of storages of the device", _SAME)
_SAVE = Patch(
    "device",
    "C++ would write weights of the device as empty",
    f"{_SAME}, after a search for tensors of the device in the module",
)

PATCHES: dict[str, Patch] = {
    "torch.autograd.variable.Variable._execution_engine": Patch(
        "device",
        "passes run in the caller's thread; errors of hooks are put aside while C++ leaves the guard of the device's stream",
        "a subclass, which works alike: passes on the CPU run in the caller's thread anyway",
    ),
    **{
        f"torch.accelerator.{name}": _ACCELERATOR
        for name in (
            "current_device_index", "current_device_idx", "set_device_index", "set_device_idx", "synchronize", "empty_cache",
            "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats", "get_memory_info",
        )
    },
    **{
        f"torch.storage.UntypedStorage.{name}": _STORAGE
        for name in (
            "__new__", "nbytes", "size", "__len__", "data_ptr", "copy_", "fill_", "resize_", "__getitem__", "__setitem__",
            "_write_file", "_share_fd_cpu_", "_share_filename_cpu_",
        )
    },
    **{
        f"{kind}.{name}": _SAVE
        for kind in ("torch.jit._script.RecursiveScriptModule", "torch.jit._script.ScriptModule")
        for name in ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")
    },
    "torch.jit.ScriptFunction.save": _SAVE,
    "torch.jit.ScriptFunction.save_to_buffer": _SAVE,
    "torch.jit.load": Patch("device", "C++ cannot fill storages of the device from a file; the CPU is used in between", _SAME),
    "torch.jit._trace._trace_impl": Patch("device", "example inputs on the device, kept with the trace, could not be saved", _SAME),
    "torch.jit.trace_module": Patch("device", "as torch.jit._trace._trace_impl", _SAME),
    "torch.jit._script.ScriptModule._apply": Patch(
        "device", "parameters of scripted modules belong to C++, and PyTorch does not move them to an out-of-tree device",
        "the same result as Module._apply: every parameter and buffer, and its gradient, converted once",
    ),
    "torch.nn.modules.module.Module._apply": Patch(
        "device", "PyTorch creates new parameters for the device, one per use: tied weights would be separated",
        _SAME,
    ),
    "torch.Tensor.data_ptr": Patch("device", "tensors of the device would all have the address 0", _SAME),
    "torch.Tensor.is_vulkan": Patch(
        "device", "the original asks for the old Vulkan backend, which wheels lack", "False, as before"
    ),
    "torch._tensor_str._tensor_str": Patch("device", "printing reads single elements: it is done on a copy", _SAME),
    "torch.utils.dlpack.to_dlpack": Patch("device", "a capsule would contain an invalid address: refused", _SAME),
    "torch.to_dlpack": Patch("device", "the same function by its other name", _SAME),
    "torch._opaque_base.OpaqueBaseMeta.__call__": Patch(
        "device", "torch.Generator(device='vulkan') calls a C++ function that a backend in Python lacks",
        "type.__call__ with the same arguments",
    ),
    "torch.clear_autocast_cache": Patch("device", "the device has its own cache of converted weights", f"{_SAME}, always"),
    "torch._C._select_conv_backend": Patch(
        "compile", "tracing guards on the CPU kernel that a convolution would use, which has no effect on this backend",
        f"{_SAME}, and adds its guards, unless the tracing backend is 'vulkan'",
    ),
    "torch.utils.mobile_optimizer.optimize_for_mobile": Patch(
        "mobile", "the wheels' own passes need libraries that the wheels are built without",
        "it works where the original fails, which in wheels is every backend; the same checks and errors",
    ),
    "torch.ao.quantization.fuse_modules": Patch(
        "mobile", "the mobile recipe fuses modules in training mode, which PyTorch refuses today", f"{_SAME} in eval mode"
    ),
    "transformers.generation.utils.GenerationMixin._prepare_cache_for_generation": Patch(
        "transformers", "`generate` has a cache of fixed size and compiles the step of a token on devices that are listed there",
        f"{_SAME}, unless the model is on the device",
    ),
    **{
        f"torchao.quantization.{kind}.{name}": Patch(
            "torchao", "weights on the device stay packed, and are saved as those on the CPU are", f"{_SAME}, unless on the device"
        )
        for kind, names in {"IntxUnpackedToInt8Tensor": ("__init__", "__reduce_ex__", "__setstate__"),
                            "Int8Tensor": ("__reduce_ex__", "__setstate__")}.items()
        for name in names
    },
    "torch.quantization.fuse_modules": Patch("mobile", "the same function by its other name", "as torch.ao.quantization's"),
}  # fmt: skip
"""The replacements, by full name."""

PRIVATE: dict[str, str] = {
    "torch._C._current_graph_task_id": "whether an error is raised within a backward pass, where it must not cross C++",
    "torch._C._ImperativeEngine": "see PATCHES",
    "torch._C._get_obj_in_tls": "errors of hooks, by backward pass: PyTorch hands such objects on to what runs for a pass",
    "torch._C._is_key_in_tls": "as _get_obj_in_tls",
    "torch._C._remove_obj_from_tls": "as _get_obj_in_tls",
    "torch._C._stash_obj_in_tls": "as _get_obj_in_tls",
    "torch._C._dispatch_get_registrations_for_dispatch_key": "the operators that the CPU has for sparse tensors",
    "torch._C.BoolType": "types of attributes that are added to scripted modules",
    "torch._C.TensorType": "types of attributes that are added to scripted modules",
    "torch._C.BufferDict": "what scripted modules hold is C++'s",
    "torch._C.ModuleDict": "what scripted modules hold is C++'s",
    "torch._C.ParameterDict": "what scripted modules hold is C++'s",
    "torch._C.Graph": "a type: graphs of TorchScript",
    "torch._C.ScriptFunction": "a type: functions of TorchScript",
    "torch._C.ScriptMethod": "a type: methods of TorchScript",
    "torch._C.ScriptModule": "a type: modules of TorchScript, as C++ has them",
    "torch._C.TensorBase": "addresses of weights are compared at every call, without a detour through Python",
    "torch._C._AutoDispatchBelowAutograd": "attention without gradients is one call",
    "torch._C._ExcludeDispatchKeyGuard": "kernels of autocast call the operator without autocast",
    "torch._C._acc": "the only way to implement an out-of-tree device without C++: its hooks, its guard, its tensors",
    "torch._C._accelerator_getAccelerator": "the accelerator that PyTorch was built for, without asking a driver",
    "torch._C._autograd.DeviceType": "the guard's answer must be of this type",
    "torch._C._construct_storage_from_data_pointer": "storages of devices other than vulkan:0",
    "torch._C._disabled_torch_function_impl": "packed codes are a tensor subclass, of which only kernels know",
    "torch._C._dispatch_find_schema_or_throw": "TorchScript calls are matched to overloads as TorchScript does",
    "torch._C._dispatch_get_all_op_names": "the catalog lists all operators",
    "torch._C._dispatch_has_kernel": "whether an operator can run on the CPU",
    "torch._C._should_allow_numbers_as_tensors": "which operators accept numbers for tensors in Python",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether PyTorch composes an operator of others",
    "torch._C._dynamo.guards": "tensors over the same storage, as fast as possible: every view creates one",
    "torch._C._from_dlpack": "tensors of devices other than vulkan:0",
    "torch._C._get_privateuse1_backend_name": "whether another package has registered its device, and the device's name now",
    "torch._C._jit_pass_inline": "TorchScript is interpreted with its calls inlined",
    "torch._C._set_multithreading_enabled": "backward passes run in the thread that calls them",
    "torch._C._select_conv_backend": "see PATCHES",
    "torch._C._to_dlpack": "see PATCHES",
    "torch.Tensor._make_wrapper_subclass": "packed codes are a tensor of more elements than they have bytes",
    "torch._VF": "packed sequences, as torch.nn packs and pads them",
    "torch.ao.quantization.fx._decomposed": "registers the operators of quantized graphs",
    "torch._check": "sizes that depend on data have bounds",
    "torch._decomp": "PyTorch's decompositions of operators",
    "torch._dispatch.python": "decompositions are traced with symbolic sizes",
    "torch._dynamo.backends.common": "AOTAutograd, as for other backends",
    "torch._dynamo.decorators": "Dynamo traces branches and loops of a model under our modes",
    "torch._dynamo.exc": "errors of Dynamo about a model are rephrased",
    "torch._dynamo.source": "symbolic sizes of eager programs need a source",
    "torch._dynamo.symbolic_convert": "the backend for which Dynamo traces",
    "torch._dynamo.trace_rules": "Dynamo is told not to trace the device's kernels",
    "torch._inductor.codegen": "inductor refuses tensors of the device with a clear message",
    "torch._export.utils": "composite operators that torch.export can keep whole",
    "torch._C._functorch": "transforms in graphs of Dynamo's, by name; whether one of torch.func is under way",
    "torch._functorch._aot_autograd": "which results are views of arguments that a graph changes",
    "torch._functorch.predispatch": "named in a comparison: transforms in graphs of Dynamo's",
    "torch._functorch.partitioners": "which values the forward graph keeps for the backward graph",
    "torch._guards": "the fake mode and the metadata of the graph that is being compiled",
    "torch._has_compatible_shallow_copy_type": "moving scripted modules, as in Module._apply",
    "torch._library.autograd": "register_autograd would take a millisecond of `import torch`",
    "torch._library.simple_registry": "register_fake would search all modules at `import torch`",
    "torch._neg_view": "PyTorch creates negated views when it copies to the CPU",
    "torch._opaque_base": "see PATCHES",
    "torch._ops": "the types of operators",
    "torch._prims_common": "strides, as PyTorch computes them",
    "torch._register_device_module": "torch.vulkan",
    "torch._subclasses": "shapes of results without computing them",
    "torch._tensor_str": "see PATCHES",
    "torch._utils": "named in a comparison: the caller of torch.vulkan.is_available()",
    "torch.autograd.graph._engine_run_backward": "named in a comparison: the caller of the guard",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._rename_unbacked_to": "sizes from data keep their names in a second trace",
    "torch.jit._recursive": "a scripted module around its C++ part",
    "torch.jit._trace": "see PATCHES",
    "torch.nn.Module._apply": "see PATCHES",
    "torch.utils._python_dispatch": "constants are computed outside of modes",
    "torch.utils._pytree": "nested arguments, in the order that torch.export gives them",
    "torch.utils._sympy": "torch's sizes, read as expressions",
    "torch.utils.backend_registration": "torch.vulkan's methods of tensors; its check for existing names is bypassed",
}
"""Private names, or their prefixes, and their uses. Operators (torch.ops) are not included: they have schemas."""

replaced: dict[str, Any] = {}
"""The originals of all that was replaced in this process, by name; None if there was nothing."""


def replace(owner: Any, name: str, ours: Any) -> Any:
    """Replaces an attribute of a module or class; returns the original.

    Raises KeyError for names that are not in `PATCHES`.
    """
    full = f"{_name_of(owner)}.{name}"
    PATCHES[full]
    theirs = getattr(owner, name, None)
    setattr(owner, name, ours)
    replaced.setdefault(full, theirs)
    return theirs


def _name_of(owner: Any) -> str:
    if not isinstance(owner, type):
        return str(owner.__name__)
    inside = owner.__qualname__.removeprefix(f"{owner.__module__}.")  # C++ classes repeat their modules
    return f"{owner.__module__}.{inside}"
