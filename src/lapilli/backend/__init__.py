"""The backend of torch.compile(model, backend="vulkan").

Torch finds it by its entry point; nothing needs to be imported. docs/torch-compile.md says when tensors are copied.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from lapilli import torch_compat
from lapilli.backend.executable import Executable, Kind
from lapilli.backend.options import Options
from lapilli.backend.placement import compiling, keep_sizes_of_convolutions
from lapilli.backend.trace import Compiler, compile_graph
from lapilli.eager import device_registration
from lapilli.runtime.compiler_packages import require_compiler
from lapilli.runtime.report import Report

__all__ = ["reports", "vulkan"]

keep_sizes_of_convolutions()  # torch.compile imports this module before it traces

_live: weakref.WeakValueDictionary[int, Executable] = weakref.WeakValueDictionary()
_count = itertools.count()


def vulkan(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph for torch.compile.

    Args:
        gm: the graph that torch.compile captured.
        example_inputs: its inputs, as fake or real tensors.
        options: the fields of `Options`, by name.
        mode: a mode of torch.compile; those other than "default" change nothing, and warn.

    Returns:
        a function with the signature of the graph.

    Raises:
        CompileError: an option or its value is unknown.
        LapilliError: the shader compiler is missing.
    """
    require_compiler()
    chosen = Options.of(options, mode)
    if not torch_compat.supported():
        torch_compat.warn_unsupported(
            'torch.compile(backend="vulkan")', "Until then PyTorch runs the graphs as they are."
        )
        return gm.forward
    device_registration.ready()

    def compiler(kind: str) -> Compiler:
        def compile(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            made = Executable(graph, _kind(kind), chosen)
            _live[next(_count)] = made

            def call(args: list[Any]) -> list[Any]:
                return made(args)

            call._boxed_call = True  # type: ignore[attr-defined]  # arguments come as a list, which the call empties
            return call

        return compile

    with compiling():
        return compile_graph(gm, example_inputs, compiler("forward"), compiler("backward"), compiler("inference"))


def reports() -> list[tuple[str, Report]]:
    """Where the operators of the compiled graphs run.

    Returns:
        the kind ("inference", "forward" or "backward") and the report of every graph that is still in use and has been called.
    """
    return [(e.kind.name, e.report) for e in list(_live.values()) if e.report is not None]


def _kind(name: str) -> Kind:
    """The kind of the graph that is being compiled, with AOTAutograd's metadata of it."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or name == "backward":
        return Kind(name)
    changed = list(metadata.mutated_inp_runtime_indices)  # the first results are their new values
    weights = tuple(k for k in metadata.static_input_indices if k not in changed)
    updates = {
        len(changed) + k: (changed.index(output.base_idx), output.base_idx)
        for k, output in enumerate(metadata.output_info)
        if output.output_type is OutputType.alias_of_input and output.base_idx in changed
    }
    return Kind(name, weights, metadata.num_forward if name == "forward" else None, updates, tuple(changed))
