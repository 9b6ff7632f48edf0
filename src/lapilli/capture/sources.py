"""Sources of models: nn.Module, ExportedProgram, TorchScript, and files of the latter two and of ONNX."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._dynamo.decorators import dont_skip_tracing
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map

from lapilli.capture import inference, recurrent_layers, torchscript, training_mode
from lapilli.capture.examples import Arguments
from lapilli.capture.functions import FunctionModule
from lapilli.capture.guards import unproven
from lapilli.capture.onnx import OnnxModule, is_onnx_file, load_onnx, onnx_examples
from lapilli.capture.repeated_layers import layers_once
from lapilli.capture.rewriting import rewriting
from lapilli.errors import CompileError
from lapilli.torch_compat import without_logs, without_stack_traces

Source: TypeAlias = (
    "torch.nn.Module | Callable[..., Any] | ExportedProgram | torchscript.ScriptSource | str | os.PathLike[str]"
)


def capture(model: Source, example_inputs: Any = None, dynamic_shapes: Any = None) -> ExportedProgram:
    """Exports a model for inference.

    example_inputs: a tuple of positional arguments, or a dict of keyword arguments; an exported program needs none. Raises
    CompileError if the source is of another kind, or if torch.export refuses it, with the reason.
    """
    if isinstance(model, ExportedProgram):
        training_mode.warn(model)
        return program_on_cpu(model)
    if isinstance(model, str | os.PathLike):
        return capture(*prepared(model, example_inputs, dynamic_shapes))
    if isinstance(model, OnnxModule):
        return _capture_onnx(model, example_inputs, dynamic_shapes)
    if torchscript.is_torchscript(model):
        return _capture_script(model, example_inputs, dynamic_shapes)
    if not isinstance(model, torch.nn.Module):
        if not callable(model) or isinstance(model, type):
            raise CompileError(
                f"cannot compile a {type(model).__name__}: give an nn.Module, a function or a TorchScript module with example "
                "inputs, an ExportedProgram, or the path of a .pt2 file, a TorchScript file or an ONNX file"
            )
        model = FunctionModule(model)
    if any(type(m).__module__.startswith("torch.ao.nn.quantized") for m in model.modules()):
        return _capture_script(_scripted(model, example_inputs), example_inputs, dynamic_shapes)
    args, kwargs = _distinct(_arguments(example_inputs))
    model = module_on_cpu(model)
    training = [m for m in model.modules() if m.training]
    fixed = False
    try:
        model.eval()
    except NotImplementedError:  # the module of an exported program cannot change its mode
        fixed = True
    try:
        with _tracing(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
            exported = _exported(model, args, kwargs, dynamic_shapes)
    except Exception as error:
        raise CompileError(f"torch.export cannot capture {_name(model)}: {error}{_hint(error)}") from error
    finally:
        for m in training:
            m.training = True
    if fixed:
        training_mode.warn(exported)
    return exported


def prepared(model: Source, example_inputs: Any = None, dynamic_shapes: Any = None) -> tuple[Source, Any, Any]:
    """Arguments of `capture` with what is read from a file: the model, and the inputs and sizes that an ONNX file declares."""
    if isinstance(model, str | os.PathLike):
        model = _load(Path(model))
    if isinstance(model, OnnxModule):
        if isinstance(example_inputs, Arguments):
            example_inputs = model.bound(example_inputs.args, example_inputs.kwargs)
        return model, *onnx_examples(model, example_inputs, dynamic_shapes)
    return model, example_inputs, dynamic_shapes


_MOST_REFINEMENTS = 4


def _refined(error: UserError, dynamic_shapes: Any) -> Any:
    """Dynamic sizes as torch.export proposes them in an error. Raises that error if it proposes none."""
    proposed = re.search(r"Suggested fixes:\n(?:  .*\n?)+", str(error))
    if proposed is None:
        raise error
    try:
        refined = refine_dynamic_shapes_from_suggested_fixes(proposed[0].rstrip(), dynamic_shapes)
    except Exception:
        raise error from None
    # A least size that no fix names is that of before, not 0.
    return tree_map(lambda d: Dim(d.__name__, min=max(d.min, 1), max=d.max) if isinstance(d, Dim) else d, refined)


def _capture_onnx(model: OnnxModule, example_inputs: Any, dynamic_shapes: Any) -> ExportedProgram:
    args = _distinct(tuple(example_inputs))
    try:
        with _tracing(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(_MOST_REFINEMENTS if model.declares_sizes else 0):
                try:
                    return _exported(model, args, {}, dynamic_shapes)
                except UserError as error:
                    # The names that a file gives to sizes are no promise that the model takes any: torch says which ones it does.
                    dynamic_shapes = _refined(error, dynamic_shapes)
            return _exported(model, args, {}, dynamic_shapes)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(
            f"torch.export cannot capture the ONNX model with inputs {model.described}: {error}{_hint(error)}"
        ) from error


@contextmanager
def _tracing(model: torch.nn.Module) -> Iterator[None]:
    """A context for tracing a model: calls that torch.export would decompose or lose become single operators. Dynamo skips our code
    elsewhere, but here it must trace it, because branches and loops run under that mode. (Marking each function instead took
    longer than the rest of the export.)"""
    rewrites = {**inference.REWRITES, **recurrent_layers.rewrites()}
    with (
        torch.no_grad(),
        without_logs(),
        dont_skip_tracing(),
        recurrent_layers.whole_layers(model),
        layers_once(model),
        rewriting(model, rewrites),
    ):
        yield


def _name(model: torch.nn.Module) -> str:
    return repr(model) if isinstance(model, FunctionModule) else type(model).__name__


def _hint(error: Exception) -> str:
    """Advice for a size of 0 or 1 in the example, which torch.export treats as fixed."""
    if "specialized it to be a constant (1)" not in str(error) and "specialized it to be a constant (0)" not in str(
        error
    ):
        return ""
    return "\n\nA size that varies needs an example of 2 or more: give an example of 2, and the program still takes 1."


@without_stack_traces()
def _exported(model: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> ExportedProgram:
    """Exports a module. If torch.export cannot prove a condition on sizes, the condition is tested for all of them."""
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except UserError as error:
        if "satisfy the generated guard" not in str(error):
            raise
        program = torch.export.export(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        if unproven(program):
            raise
        return program


def _scripted(model: torch.nn.Module, example_inputs: Any) -> torch.jit.ScriptModule:
    """A module made by torch.ao.quantization.convert, scripted or, if that fails, traced: torch.export cannot read packed
    weights."""
    args, kwargs = _arguments(example_inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scripted: torch.jit.ScriptModule = torch.jit.script(model)
        except Exception:
            try:
                scripted = torch.jit.trace(model, args, example_kwarg_inputs=kwargs or None, check_trace=False)  # type: ignore[no-untyped-call]
            except Exception as error:
                raise CompileError(
                    f"{type(model).__name__} has quantized modules, and torch can neither script nor trace it: {error}"
                ) from error
    return scripted


def _capture_script(model: torchscript.ScriptSource, example_inputs: Any, dynamic_shapes: Any) -> ExportedProgram:
    if example_inputs is None:
        raise CompileError(
            f"a TorchScript model does not say the sizes of its inputs: give example_inputs for {torchscript.describe(model)}"
        )
    args, kwargs = _distinct(_arguments(example_inputs))
    if isinstance(model, torch.jit.ScriptModule) and _are_elsewhere(model.state_dict().values()):
        model = copy.deepcopy(model).cpu()
    module = torchscript.module_of(model, args, kwargs)
    try:
        with _tracing(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"torch.export cannot capture {torchscript.describe(model)}: {error}") from error


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Arguments):
        return example_inputs.args, example_inputs.kwargs
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        raise CompileError("example_inputs is a tensor: give a tuple of the model's arguments, such as (x,)")
    if not isinstance(example_inputs, tuple | list):
        raise CompileError(
            f"example_inputs is a {type(example_inputs).__name__}: give a tuple of the model's arguments"
        )
    return tuple(example_inputs), {}


def module_on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself or, if some of its tensors are on another device, a copy with all tensors on the CPU. The copy shares
    tensors as the module does; the caller's module stays unchanged."""
    kept: dict[int, Any] = {}
    held = [value for m in model.modules() for value in vars(m).values() if isinstance(value, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *held]
    if not _are_elsewhere(tensors):
        return model
    for tensor in tensors:
        moved: torch.Tensor = tensor
        if _are_elsewhere([tensor]):
            moved = tensor.detach().cpu()
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
        kept.setdefault(id(tensor), moved)
    return copy.deepcopy(model, kept)


def program_on_cpu(program: ExportedProgram) -> ExportedProgram:
    """The program itself or, if it was exported from another device, a copy for the CPU."""
    values = [*program.state_dict.values(), *program.constants.values()]
    vals = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    if not _are_elsewhere(values) and not _are_elsewhere(vals):
        return program
    return move_to_device_pass(copy.deepcopy(program), "cpu")


def _are_elsewhere(values: Iterable[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta") for v in values)


def _distinct(inputs: Any) -> Any:
    """The inputs on the CPU, with copies of repeated tensors, which torch.export would take for one input."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf.detach().cpu() if _are_elsewhere([leaf]) else leaf
        return leaf.detach().cpu().clone()

    return tree_map(once, inputs)


def _load(path: Path) -> ExportedProgram | torch.jit.ScriptModule | OnnxModule:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if is_onnx_file(path):
        return load_onnx(path)
    if torchscript.is_torchscript_file(path):
        return torchscript.load(path)
    if path.suffix != ".pt2":
        raise CompileError(
            f"{path.name}: only files of torch.export.save (.pt2), of torch.jit.save and of ONNX (.onnx) can be compiled. What "
            "torch.save wrote holds no code: load it, and compile the module"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise CompileError(f"{path} cannot be read by torch.export.load: {error}") from error
