"""An exporter for `transformers.exporters`: importing this module registers it under the name "vulkan".

from transformers.exporters import AutoHfExporter
from lapilli.export.hugging_face import VulkanConfig

config = VulkanConfig(precision="fp16")
exported = AutoHfExporter.from_config(config).export(model, inputs, config)
exported(**inputs)  # the model's outputs, computed by a program
exported.save_pretrained("folder")  # model.lap, and what the package keeps beside it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import lapilli
from lapilli.runtime.program import Program

try:
    from transformers.exporters import register_backend
    from transformers.exporters.configs import DynamoConfig
    from transformers.exporters.exporter_dynamo import DynamoExporter
    from transformers.exporters.metadata import ExportMetadata, load_treespec
    from transformers.exporters.runners.base import ModelRunner
except ImportError as error:
    raise ImportError(
        f"lapilli.export.hugging_face needs a transformers with exporters, such as 5.23: pip install -U transformers ({error})"
    ) from error


@dataclass
class VulkanConfig(DynamoConfig):  # type: ignore[misc]
    """How a model is exported: what `DynamoConfig` has, and the options of `lapilli.compile`.

    precision: "fp32" or "fp16". fallback: "cpu", or "error" to refuse operators without a GPU kernel.
    """

    export_format: Any = "vulkan"
    precision: Any = "fp32"
    fallback: Any = "cpu"


class VulkanExporter(DynamoExporter):  # type: ignore[misc]
    """Makes a `lapilli.Program` of a model. Raises as `torch.export.export` and `lapilli.compile` do."""

    export_format: Any = "vulkan"
    config_class = VulkanConfig
    program_suffix = ".lap"

    def export_program(self, model: Any, sample_inputs: Any, config: Any) -> tuple[Program, ExportMetadata]:
        """model: in eval mode, on the CPU. sample_inputs: its keyword arguments. config: a `VulkanConfig`."""
        exported, metadata = super().export_program(model, sample_inputs, config)
        return lapilli.compile(exported, precision=config.precision, fallback=config.fallback), metadata

    @classmethod
    def save_program(cls, program: Program, path: Any) -> None:
        """Writes one file."""
        program.save(path)

    @classmethod
    def load_program(cls, path: Any) -> Program:
        """Reads that file; which operators of torch it names for the CPU is checked."""
        return lapilli.load(path)


class VulkanRunner(ModelRunner):  # type: ignore[misc]
    """Runs a program with the model's keyword arguments."""

    def __init__(self, program: Program, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.program = program
        self._order = load_treespec(metadata.in_spec).children_specs[1].context

    @property
    def device(self) -> torch.device:
        """Where arguments are expected and results are: in the host's memory."""
        return torch.device("cpu")

    @classmethod
    def from_program(cls, program: Program, metadata: ExportMetadata, device: Any = None) -> VulkanRunner:
        """device: None or "cpu"; the program chose its own when it was loaded."""
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"device is {device}: a program takes arguments in the host's memory here, so leave it out, or call "
                "`exported.program` itself"
            )
        return cls(program, metadata)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        given = {**self.metadata.in_constants, **kwargs}
        ordered = {name: given[name] for name in self._order if name in given}
        result = self.program(**ordered, **{name: x for name, x in given.items() if name not in ordered})
        return self.unflatten(list(_tensors(result)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


register_backend(VulkanExporter, VulkanRunner)
