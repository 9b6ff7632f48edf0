"""What Lapilli takes from PyTorch beyond its public interface: which versions it is made for, what it puts in the place of
PyTorch's own functions and why, and which private names it uses.

Nothing is replaced at `import torch`. `replace` is the only function that replaces anything, and takes only what is in `PATCHES`.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import lru_cache
from typing import Any

import torch

from lapilli.errors import CompileError

OLDEST, BEYOND = (2, 13), (2, 14)
"""As in pyproject.toml: from this version on, below that one."""


def supported() -> bool:
    """Whether Lapilli is made for this PyTorch, or is told by LAPILLI_ANY_TORCH=1 to try."""
    return os.environ.get("LAPILLI_ANY_TORCH") == "1" or OLDEST <= _version() < BEYOND


def _version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else BEYOND


def refusal(what: str) -> str:
    """What to say of a PyTorch that Lapilli is not made for."""
    oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
    return (
        f"{what} is made for torch>={oldest},<{beyond}, and this is torch {torch.__version__}. Install such a torch: "
        f"pip install 'lapilli[compile]'; or set LAPILLI_ANY_TORCH=1 to try it with this one."
    )


def require_supported(what: str) -> None:
    """Raises CompileError where Lapilli is not made for this PyTorch. what: what cannot be used then."""
    if not supported():
        raise CompileError(refusal(what))


@lru_cache
def warn_unsupported(what: str, instead: str) -> None:
    """Warns, once, where Lapilli is not made for this PyTorch. instead: what happens then."""
    warnings.warn(f"{refusal(what)} {instead}", RuntimeWarning, stacklevel=3)


class Patch:
    """Something of PyTorch's that is replaced."""

    def __init__(self, when: str, why: str, others: str) -> None:
        """when: at the first use of the "device", where torch.compile asks for the backend "vulkan" ("compile"), or where
        torch.utils.mobile_optimizer is imported ("mobile"). others: what it is for everybody else: other devices, programs
        without the device."""
        self.when, self.why, self.others = when, why, others


_SAME = "PyTorch's own is called with the same arguments"
_ACCELERATOR = Patch(
    "device",
    "C++ knows one device, and no memory, of a device that Python offers",
    f"{_SAME} where the accelerator is another",
)
_STORAGE = Patch("device", "the bytes of a storage of the device are not where C++ looks for them", _SAME)
_SAVE = Patch(
    "device", "C++ would write weights of the device as empty", f"{_SAME}; the module's tensors are looked at before"
)

PATCHES: dict[str, Patch] = {
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
    "torch.jit.load": Patch("device", "C++ cannot fill storages of the device from a file: it goes by the CPU", _SAME),
    "torch.jit._trace._trace_impl": Patch("device", "example inputs on the device, kept with the trace, could not be saved", _SAME),
    "torch.jit.trace_module": Patch("device", "as torch.jit._trace._trace_impl", _SAME),
    "torch.jit._script.ScriptModule._apply": Patch(
        "device", "parameters of scripted modules are C++'s, and PyTorch does not move them to a device from outside",
        "the same result as Module._apply: every parameter and buffer, and its gradient, converted once",
    ),
    "torch.nn.modules.module.Module._apply": Patch(
        "device", "PyTorch makes new parameters for the device, one for every place: tied weights would come apart",
        _SAME,
    ),
    "torch.Tensor.data_ptr": Patch("device", "tensors of the device would all have the address 0", _SAME),
    "torch.Tensor.is_vulkan": Patch(
        "device", "PyTorch's own asks for the old Vulkan backend, which wheels do not have", "False, as before"
    ),
    "torch._tensor_str._tensor_str": Patch("device", "printing reads single elements: it is done on a copy", _SAME),
    "torch.utils.dlpack.to_dlpack": Patch("device", "a capsule would hold an address that is none: refused", _SAME),
    "torch.to_dlpack": Patch("device", "the same function by its other name", _SAME),
    "torch._opaque_base.OpaqueBaseMeta.__call__": Patch(
        "device", "torch.Generator(device='vulkan') asks a part in C++ that a device of Python does not have",
        "type.__call__ with the same arguments",
    ),
    "torch.clear_autocast_cache": Patch("device", "the device has its own cache of converted weights", f"{_SAME}, always"),
    "torch._C._select_conv_backend": Patch(
        "compile", "tracing guards on which CPU kernel a convolution would take: it decides nothing for this backend",
        f"{_SAME}, and makes its guards, unless the backend that traces is 'vulkan'",
    ),
    "torch.utils.mobile_optimizer.optimize_for_mobile": Patch(
        "mobile", "the wheels' own passes need libraries that the wheels are built without",
        "it works where PyTorch's own fails, which it does in wheels for every backend; the same checks and errors",
    ),
    "torch.ao.quantization.fuse_modules": Patch(
        "mobile", "the mobile recipe fuses modules in training mode, which PyTorch refuses today", f"{_SAME} in eval mode"
    ),
    "torch.quantization.fuse_modules": Patch("mobile", "the same function by its other name", "as torch.ao.quantization's"),
}  # fmt: skip
"""What is replaced, by its full name, in order of appearance to a reader."""

