"""Models whose weights are on the device, as they are after training there, and examples that are: every source compiles."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli import autoload
from lapilli.export import to_vulkan

autoload.register()
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.jit, that it is deprecated


class Tied(nn.Module):
    """Shared weights, buffers, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(8))
        self.shift = torch.rand(8)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.norm(self.embed(tokens).mean(1) * self.scale)
        return self.head(y + self.shift.to(y.device) + torch.arange(8, device=tokens.device))


def through(save: Callable[..., Any], load: Callable[..., Any], source: Any, **named: Any) -> Any:
    buffer = io.BytesIO()
    save(source, buffer)
    buffer.seek(0)
    return load(buffer, **named)


def test_models_on_the_device() -> None:
    torch.manual_seed(0)
    model, tokens = Tied().eval(), torch.randint(0, 10, (3, 4))
    want, given = model(tokens), tokens.to("vulkan")
    own = copy.deepcopy(model).to("vulkan")
    own.shift = own.shift.to("vulkan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported, traced = torch.export.export(own, (given,)), torch.jit.trace(own, given)
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(own.state_dict())
    sources: dict[str, tuple[Any, Any]] = {
        "module": (own, (given,)),
        "module, example on the CPU": (own, (tokens,)),
        "example on the device": (model, (given,)),
        "state_dict": (loaded, (given,)),
        "exported": (exported, None),
        "torch.export.save": (through(torch.export.save, torch.export.load, exported), None),
        "traced": (traced, (given,)),
        "torch.jit.save": (through(torch.jit.save, torch.jit.load, traced, map_location="cpu"), (tokens,)),
    }
    sizes = set()
    for name, (source, example) in sources.items():
        with lapilli.compile(source, example) as program:
            torch.testing.assert_close(program(tokens), want, msg=lambda text, name=name: f"{name}: {text}")
            sizes.add(len(program.report().segments))
    torch.testing.assert_close(to_vulkan(exported).module()(tokens), want)
    assert sizes == {1}
    assert {p.device.type for p in own.parameters()} == {own.shift.device.type} == {"vulkan"}
    assert own.head.weight is own.embed.weight and {t.device.type for t in exported.state_dict.values()} == {"vulkan"}
