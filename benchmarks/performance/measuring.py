"""Times of Lapilli and of torch for the same work in the same process, and how far the results are from float64's."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from common import apart, cuda_graph, median
from torch import Tensor, nn

from lapilli.compiler import compile_to_bytes
from lapilli.runtime.program import Program

HAS_CUDA = torch.cuda.is_available()
ROUNDS = 50
"""Runs whose median is taken, by CUDA's clock."""


@dataclass
class Row:
    """A line of a table. seconds: by system; error: of Lapilli's result from float64's, relative to its norm; flops: of the
    work, if a rate says more than a time; note: what else there is to say, such as why a system has no time."""

    case: str
    seconds: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    flops: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def host() -> str:
    """Where torch computes: "cuda" or "cpu"."""
    return "cuda" if HAS_CUDA else "cpu"


def by_device(function: Callable[[], object]) -> float:
    """Seconds of torch's kernels: by CUDA's clock, or the host's on a CPU."""
    if not HAS_CUDA:
        return median(function)
    for _ in range(5):
        function()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def reference(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """The result in float64, where torch computes: CUDA is quicker for large models."""
    exact = copy.deepcopy(model).to(host(), torch.float64)
    result = exact(*(x.to(host(), torch.float64 if x.is_floating_point() else x.dtype) for x in inputs))
    return result.cpu()


@torch.inference_mode()
def host_to_host(
    case: str, model: nn.Module, inputs: Sequence[Tensor], precision: str, device: str | int | None
) -> Row:
    """A model from tensors of the host to a tensor of the host, in both systems. model: in float32, as are its inputs."""
    row = Row(case)
    dtype = torch.float16 if precision == "fp16" else torch.float32
    wanted = reference(model, inputs)
    with Program(compile_to_bytes(model, tuple(inputs), precision=precision), device) as program:
        row.error = apart(program(*inputs), wanted)
        row.seconds["lapilli"] = median(program.bind(*inputs))
        row.seconds["lapilli, call"] = median(lambda: program(*inputs))
    on_device = copy.deepcopy(model).to(host(), dtype if HAS_CUDA else torch.float32)
    given = [x.to(host(), on_device_type(x, dtype)) for x in inputs]
    row.seconds["torch"] = median(lambda: on_device(*(_moved(x, dtype) for x in inputs)).cpu())
    if HAS_CUDA:
        queue, _ = cuda_graph(lambda: on_device(*given))

        def replay() -> None:
            queue()
            torch.cuda.synchronize()

        row.seconds["CUDA graph, device to device"] = median(replay)
    return row


def on_device_type(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of an input where torch computes: half precision on a GPU alone, for its CPU is slow there."""
    return dtype if x.is_floating_point() and HAS_CUDA else x.dtype


def _moved(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(host(), on_device_type(x, dtype))


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        """The function's result."""
        return self.function(*args)


@torch.inference_mode()
def kernels(
    case: str, function: Callable[..., Tensor], inputs: Sequence[Tensor], flops: float, device: str | int | None
) -> Row:
    """A function of tensors in their own precision, by the devices' clocks. The copy of inputs and results is not counted."""
    row = Row(case, flops=flops)
    model = Function(function)
    exact = function(*(x.to(host(), torch.float64) for x in inputs)).cpu()
    with Program(compile_to_bytes(model, tuple(inputs)), device) as program:
        row.error = apart(program(*inputs), exact)
        row.seconds["lapilli"] = sum(k.seconds for k in program.profile([x.numpy() for x in inputs], 15).kernels)
    given = [x.to(host()) for x in inputs]
    row.seconds["torch"] = by_device(lambda: function(*given))
    return row
