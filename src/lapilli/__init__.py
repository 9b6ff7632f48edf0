"""Lapilli: PyTorch models on any device that speaks Vulkan.

program = lapilli.compile(model, (image,), precision="fp16")   # needs the extra `compile`
logits = program(image)                                         # torch in, torch out; NumPy in, NumPy out
program.save("model.lap")
lapilli.load("model.lap")(image)                                # needs neither torch nor a shader compiler

lm = lapilli.LLM("model.gguf")                                  # a language model; needs the extra `llm`
print(lm.generate("Once upon a time", max_tokens=50).text)
lapilli.Transcriber("whisper-tiny.en").transcribe("speech.wav") # speech, and translation: docs/speech.md
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

    from lapilli.llm import LLM as LLM
    from lapilli.llm import SequenceToSequence as SequenceToSequence
    from lapilli.llm import Transcriber as Transcriber
    from lapilli.runtime.devices import Device as Device
    from lapilli.runtime.devices import devices as devices
    from lapilli.runtime.devices import is_available as is_available
    from lapilli.runtime.futures import Future as Future
    from lapilli.runtime.limits import Limits as Limits
    from lapilli.runtime.load import load as load
    from lapilli.runtime.method import Method as Method
    from lapilli.runtime.pool import Pool as Pool
    from lapilli.runtime.preprocess import Preprocess as Preprocess
    from lapilli.runtime.program import Program as Program
    from lapilli.runtime.report import Report as Report
    from lapilli.verification import Check

# What needs NumPy and the player is imported when it is asked for: `import torch` imports this package, for its device.
_HOMES = {
    "LLM": "llm",
    "SequenceToSequence": "llm",
    "Transcriber": "llm",
    "Device": "runtime.devices",
    "Future": "runtime.futures",
    "Method": "runtime.method",
    "Pool": "runtime.pool",
    "Preprocess": "runtime.preprocess",
    "Program": "runtime.program",
    "Report": "runtime.report",
    "devices": "runtime.devices",
    "is_available": "runtime.devices",
    "load": "runtime.load",
    "Limits": "runtime.limits",
}

__all__ = [
    "LLM",
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
    "Pool",
    "Preprocess",
    "Program",
    "ReadError",
    "Report",
    "RunTimeoutError",
    "SequenceToSequence",
    "SignatureError",
    "Transcriber",
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
    value = getattr(import_module(f"lapilli.{home}"), name)
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
    precision: Literal["fp32", "fp16"] | None = None,
    dynamic_shapes: Any = None,
    target: str | None = None,
    fallback: Literal["cpu", "error"] = "cpu",
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    tune: bool = False,
) -> Program:
    """Compiles a model to a program, ready to run and to save. Needs the extra: `pip install lapilli[compile]`.

    Args:
        model: a module (compiled as it is in eval mode), a function or a bound method, an ExportedProgram or its `module()`,
            a TorchScript module, method or function, or the path of a file of `torch.export.save` (`.pt2`), of
            `torch.jit.save` (`.pt`) or of ONNX (`.onnx`), or of a language model: a GGUF file or a Hugging Face folder, with the
            methods that `lapilli.LLM` runs; or several methods by name, each of them an ExportedProgram or a
            tuple (module, example_inputs[, dynamic_shapes]): then `program.methods["decode"](...)` calls one. Equal weights
            are stored once.
        example_inputs: arguments of a module, as a tuple or a dict of keywords; an ExportedProgram has its own, and an ONNX
            file declares its shapes. Images in
            channels-last memory format are accepted in that format, without a copy.
        example_kwargs: keyword arguments in addition to example_inputs.
        precision: "fp32", or "fp16" for 16-bit storage with 32-bit accumulation. Inputs and outputs keep their dtypes.
            An input that only matrix products and convolutions read is rounded to float16 as it is copied; on matrix units one that
            only attention reads, too.
            None: "fp32", with target="metal" "fp16".
        dynamic_shapes: as in `torch.export.export`: which sizes may change from run to run, with their bounds. None: for an ONNX
            file, those that it declares to be open; `()`: none.
        target: None: plans for every kind of device; or the name of the one plan to make; or the name of a device, such as
            "rtx-4090" or "mali-g7x" (`lapilli.target.KNOWN`), which need not be present: one plan, with kernels and tiles for it;
            or "metal", for Apple's GPUs by MoltenVK (docs/apple.md).
        fallback: "cpu" runs operators that have no GPU kernel in torch on the CPU; `program.report()` lists them with the
            reason. "error" raises UnsupportedOperatorError instead. A program with CPU operators needs torch to run.
        metadata: strings to store in the file, such as `preprocess` and `labels`.
        progress: called with (stage, done, all) while kernels are compiled.
        tune: measures the candidates for every contraction on the device that `load` would choose, takes the fastest, and keeps
            what won for later compiles (docs/tuning.md). Takes minutes. Not with a target.

    Returns:
        the program, loaded on the device that `load` would choose.

    Raises:
        CompileError: the model cannot be captured or compiled, or an argument is not one of the choices.
        UnsupportedOperatorError: an operator has no GPU kernel (with fallback="error").
        LapilliError: torch or the shader compiler is missing.
        NoDriverError: there is no Vulkan driver.
        NoDeviceError: no device satisfies a plan of the program.
    """
    from lapilli.runtime.compiler_packages import require_compiler

    require_compiler()
    from lapilli import torch_compat

    if not torch_compat.supported():
        torch_compat.warn_unsupported("lapilli.compile", "It is tried all the same.")
    from lapilli.runtime.host import OWN
    from lapilli.runtime.program import Program
    from lapilli.target import usual_precision

    if not isinstance(tune, bool):
        raise CompileError(f"tune is {tune!r}: choose True or False (`lapilli tune --seconds` has a bound of time)")
    precision = precision or usual_precision(target)
    options: dict[str, Any] = {
        "example_kwargs": example_kwargs, "precision": precision, "dynamic_shapes": dynamic_shapes, "fallback": fallback,
        "metadata": metadata, "progress": progress,
    }  # fmt: skip
    from lapilli.llm.source_path import is_source

    if is_source(model):
        from lapilli.llm.from_source import compile_source

        given = {"example_inputs": example_inputs, "dynamic_shapes": dynamic_shapes, "tune": tune or None}
        if any(value is not None for value in (*given.values(), example_kwargs)):
            raise CompileError(f"a language model is compiled without {', '.join(given)} and example_kwargs")
        data = compile_source(model, precision=precision, target=target, metadata=metadata, progress=progress)
        return Program(data, permission=OWN)
    if tune:
        if target is not None:
            raise CompileError(f"tune=True measures the device that is there; leave target={target!r} out")
        from lapilli import tuning

        return Program(tuning.tune(model, example_inputs, **options)[0], permission=OWN)
    from lapilli.compiler import compile_to_bytes

    return Program(compile_to_bytes(model, example_inputs, target=target, **options), permission=OWN)


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
    """Compares every kernel of a model with NumPy, to find the one that computes a wrong result.

    The model runs kernel by kernel on a device, and NumPy computes the operators of each kernel from the same values. Slow:
    seconds to minutes. Needs the extra: `pip install lapilli[compile]`.

    Args:
        model: as for `compile`, but a single method.
        example_inputs: as for `compile`.
        precision: as for `compile`.
        target: name of the plan to check; None: the plan that the device would run.
        device: as for `load`.
        inputs: flat list of tensors to run on; None: those of example_inputs.
        dynamic_shapes: as for `compile`.

    Returns:
        a `Check` for every kernel: its operators, its name, and its own relative error (by norm).

    Raises:
        CompileError: the model cannot be compiled as a whole, or there is no such target.
        NoDeviceError: there is no such device, or it does not satisfy the plan.
    """
    from lapilli.runtime.compiler_packages import require_compiler

    require_compiler()
    from lapilli.verification import verify as verify_model

    return verify_model(model, example_inputs, precision, target, device, inputs, dynamic_shapes)
