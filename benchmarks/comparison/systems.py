"""How each system runs a module. What a system raises is its refusal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from workers import Result

from comparison.cases import Inputs
from comparison.judging import expected, judge

Run = Callable[[], list[Tensor]]
"""From tensors on the host to tensors on the host."""


class System:
    """strict: the environment variable that forbids the CPU."""

    strict = ""

    def open(self) -> None:
        """Makes the system ready."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        raise NotImplementedError

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        """Runs a case, and compares."""
        want, exact = expected(model, inputs)
        return judge(self.prepare(model, inputs)(), want, exact)


class Eager(System):
    """A device named vulkan, which a package brings."""

    def __init__(self, package: str, strict: str) -> None:
        self.package, self.strict = package, strict

    def open(self) -> None:
        if self.package == "lapilli":
            if not hasattr(torch, "vulkan"):  # in an installed package the entry point has done so
                from lapilli import autoload

                autoload.register()
        else:
            __import__(self.package)

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        there = copy.deepcopy(model).to("vulkan")
        return lambda: [t.cpu() for t in tree_leaves(there(*(x.to("vulkan") for x in inputs)))]

    def trained(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The loss of a model, inputs and labels on the device, as the system runs it."""
        return loss


class TorchCompile(Eager):
    """torch.compile with the backend vulkan: for tensors of the CPU, in training for those of the device."""

    def __init__(self) -> None:
        super().__init__("lapilli", "LAPILLI_STRICT")

    def open(self) -> None:
        super().open()
        from torch._dynamo.backends.registry import list_backends, register_backend

        if "vulkan" not in list_backends(None):  # not installed: no entry point
            from lapilli.backend import vulkan

            register_backend(vulkan, name="vulkan")

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        torch._dynamo.reset()  # graphs of other cases count towards its limit
        made = torch.compile(model, backend="vulkan", fullgraph=True)
        return lambda: tree_leaves(made(*inputs))

    def trained(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(loss, backend="vulkan")


class Compiled(System):
    """lapilli.compile: a program in a file."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        import lapilli

        self.program = lapilli.compile(model, inputs)
        return lambda: tree_leaves(self.program(*inputs))

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        found = super().case(model, inputs)
        return found | {"cpu": sorted({o.operator for o in self.program.report().on_cpu})}


class Stock(System):
    """PyTorch's own Vulkan backend, in a wheel as pip installs it."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        return lambda: [t.cpu() for t in tree_leaves(model(*(x.to("vulkan") for x in inputs)))]


class ExecuTorch(System):
    """ExecuTorch's Vulkan delegate: what its partitioner would give to it."""

    def lower(self, model: nn.Module, inputs: Inputs, dynamic_shapes: Any = None) -> tuple[Any, Result]:
        """The program, and how many of its operators are delegated."""
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import to_edge_transform_and_lower

        logging.disable()
        exported = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
        edge = to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner()])
        told = get_delegation_info(edge.exported_program().graph_module)
        table = told.get_operator_delegation_dataframe()
        rest = table[(table.op_type != "Total") & (table.occurrences_in_non_delegated_graphs > 0)]
        rest = rest[~rest.op_type.isin(["getitem"])]
        inside, outside = int(told.num_delegated_nodes), int(rest.occurrences_in_non_delegated_graphs.sum())
        counts = {"delegated": inside, "operators": inside + outside, "subgraphs": int(told.num_delegated_subgraphs)}
        return edge, {"verdict": "not run", "rest": sorted(rest.op_type), **counts}

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        return self.lower(model, inputs)[1]


SYSTEMS: dict[str, Callable[[], System]] = {
    "lapilli-compiled": Compiled,
    "lapilli-torch-compile": TorchCompile,
    "lapilli-eager": lambda: Eager("lapilli", "LAPILLI_STRICT"),
    "torchvulkan": lambda: Eager("torchvulkan", "TORCHVULKAN_STRICT"),
    "pytorch": Stock,
    "executorch": ExecuTorch,
}