PRIVATE: dict[str, str] = {
    "torch._C._current_graph_task_id": "whether an error is raised within a backward pass, where it must not cross C++",
    "torch._C.BoolType": "types of attributes that are added to scripted modules",
    "torch._C.TensorType": "types of attributes that are added to scripted modules",
    "torch._C.BufferDict": "what scripted modules hold is C++'s",
    "torch._C.ModuleDict": "what scripted modules hold is C++'s",
    "torch._C.ParameterDict": "what scripted modules hold is C++'s",
    "torch._C.Graph": "a type: graphs of TorchScript",
    "torch._C.ScriptFunction": "a type: functions of TorchScript",
    "torch._C.ScriptMethod": "a type: methods of TorchScript",
    "torch._C.ScriptModule": "a type: modules of TorchScript, as C++ has them",
    "torch._C.TensorBase": "whether weights have moved is asked at every call: without the way through Python",
    "torch._C._AutoDispatchBelowAutograd": "attention without gradients is one call",
    "torch._C._ExcludeDispatchKeyGuard": "kernels of autocast call the operator without autocast",
    "torch._C._acc": "the only way to be a device from outside without C++: its hooks, its guard, its tensors",
    "torch._C._accelerator_getAccelerator": "which accelerator PyTorch was built with, without asking a driver",
    "torch._C._autograd.DeviceType": "the guard's answer must be of this type",
    "torch._C._construct_storage_from_data_pointer": "a storage of another device than vulkan:0",
    "torch._C._dispatch_find_schema_or_throw": "a TorchScript call is matched to its overload as TorchScript does it",
    "torch._C._dispatch_get_all_op_names": "the catalog lists every operator that there is",
    "torch._C._dispatch_has_kernel": "whether an operator can run on the CPU",
    "torch._C._should_allow_numbers_as_tensors": "which operators take numbers for tensors in Python",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether PyTorch makes an operator of others",
    "torch._C._dynamo.guards": "tensors over the same storage, in the fewest steps: every view makes one",
    "torch._C._from_dlpack": "tensors of another device than vulkan:0",
    "torch._C._get_privateuse1_backend_name": "whether another package has the place",
    "torch._C._jit_pass_inline": "TorchScript is interpreted with its calls inlined",
    "torch._C._set_multithreading_enabled": "autograd has a thread for vulkan:0 only; others' work is done in the caller's",
    "torch._C._select_conv_backend": "see PATCHES",
    "torch._C._to_dlpack": "see PATCHES",
    "torch._VF": "packed sequences, as torch.nn packs and pads them",
    "torch._check": "sizes that depend on data have bounds",
    "torch._decomp": "PyTorch's formulas of operators",
    "torch._dispatch.python": "formulas are traced with symbolic sizes",
    "torch._dynamo.backends.common": "AOTAutograd as a backend gets it",
    "torch._dynamo.decorators": "Dynamo traces branches and loops of a model under a mode of ours",
    "torch._dynamo.exc": "what Dynamo says of a model is said in our words",
    "torch._dynamo.source": "symbolic sizes of eager programs need a source",
    "torch._dynamo.symbolic_convert": "which backend Dynamo traces for",
    "torch._dynamo.trace_rules": "Dynamo is told not to trace the device's kernels",
    "torch._inductor.codegen": "inductor is told to refuse tensors of the device with a sentence",
    "torch._export.utils": "composite operators that torch.export can keep whole",
    "torch._C._functorch": "named in a comparison: transforms in graphs of Dynamo's",
    "torch._functorch.predispatch": "named in a comparison: transforms in graphs of Dynamo's",
    "torch._functorch.partitioners": "which values the forward graph keeps for the backward graph",
    "torch._guards": "the fake mode and the metadata of the graph that is being compiled",
    "torch._has_compatible_shallow_copy_type": "moving scripted modules, as Module._apply asks it",
    "torch._library.simple_registry": "register_fake would look through all modules at `import torch`",
    "torch._neg_view": "negated views are made by PyTorch on the way to the CPU",
    "torch._opaque_base": "see PATCHES",
    "torch._ops": "the types of operators",
    "torch._prims_common": "strides, as PyTorch computes them",
    "torch._register_device_module": "torch.vulkan",
    "torch._subclasses": "shapes of results without computing them",
    "torch._tensor_str": "see PATCHES",
    "torch._utils": "named in a comparison: who asks torch.vulkan.is_available()",
    "torch.autograd.graph._engine_run_backward": "named in a comparison: who asks the guard",
    "torch.jit._recursive": "a scripted module around its C++ part",
    "torch.jit._trace": "see PATCHES",
    "torch.nn.Module._apply": "see PATCHES",
    "torch.utils._python_dispatch": "constants are computed outside of modes",
    "torch.utils._pytree": "nested arguments, in the order that torch.export gives them",
    "torch.utils._sympy": "sizes of torch's, read as expressions",
    "torch.utils.backend_registration": "torch.vulkan's methods of tensors; its check for a name that exists is passed over",
}
"""Private names, or what they begin with, and what for. Operators (torch.ops) are not among them: they have schemas."""

replaced: dict[str, Any] = {}
"""What was replaced so far in this process: PyTorch's own, by name (None where there was nothing)."""


def replace(owner: Any, name: str, ours: Any) -> Any:
    """Puts ours in the place of an attribute of one of PyTorch's modules or classes; returns PyTorch's own.

    Raises KeyError for what is not in `PATCHES`.
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
