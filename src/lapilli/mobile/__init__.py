"""`torch.utils.mobile_optimizer.optimize_for_mobile` on stock PyTorch: the backends "vulkan", "metal" and "cpu".

PyTorch's wheels are built without the libraries that their own passes need, so these fail for every backend. `install` replaces
the function by one with the same signature, and registers the operators that optimized modules call. To load such a module, a
process only needs to import torch, which calls `register` by the entry point group `torch.backends`. The compiler is imported at
the first use.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any

from lapilli.after_import import after_import

if TYPE_CHECKING:  # not before there is `register`: where this module is imported first, `import torch` asks for it
    import torch

_library: Any = None

RUN = "run(Tensor model, str method, Tensor[] inputs, str[] settings) -> (Tensor[], str[])"
"""One run of a method of a model on the GPU.

model: the folded TorchScript module, as bytes. inputs: the tensors among the arguments. settings: the other arguments, as written
by `lapilli.mobile.arguments`. Results have the same form. `run` takes tensors on the CPU (others are copied) and returns tensors on
the CPU; `run_on_device` takes tensors on the device "vulkan" and returns tensors there.
"""


def install() -> None:
    """Registers the operators, and replaces torch's function once it is imported. Further calls do nothing."""
    import torch

    global _library  # by now `import torch` may have called this
    if _library is not None:
        return
    library: Any = torch.library.Library("lapilli_prepack", "DEF")  # type: ignore[no-untyped-call]
    library.define(RUN)
    library.define(RUN.replace("run(", "run_on_device("))
    library.impl("run", _run, "CompositeExplicitAutograd")
    library.impl("run_on_device", _run_on_device, "CompositeExplicitAutograd")
    _library = library
    after_import("torch.utils.mobile_optimizer", _replace)


def _replace(optimizer: Any) -> None:
    import torch

    from lapilli import torch_compat
    from lapilli.mobile.fuse import in_any_mode

    theirs = optimizer.optimize_for_mobile

    @wraps(theirs)
    def optimize_for_mobile_or_theirs(*args: Any, **kwargs: Any) -> torch.jit.ScriptModule:
        if not torch_compat.supported():
            torch_compat.warn_unsupported("optimize_for_mobile on stock PyTorch", "Until then PyTorch's own is called.")
            return theirs(*args, **kwargs)  # type: ignore[no-any-return]
        return optimize_for_mobile(*args, **kwargs)

    torch_compat.replace(optimizer, "optimize_for_mobile", optimize_for_mobile_or_theirs)
    fuse_modules = in_any_mode(torch.ao.quantization.fuse_modules)
    for module in (torch.ao.quantization, torch.quantization):
        torch_compat.replace(module, "fuse_modules", fuse_modules)


def register() -> None:
    """Calls `install` at `import torch`, as PyTorch's entry point. A failure becomes a warning."""
    try:
        install()
    except Exception as error:
        warnings.warn(
            f"Lapilli cannot offer optimize_for_mobile in this PyTorch: {error}", RuntimeWarning, stacklevel=2
        )


def optimize_for_mobile(
    script_module: torch.jit.ScriptModule,
    optimization_blocklist: set[Any] | None = None,
    preserved_methods: list[Any] | None = None,
    backend: str = "CPU",
) -> torch.jit.ScriptModule:
    """Optimizes a TorchScript module for inference, as `torch.utils.mobile_optimizer.optimize_for_mobile` does.

    Args:
        script_module: the module; it is not changed.
        optimization_blocklist: members of MobileOptimizerType: optimizations to leave out. With
            VULKAN_AUTOMATIC_GPU_TRANSFER, inputs and outputs are tensors on the device "vulkan"; otherwise inputs are copied
            there and outputs back.
        preserved_methods: names of methods and attributes that the result has besides forward.
        backend: "CPU": folds batch norm into convolutions, removes dropout, fuses addition and ReLU; runs wherever torch does.
            "Vulkan": a module that runs on the GPU. It contains the folded model, and compiles it in its first run for the
            sizes of its inputs; compiled programs are cached on disk. "Metal": the same in half precision, as PyTorch's Metal
            backend computes; on Apple's devices Vulkan runs on Metal.

    Raises:
        TypeError: script_module is no ScriptModule, or backend is unknown.
        AttributeError: the module does not have one of the preserved names.
        CompileError: the model cannot run on the GPU as a single module: it keeps state from run to run.
    """
    from lapilli.mobile.optimize import optimize  # imports the compiler: not at `import torch`; likewise below

    return optimize(script_module, optimization_blocklist, preserved_methods, backend)


def _run(
    model: torch.Tensor, method: str, inputs: list[torch.Tensor], settings: list[str]
) -> tuple[list[torch.Tensor], list[str]]:
    from lapilli.mobile.model import model_of

    return model_of(model).run(method, [t if t.device.type == "cpu" else t.cpu() for t in inputs], settings)


def _run_on_device(
    model: torch.Tensor, method: str, inputs: list[torch.Tensor], settings: list[str]
) -> tuple[list[torch.Tensor], list[str]]:
    from lapilli.mobile.model import model_of

    return model_of(model).run_on_device(method, inputs, settings)
