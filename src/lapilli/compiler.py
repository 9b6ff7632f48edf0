"""compile(): the whole road from a model to a program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from lapilli import __version__
from lapilli.capture import capture
from lapilli.capture.sources import Source
from lapilli.codegen.build import build
from lapilli.codegen.select import choose_templates, write_all
from lapilli.errors import CompileError
from lapilli.graph.module import Module
from lapilli.graph.passes import prepare
from lapilli.lower import lower
from lapilli.program.writer import PlanSource, Writer
from lapilli.runtime import structure
from lapilli.runtime.program import Program
from lapilli.runtime.structure import METADATA_KEY
from lapilli.schedule.plan import Schedule, schedule
from lapilli.schedule.realize import realize
from lapilli.schedule.target import TARGETS, Target, plans_for

Progress = Callable[[str, int, int], None]


def compile(
    model: Source,
    example_inputs: Any = None,
    *,
    precision: str = "fp32",
    dynamic_shapes: Any = None,
    target: str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Program:
    """Compile a model into a program that runs on any Vulkan device.

    model: an nn.Module, an ExportedProgram, or the path of a .pt2 file.
    example_inputs: a tuple of the model's arguments (or a dict of keyword arguments); needed for an nn.Module.
    precision: "fp32", or "fp16": weights and intermediates are stored in half precision and computed in float32;
        inputs and outputs keep the model's own types.
    dynamic_shapes: as torch.export takes them, for example {"x": {0: torch.export.Dim("batch", max=16)}}.
    target: None for a program that suits every device, or the name of one plan to make (see `lapilli.schedule.target`).
    metadata: strings that travel in the file.
    progress: called with (stage, done, all) while kernels are compiled.

    Raises CompileError, UnsupportedOperatorError (naming the operators) or TypeError (element types).
    """
    data = compile_to_bytes(model, example_inputs, precision, dynamic_shapes, target, metadata, progress)
    return Program._from_bytes(data)


def compile_to_bytes(
    model: Source,
    example_inputs: Any = None,
    precision: str = "fp32",
    dynamic_shapes: Any = None,
    target: str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> bytes:
    """The bytes of the program file; no device is needed. Arguments as for `compile`."""
    targets = _targets(precision, target)
    metadata = _checked(metadata)
    exported = capture(model, example_inputs, dynamic_shapes)
    module = prepare(exported)
    metadata[METADATA_KEY] = _structure(exported, module)
    return assemble(module, precision, targets, metadata, progress)[0]


def assemble(
    module: Module,
    precision: str,
    targets: Sequence[Target],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
) -> tuple[bytes, list[Schedule]]:
    """The program file of a prepared module, and the schedules of its plans, one for every target."""
    graphs = {half: lower(module, precision, half) for half in {t.half for t in targets}}
    realized = {half: realize(graph) for half, graph in graphs.items()}
    schedules = [schedule(graphs[t.half], t, choose_templates, realized[t.half]) for t in targets]
    kernels = [write_all(s) for s in schedules]
    codes = build(
        (w.source for written in kernels for w in written.values()),
        None if progress is None else lambda done, total: progress("kernels", done, total),
    )
    writer = Writer()
    plans = [PlanSource(s.target, s.order, k, s.graph.outputs) for s, k in zip(schedules, kernels, strict=True)]
    writer.method("forward", schedules[0].graph, plans, codes)
    decisions = {"lapilli.schedule": _decisions(schedules)}
    return writer.bytes(f"lapilli {__version__}", {**metadata, **decisions}), schedules


def _targets(precision: str, target: str | None) -> list[Target]:
    if precision not in ("fp32", "fp16"):
        raise CompileError(f'precision is {precision!r}: choose "fp32" or "fp16"')
    plans = plans_for(precision)
    if target is None:
        return plans
    if target not in {t.name for t in plans}:
        names = ", ".join(t.name for t in plans)
        raise CompileError(f"target is {target!r}: with precision {precision!r} choose None (all), or one of {names}")
    return [TARGETS[target]]


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    result = dict(metadata or {})
    for key, value in result.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CompileError(
                f"metadata must map strings to strings; {key!r} is a {type(value).__name__} (use json.dumps)"
            )
        if key.startswith("lapilli."):
            raise CompileError(f"metadata key {key!r}: names that begin with 'lapilli.' are reserved")
    return result


def _structure(exported: ExportedProgram, module: Module) -> str:
    """How inputs and outputs nest, as metadata."""
    call = exported.call_spec
    inputs = structure.from_torch(call.in_spec, module.fixed_inputs)
    outputs = structure.from_torch(call.out_spec, module.fixed_outputs)
    signature = exported.module_call_graph[0].signature
    given = (signature.forward_arg_names or []) if signature is not None else []
    names = tuple(given[: len(inputs.children[0].children)])
    return structure.Structure(inputs, outputs, names).dumps()


def _decisions(schedules: list[Schedule]) -> str:
    """Why every value of a plan was realised, in the order of its commands, for `lapilli inspect`."""
    reasons = {
        s.target.name: {"load": [t.reason for t in s.order.load], "run": [t.reason for t in s.order.run]}
        for s in schedules
    }
    return json.dumps(reasons, separators=(",", ":"))
