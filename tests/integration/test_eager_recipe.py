"""torch.ao.quantization's eager recipe: whole models, and random chains of its operators, beside torch's codes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import random_eager
import torch
from torch import nn
from torch.ao import quantization

import lapilli

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@pytest.mark.parametrize("seed", range(24))
def test_random_chains(seed: int) -> None:
    random_eager.check(seed, "cpu-fp32")


@pytest.mark.parametrize("kind", random_eager.KINDS)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("engine", ("x86", "qnnpack"))
def test_convolutions_of_one_dimension(engine: str, transposed: bool, kind: str) -> None:
    """Transposed ones have as many channels as they read: oneDNN, which "x86" calls, computes others wrongly (torch 2.13)."""
    torch.manual_seed(0)
    layer: Any = nn.ConvTranspose1d if transposed else nn.Conv1d
    channels = (6, 6) if transposed else (4, 5)
    with random_eager.engine_of(engine):
        model = nn.Sequential(
            quantization.QuantStub(), layer(6, channels[0], 3, 2, 1, groups=2), nn.ReLU(), layer(*channels, 2),
            quantization.DeQuantStub(),
        ).eval()  # fmt: skip
        settings = quantization.get_default_qconfig(engine)
        qconfig: Any = quantization.QConfig(settings.activation, quantization.default_weight_observer)
        model.qconfig = qconfig
        prepared = quantization.prepare(model)
        x = torch.randn(2, 6, 17)
        prepared(x)
        converted = quantization.convert(prepared)
        with lapilli.compile(
            random_eager.turned(converted, kind, x), (x,), target="cpu-fp32", fallback="error"
        ) as program:
            off = (program(x) - converted(x)).abs() / converted[3].scale
            assert len(program.report().in_integers) == 2
    assert off.max() <= (1.001 if engine == "qnnpack" else 0)
    assert (off > 0).float().mean() < 0.1


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer, self.last = kind(8, 9), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.layer(x)[0])
        return y


@pytest.mark.parametrize("kind", random_eager.KINDS)
@pytest.mark.parametrize("layer", (nn.LSTM, nn.GRU))
def test_quantized_recurrent_layers_are_refused(layer: Any, kind: str) -> None:
    model, x = Recurrent(layer).eval(), torch.randn(3, 2, 8)
    with random_eager.engine_of("x86"), warnings.catch_warnings():
        converted = quantization.quantize_dynamic(model, {layer, nn.Linear}, dtype=torch.qint8)
        source = random_eager.turned(converted, kind, x)
        with pytest.raises(
            lapilli.CompileError, match=r"recurrent layers \(LSTM.*are not taken.*leave recurrent layers as floats"
        ):
            lapilli.compile(source, (x,))
        advised = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        with lapilli.compile(advised, (x,), target="cpu-fp32") as program:
            assert (program(x) - advised(x)).abs().max() < 0.01


def test_quantized_recurrent_cells_are_refused() -> None:
    with random_eager.engine_of("x86"):
        converted = quantization.quantize_dynamic(nn.Sequential(nn.GRUCell(8, 9)), {nn.GRUCell}, dtype=torch.qint8)
        with pytest.raises(lapilli.CompileError, match="leave recurrent layers as floats"):
            lapilli.compile(converted, (torch.randn(2, 8),))
