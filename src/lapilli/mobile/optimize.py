"""Implements `optimize_for_mobile`: checks the arguments as torch does and folds the module. For the GPU, it replaces the code
of its methods by a call of one operator, with the folded module as bytes."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import mobile_optimizer

from lapilli.capture.script_interpreter import inlined, nodes
from lapilli.errors import CompileError
from lapilli.mobile.arguments import Code, type_of
from lapilli.mobile.embed import PROGRAM, SavedModule
from lapilli.mobile.torchscript_passes import Kind, folded, passes, wrapped
from lapilli.target import METAL, usual_precision


def optimize(
    module: torch.jit.ScriptModule,
    blocklist: set[Any] | None,
    preserved: Sequence[Any] | None,
    backend: str,
) -> torch.jit.ScriptModule:
    """As `lapilli.mobile.optimize_for_mobile`."""
    if not isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"Got {type(module)}, but ScriptModule is expected.")
    blocked = _blocked(blocklist)
    names = _preserved(module, [str(name) for name in preserved or []])
    kind = str(backend).lower()
    if kind == "cpu":
        result = folded(module, names, blocked)
        result._c._register_attribute("mobile_optimized", torch._C.BoolType.get(), True)
    elif kind in ("vulkan", "metal"):
        traced = _traced(module._c._get_method("forward")) if module._c._has_method("forward") else []
        result = _for_gpu(folded(module, names, blocked | {Kind.FUSE_ADD_RELU}), names, blocked, kind, traced)
        saved = wrapped(result._c)
        saved.__class__ = SavedModule  # its save() puts a program into the file
        return saved  # type: ignore[no-any-return]
    else:
        raise TypeError(f"Unknown backend {backend!r}, must be one of 'CPU', 'Vulkan' or 'Metal'")
    return wrapped(result._c)  # type: ignore[no-any-return]


def _blocked(blocklist: set[Any] | None) -> set[Any]:
    wrong = [entry for entry in blocklist or () if not isinstance(entry, Kind)]
    if wrong:
        raise TypeError(
            f"optimization_blocklist has {wrong[0]!r}; it is a set of MobileOptimizerType: {', '.join(Kind.__members__)}"
        )
    return set(blocklist or ())


def _preserved(module: torch.jit.ScriptModule, names: list[str]) -> list[str]:
    """The names, with the methods of bundled inputs. Raises AttributeError, as torch does."""
    bundled = mobile_optimizer._get_bundled_inputs_preserved_attributes(module, names)
    if all(hasattr(module, name) for name in bundled):
        names = [*names, *bundled]
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        close = difflib.get_close_matches(missing[0], module._c._method_names(), 1)
        raise AttributeError(
            f"The following methods to preserve do not exist in script_module: {', '.join(missing)}"
            + (f". Did you mean {close[0]}?" if close else "")
        )
    return list(dict.fromkeys(names))


def _for_gpu(
    module: torch.jit.ScriptModule, preserved: list[str], blocked: set[Any], kind: str, traced: list[Any]
) -> torch.jit.ScriptModule:
    """A module whose methods call the operator. Methods of bundled inputs, and others without tensors, keep their code."""
    methods = [name for name in dict.fromkeys(("forward", *preserved)) if _computes(module, name)]
    if not methods:
        raise CompileError("the module has no method that takes a tensor: there is nothing to run on the GPU")
    for name in methods:
        _check_stateless(module, name)
    target = METAL if kind == "metal" else None
    model = _bytes(module, {"precision": usual_precision(target), "target": target, "traced": traced})
    automatic = kind == "metal" or Kind.VULKAN_AUTOMATIC_GPU_TRANSFER not in blocked
    codes = [_code(module._c._get_method(name), "run" if automatic else "run_on_device") for name in methods]
    bare = passes._hack_do_not_use_clone_module_with_class(module._c, methods, [])
    bare._register_attribute("lapilli_model", torch._C.TensorType.get(), model)
    bare._register_attribute(PROGRAM, torch._C.TensorType.get(), torch.empty(0, dtype=torch.uint8))
    bare._register_attribute(f"optimized_for_{kind}", torch._C.BoolType.get(), True)
    if automatic:
        bare._register_attribute("requires_backend_transfers", torch._C.BoolType.get(), False)
    result: torch.jit.ScriptModule = wrapped(bare)
    for code in codes:
        result.define(code)
    return result


def _computes(module: torch.jit.ScriptModule, name: str) -> bool:
    """Whether this is a method that takes tensors."""
    if not module._c._has_method(name):
        return False
    arguments = module._c._get_method(name).schema.arguments[1:]
    return any("Tensor" in str(a.type) for a in arguments) and not name.startswith(("_generate_bundled", "_bundled_"))


def _traced(method: Any) -> list[Any]:
    """Dtype and sizes of each input of a method that was traced in this process; empty where that is not known."""
    types = [value.type() for value in list(method.graph.inputs())[1:]]
    if not all(t.kind() == "TensorType" and t.sizes() is not None and t.dtype() is not None for t in types):
        return []
    return [(str(t.dtype()).removeprefix("torch."), t.sizes()) for t in types]


def _check_stateless(module: torch.jit.ScriptModule, name: str) -> None:
    for node in nodes(inlined(module._c._get_method(name).graph)):
        if node.kind() == "prim::SetAttr":
            raise CompileError(
                f"{name} assigns the attribute {node.s('name')}: a module that keeps a state from run to run cannot be optimized "
                "for the GPU in this way. Use lapilli.compile, whose programs keep states and reset them"
            )


def _bytes(module: torch.jit.ScriptModule, options: dict[str, Any]) -> torch.Tensor:
    """The module as written by torch.jit.save, in a tensor of uint8."""
    buffer = io.BytesIO()
    torch.jit.save(module, buffer, _extra_files={"lapilli.json": json.dumps(options)})
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _code(method: Any, operator: str) -> str:
    """The TorchScript source of a method that calls the operator with its arguments."""
    schema = method.schema
    arguments = [(a.name, type_of(a.type), a) for a in schema.arguments[1:]]
    (returned,) = (type_of(r.type) for r in schema.returns)
    code = Code()
    parameters = "".join(f", {name}: {kind}{_default(a)}" for name, kind, a in arguments)
    code.add(0, f"def {method.name}(self{parameters}) -> {returned}:")
    if all(kind.kind == "Tensor" for _, kind, _ in arguments):
        given = f"[{', '.join(name for name, _, _ in arguments)}], torch.jit.annotate(List[str], [])"
    else:
        code.add(1, "tensors: List[Tensor] = []")
        code.add(1, "notes: List[str] = []")
        for name, kind, _ in arguments:
            code.write(1, name, kind)
        given = "tensors, notes"
    code.add(1, f'tensors, notes = torch.ops.lapilli_prepack.{operator}(self.lapilli_model, "{method.name}", {given})')
    code.add(1, "return tensors[0]" if returned.kind == "Tensor" else f"return {code.read(1, returned)}")
    return "\n".join([*code.lines, ""])


def _default(argument: Any) -> str:
    if not argument.has_default_value():
        return ""
    value = argument.default_value
    return f" = {value!r}" if value is None or isinstance(value, bool | int | float | str) else ""
