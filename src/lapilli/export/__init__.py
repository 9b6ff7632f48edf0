"""lapilli.export.to_vulkan: compiles parts of an exported program with Lapilli and leaves the rest to torch.

lowered = lapilli.export.to_vulkan(torch.export.export(model, (x,)), VulkanPartitioner(precision="fp16"))
lowered.module()(x)                          # a module that can be part of another one, and be exported again
lowered.save("model.pt2")                    # torch.export.load("model.pt2") after `import lapilli`
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument

from lapilli.errors import CompileError
from lapilli.export.partitioner import VulkanPartitioner
from lapilli.export.segments import Segment, build, rewrite
from lapilli.graph.module import Module
from lapilli.legalize.decompose import is_decomposable
from lapilli.legalize.levels import levels, segments
from lapilli.lower import refusals
from lapilli.lower.graph import is_computed
from lapilli.runtime.compiler_packages import require_compiler
from lapilli.runtime.report import OperatorReport, Report

__all__ = ["LoweredProgram", "VulkanPartitioner", "to_vulkan"]


class LoweredProgram:
    """The result of `to_vulkan`."""

    def __init__(self, program: ExportedProgram, report: Report) -> None:
        self._program, self._report = program, report

    def exported_program(self) -> ExportedProgram:
        """The exported program, with calls of `lapilli::run`."""
        return self._program

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph of the exported program."""
        graph: fx.GraphModule = self._program.graph_module
        return graph

    def module(self) -> torch.nn.Module:
        """A module that runs it. It may be part of a larger module, and be exported with it."""
        return self._program.module()

    def report(self) -> Report:
        """The operators that were lowered ("gpu"), and those that stay with torch ("cpu"), with the reason."""
        return self._report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `.pt2` file. To read it with `torch.export.load`, first `import lapilli`."""
        torch.export.save(self._program, path)


def to_vulkan(program: ExportedProgram, partitioner: VulkanPartitioner | None = None) -> LoweredProgram:
    """Compiles the operators of an exported program for the GPU, and replaces them by calls of `lapilli::run`.

    Operators that are not lowered stay ATen operators of the graph. Weights that only lowered operators read move into the
    compiled programs.

    Args:
        program: from `torch.export.export`.
        partitioner: which operators to lower, and how; None: all that have kernels.

    Raises:
        CompileError: program is no ExportedProgram.
        LapilliError: the shader compiler is missing.
    """
    require_compiler()
    if not isinstance(program, ExportedProgram):
        raise CompileError(f"to_vulkan takes an ExportedProgram (torch.export.export), not a {type(program).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
        core = program.run_decompositions({})
    return _Lowering(core, partitioner or VulkanPartitioner()).result()


class _Lowering:
    def __init__(self, program: ExportedProgram, partitioner: VulkanPartitioner) -> None:
        self.program, self.partitioner = program, partitioner
        self.graph = program.graph_module.graph
        module = Module.from_exported(program)
        self.constants = module.constants
        self.refused = self._refusals(module)

    def _refusals(self, module: Module) -> dict[fx.Node, str]:
        found = {n: r for n, r in refusals(module).items() if not is_decomposable(module, n)}
        for node in self.graph.nodes:
            if is_computed(node):
                reason = self.partitioner.refuses(node.target)
                if reason is not None:
                    found[node] = reason
        return found

    def result(self) -> LoweredProgram:
        programs: dict[int, Segment] = {}
        while True:
            found = levels(self.graph, self.refused)
            if not self._give_up(segments(self.graph, found), programs):
                break
        return self._finish(found, programs)

    def _give_up(self, groups: dict[int, list[fx.Node]], programs: dict[int, Segment]) -> bool:
        """Compiles groups of operators; returns whether one of them has to stay with torch after all."""
        programs.clear()
        for level, nodes in groups.items():
            computed = [n for n in nodes if is_computed(n)]
            reason = ""
            if len(computed) < self.partitioner.min_operators:
                reason = f"fewer than {self.partitioner.min_operators} operators"
            else:
                try:
                    programs[level] = build(nodes, self.constants, self.program.graph_module, self.partitioner.kept())
                except (CompileError, TypeError) as error:
                    reason = str(error)
            if reason:
                self.refused.update(dict.fromkeys(computed, reason))
                return True
        return False

    def _finish(self, found: dict[fx.Node, int], programs: dict[int, Segment]) -> LoweredProgram:
        mode = detect_fake_mode([n.meta.get("val") for n in self.graph.nodes])
        tensors = {k: torch.frombuffer(bytearray(s.data), dtype=torch.uint8) for k, s in programs.items()}
        assert mode is not None
        graph = rewrite(self.graph, found, programs, {k: mode.from_tensor(t) for k, t in tensors.items()})
        rows = tuple(
            OperatorReport(n.name, str(n.target), "cpu" if n in self.refused else "gpu", self.refused.get(n, ""))
            for n in self.graph.nodes
            if is_computed(n)
        )
        order = dict.fromkeys(found[n] for n in self.graph.nodes if is_computed(n))
        parts = tuple("cpu" if level % 2 else "gpu" for level in sorted(order))
        named = {f"lapilli_program_{k // 2}": t for k, t in tensors.items()}
        return LoweredProgram(_exported(self.program, graph, named), Report(parts, rows))


def _exported(program: ExportedProgram, graph: fx.Graph, programs: dict[str, torch.Tensor]) -> ExportedProgram:
    """An exported program with another graph, whose first placeholders are programs; unused weights are removed."""
    signature = program.graph_signature
    specs = [InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), name) for name in programs]
    kept: list[InputSpec] = []
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    changed = {s.target for s in signature.output_specs if s.target is not None}
    for spec in signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        is_weight = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if is_weight and node is not None and not node.users and spec.target not in changed:
            graph.erase_node(node)
        else:
            kept.append(spec)
    targets = {s.target for s in kept}
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature([*specs, *kept], signature.output_specs),
        state_dict={k: v for k, v in program.state_dict.items() if k in targets},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=_only(program.constants, targets) | programs,
        verifiers=[program.verifier],
    )


def _only(constants: dict[str, Any], targets: Iterable[str | None]) -> dict[str, Any]:
    return {k: v for k, v in constants.items() if k in targets or not isinstance(v, torch.Tensor)}
