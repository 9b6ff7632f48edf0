"""`torch.utils.mobile_optimizer.optimize_for_mobile` on stock PyTorch: the backends "vulkan", "metal" and "cpu".

The wheels' own passes need libraries that the wheels are built without, and fail for every backend. `install` puts a function
with the same signature in their place, and registers the operators that the optimized modules call; a fresh process that
loads such a module needs no import but torch's: the entry point group `torch.backends` names `register`. Nothing heavy is
imported before one of them is used."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

import torch

from lapilli import torch_compat
from lapilli.after_import import after_import
from lapilli.mobile.fuse import in_any_mode

_library: Any = None

RUN = "run(Tensor model, str method, Tensor[] inputs, str[] settings) -> (Tensor[], str[])"
"""One run of a method of a model on the GPU.

model: the folded TorchScript module, as bytes; inputs: the tensors among the arguments; settings: the other arguments, as
`lapilli.mobile.arguments` writes them. The results are written in the same way. `run` takes tensors on the CPU (others are
copied) and gives such; `run_on_device` wants them on the device "vulkan" and leaves them there."""


def install() -> None:
    """Registers the operators, and has torch's function replaced when somebody imports it; doing it again does nothing."""
    global _library
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
    """`install` for the entry point that PyTorch calls at `import torch`, which must not fail: a warning says why it could not."""
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
    """Optimizes a TorchScript module for inference; `torch.utils.mobile_optimizer.optimize_for_mobile`.

    backend: "CPU": batch norm folded into convolutions, dropout removed, addition and ReLU fused; runs wherever torch does.
        "Vulkan": a module that runs on the GPU. It holds the folded model, and compiles it in its first run, for the sizes of
        its inputs; compiled programs are kept on disk. "Metal": the same in half precision, as PyTorch's Metal backend computes;
        on Apple's devices Vulkan runs on Metal.
    optimization_blocklist: members of MobileOptimizerType: what not to do. With VULKAN_AUTOMATIC_GPU_TRANSFER inputs and outputs
        are tensors on the device "vulkan"; otherwise inputs are copied there and outputs back.
    preserved_methods: names of methods besides forward, and of attributes, that the result has too.

    Raises TypeError where the module or the backend is none, AttributeError for names that the module does not have, and
    CompileError for models that cannot run so (those that keep a state from run to run).
    """
    from lapilli.mobile.optimize import optimize  # the compiler: not with `import torch`, and so below

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
