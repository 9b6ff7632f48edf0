"""PT2E's reference representation, in which torch computes in integers: the results are torch's, bit for bit."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lapilli
from lapilli.quantization import VulkanQuantizer, get_symmetric_quantization_config

pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")

pytestmark = pytest.mark.usefixtures("on_any_device")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 12, 3, stride=2)
        self.last = nn.Linear(12 * 9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x))
        result: torch.Tensor = self.last(F.relu(self.second(y)).flatten(1))
        return result


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(36, 20), (11, 36)),
    "network": (Network(), (2, 8, 8, 8)),
}


@pytest.mark.part(8)
@pytest.mark.parametrize("plan", ["cpu-fp32", "gpu-fp32-dot"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_reference_representation(name: str, per_channel: bool, plan: Literal["cpu-fp32", "gpu-fp32-dot"]) -> None:
    torch.manual_seed(0)
    model, shape = MODELS[name]
    x = torch.randn(shape)
    quantizer = VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=per_channel))
    prepared = pt2e.prepare_pt2e(torch.export.export(copy.deepcopy(model).eval(), (x,)).module(), quantizer)
    for _ in range(4):
        prepared(torch.randn(shape))
    converted = pt2e.convert_pt2e(copy.deepcopy(prepared))
    reference = pt2e.convert_pt2e(prepared, use_reference_representation=True)
    is_whole = any("out_dtype" in str(n.target) for n in reference.graph.nodes)
    assert is_whole is not per_channel  # torchao 0.18 writes layers of one scale in integers
    with lapilli.compile(torch.export.export(reference, (x,)), target=plan, fallback="error") as program:
        got = program(x)
    wanted = reference(x)
    assert torch.equal(got, wanted)
    with lapilli.compile(torch.export.export(converted, (x,)), target=plan, fallback="error") as program:
        usual = program(x)
    # Where layers have one scale, the reference rounds the bias to a multiple of its steps, so that results differ by a step.
    assert torch.equal(usual, wanted) or not per_channel
