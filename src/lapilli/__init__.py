"""Lapilli: PyTorch models on any device that speaks Vulkan.

program = lapilli.compile(model, (image,), precision="fp16")   # needs the extra `compile`
logits = program(image)                                         # torch in, torch out; NumPy in, NumPy out
program.save("model.lap")
lapilli.load("model.lap")(image)                                # needs neither torch nor a shader compiler
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from lapilli.errors import (
    CompileError,
    DeviceLostError,
    IntegerOverflowError,
    InvalidFileError,
    InvalidInputError,
    LapilliError,
    NoDeviceError,
    NoDriverError,
    OutOfMemoryError,
    PlayerError,
    ReadError,
    RunTimeoutError,
    SignatureError,
    UnsupportedOperatorError,
)
from lapilli.version import __version__ as __version__

if TYPE_CHECKING:
    import torch

    from lapilli.runtime.devices import Device as Device
    from lapilli.runtime.devices import devices as devices
    from lapilli.runtime.devices import is_available as is_available
    from lapilli.runtime.futures import Future as Future
    from lapilli.runtime.limits import Limits as Limits
    from lapilli.runtime.method import Method as Method
    from lapilli.runtime.preprocess import Preprocess as Preprocess
    from lapilli.runtime.program import Program as Program
    from lapilli.runtime.program import load as load
    from lapilli.runtime.report import Report as Report
    from lapilli.verification import Check

# What needs NumPy and the player is imported when it is asked for: `import torch` imports this package, for its device.
_HOMES = {
    "Device": "devices",
    "Future": "futures",
    "Method": "method",
    "Preprocess": "preprocess",
    "Program": "program",
    "Report": "report",
    "devices": "devices",
    "is_available": "devices",
    "load": "program",
    "Limits": "limits",
}

__all__ = [
    "CompileError",
    "Device",
    "DeviceLostError",
    "Future",
    "IntegerOverflowError",
    "InvalidFileError",
    "InvalidInputError",
    "LapilliError",
    "Limits",
    "Method",
    "NoDeviceError",
    "NoDriverError",
    "OutOfMemoryError",
    "PlayerError",
    "Preprocess",
    "Program",
    "ReadError",
    "Report",
    "RunTimeoutError",
    "SignatureError",
    "UnsupportedOperatorError",
    "compile",
    "devices",
    "is_available",
    "load",
    "verify",
]

if sys.modules.get("torch") is not None:  # exported programs with calls of `lapilli::run` can be loaded from now on
    import lapilli.runtime.registration  # noqa: F401


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lapilli' has no attribute {name!r}")
    value = getattr(import_module(f"lapilli.runtime.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


def compile(
    model: torch.nn.Module
    | Callable[..., Any]
    | torch.export.ExportedProgram
    | str
    | PathLike[str]
    | Mapping[str, Any],
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: Literal["fp32", "fp16"] = "fp32",
    dynamic_shapes: Any = None,
    target: str | None = None,
    fallback: Literal["cpu", "error"] = "cpu",
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Program:
    """Compiles a model to a program, ready to run and to save. Needs the extra: `pip install lapilli[compile]`.

    model: a module (compiled as it is in eval mode), a function or a bound method, an ExportedProgram or its `module()`, a
        TorchScript module, method or function, or the path of a file of `torch.export.save` (`.pt2`) or `torch.jit.save`
        (`.pt`); or several methods by name, each of them an ExportedProgram or a tuple (module, example_inputs[,
        dynamic_shapes]): then `program.methods["decode"](...)` calls one. Equal weights are stored once.
    example_inputs: arguments of a module, as a tuple or a dict of keywords; an ExportedProgram brings its own. Images given in
        channels-last memory format are taken so, without a copy.
    example_kwargs: arguments by keyword beside those of example_inputs.
    precision: "fp32", or "fp16" for 16-bit storage with 32-bit accumulation. Inputs and outputs keep their dtypes.
    dynamic_shapes: as in `torch.export.export`: which sizes may change from run to run, with their bounds.
    target: None: plans for every kind of device; or the name of the one plan to make; or of a device that need not be there, such
    as "rtx-4090" or "mali-g7x" (`lapilli.target.KNOWN`): one plan, with kernels and tiles for it.
    fallback: "cpu" runs what has no GPU kernel in torch on the CPU, and `program.report()` says what and why; "error" raises
        UnsupportedOperatorError instead. A program with CPU operators needs torch to run.
    metadata: strings that travel in the file, such as `preprocess` and `labels`.
    progress: called with (stage, done, all) while kernels are compiled.

    Raises CompileError, UnsupportedOperatorError (with fallback="error"), LapilliError where torch or the
    shader compiler is missing.
    """
    from lapilli.runtime.compiler_packages import require_compiler

    require_compiler()
    from lapilli import torch_compat

    if not torch_compat.supported():
        torch_compat.warn_unsupported("lapilli.compile", "It is tried all the same.")
    from lapilli.compiler import compile_to_bytes
    from lapilli.runtime.host import OWN
    from lapilli.runtime.program import Program

    return Program(
        compile_to_bytes(
            model, example_inputs, example_kwargs=example_kwargs, precision=precision,
            dynamic_shapes=dynamic_shapes, target=target, fallback=fallback,
            metadata=metadata, progress=progress,
        ),
        permission=OWN,
    )  # fmt: skip


def verify(
    model: torch.nn.Module | torch.export.ExportedProgram | str | PathLike[str],
    example_inputs: Any = None,
    *,
    precision: Literal["fp32", "fp16"] = "fp32",
    target: str | None = None,
    device: str | int | None = None,
    inputs: Any = None,
    dynamic_shapes: Any = None,
) -> list[Check]:
    """Finds the kernel that is wrong: runs a model kernel by kernel on a device, and compares each with what its operators
    mean, computed by NumPy from the same values. Needs the extra: `pip install lapilli[compile]`.

    Arguments as for `compile` and `load`; inputs: tensors to run on, default those of example_inputs.
    Returns for every kernel its operators, its name, and its own relative error (norm). Slow: seconds to minutes.
    """
    from lapilli.runtime.compiler_packages import require_compiler

    require_compiler()
    from lapilli.verification import verify as verify_model

    return verify_model(model, example_inputs, precision, target, device, inputs, dynamic_shapes)
