"""Weights whose codes are chosen by data: `lapilli.quantization.fit_weights`."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

import lapilli
from lapilli.errors import CompileError
from lapilli.quantization import VulkanQuantizer, fit_weights, get_symmetric_quantization_config
from lapilli.quantization.fitting import _inputs


def smooth(*shape: int, seed: int) -> Tensor:
    """Random values of which neighbours are alike, as in pictures and sounds: along the last dimensions, and the channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for _ in range(2):
        for axis in range(1, len(shape)):
            x = x + 0.7 * x.roll(1, axis)
    return x / x.std()


def prepared_for(model: nn.Module, batches: list[Tensor], calibrated: bool = True, **options: Any) -> Any:
    options = {"is_per_channel": True, **options}
    made = prepare_pt2e(
        torch.export.export(model, (batches[0],)).module(),
        VulkanQuantizer().set_global(get_symmetric_quantization_config(**options)),
    )
    for batch in batches if calibrated else []:
        made(batch)
    return made


def error(model: Any, exact: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((model(x) - exact(x)).square().sum()) for x in batches)


class Drawn(nn.Module):
    """A small network of the layers that are taken, drawn by a seed; x [1, 8, *]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.flat = draw.random() < 0.3
        kind: Any = nn.Conv1d if self.flat else nn.Conv2d
        norm: Any = nn.BatchNorm1d if self.flat else nn.BatchNorm2d
        layers: list[nn.Module] = []
        channels = 8
        for _ in range(draw.randint(1, 4)):
            groups = draw.choice([1, 1, 2, channels])
            outputs = groups * draw.choice([1, 2, 3]) * (4 if groups < 4 else 1)
            size, dilation = draw.choice([1, 2, 3]), draw.choice([1, 1, 2])
            same = draw.random() < 0.3
            layers.append(kind(
                channels, outputs, size, 1 if same else draw.choice([1, 2]), "same" if same else draw.choice([0, 1]),
                dilation, groups, bias=draw.random() < 0.5,
            ))  # fmt: skip
            if draw.random() < 0.5:
                layers.append(norm(outputs))
            layers.append(nn.ReLU6())
            channels = outputs
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).flatten(2).mean(2))
        return y

    def inputs(self, seed: int, count: int) -> list[Tensor]:
        size = (1, 8, 40) if self.flat else (1, 8, 17, 19)
        return [smooth(*size, seed=seed + k) for k in range(count)]


@pytest.mark.parametrize("bits, mean", [(8, 1.0), (4, 0.4)])
def test_networks_are_nearer_to_the_float_model(bits: int, mean: float) -> None:
    """On inputs that were not seen, in the mean of ten networks: with 4 bits nearly all errors are those of weights; at 8 those of
    activations, which stay, are as large. A single ratio of sums of 60 squares is known to about a third.
    """
    ratios = [_ratio(seed, bits) for seed in range(10)]
    assert max(ratios) <= 1.35 and math.prod(ratios) ** (1 / len(ratios)) <= mean, ratios


def _ratio(seed: int, bits: int) -> float:
    """The error after by the error before. Weights are codes times the scales that calibration found; the model keeps its own."""
    model = Drawn(seed).eval()
    given, others = model.inputs(1000, 12), model.inputs(5000, 12)
    plain, fitted = (prepared_for(model, given, weight_bits=bits, is_per_channel=seed % 3 > 0) for _ in range(2))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    layers = sum(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear) for m in model.modules())
    assert fit_weights(fitted, given) == layers
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    before, after = convert_pt2e(plain), convert_pt2e(fitted)
    codes = [b for name, b in after.named_buffers() if "_frozen_param" in name and b.dtype is torch.int8]
    assert len(codes) == layers and all(c.int().abs().max() < 1 << bits - 1 for c in codes)
    return error(after, model, others) / error(before, model, others)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.part(8)
def test_what_layers_multiply_by_weights(seed: int) -> None:
    """Groups, strides, dilations and paddings, against torch's convolution."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rank, groups = draw.choice([1, 2]), draw.choice([1, 2, 3])
    kernel = [draw.choice([1, 2, 3, 4]) for _ in range(rank)]
    dilation = [draw.choice([1, 2]) for _ in range(rank)]
    padding: Any = draw.choice(["same", "valid", [draw.choice([0, 1, 2]) for _ in range(rank)]])
    stride = [1] * rank if padding == "same" else [draw.choice([1, 2, 3]) for _ in range(rank)]
    convolve: Any = F.conv1d if rank == 1 else F.conv2d
    w = torch.randn(groups * 2, 3, *kernel)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = convolve(x, w, None, stride, padding, dilation, groups)
            return y

    x = torch.randn(2, groups * 3, *[draw.randint(11, 15) for _ in range(rank)])
    graph = torch.export.export(Layer(), (x,)).graph
    node = next(n for n in graph.nodes if "conv" in str(n.target))
    found = _inputs(node, (x, w), w, groups) @ w.view(groups, 2, -1).mT  # [groups, places, outputs of a group]
    wanted = Layer()(x)
    shown = found.unflatten(1, (2, -1)).permute(1, 0, 3, 2).reshape(wanted.shape)
    torch.testing.assert_close(shown, wanted, rtol=1e-5, atol=1e-5)


class Tied(nn.Module):
    """Two layers of one weight, one without inputs, one whose channels are all 0, one that takes no part, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Parameter(torch.randn(16, 16) / 4)
        self.dead, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(F.relu(F.linear(x, self.shared)), self.shared)
        z: Tensor = self.last(y + self.dead(F.relu(-x.square())))
        return z


def test_layers_that_keep_their_weights() -> None:
    """A weight that two layers read stays; one whose inputs are always 0 is rounded to the nearest codes."""
    model = Tied().eval()
    given = [smooth(5, 16, seed=k) for k in range(8)]
    fitted = prepared_for(model, given)
    told: list[tuple[int, int]] = []
    assert fit_weights(fitted, given, lambda done, of: told.append((done, of))) == 2 and told == [(1, 2), (2, 2)]
    assert torch.equal(fitted.shared, model.shared)
    assert (fitted.dead.weight - model.dead.weight).abs().max() <= model.dead.weight.abs().max() / 127 * 0.5001
    assert error(convert_pt2e(fitted), model, given) < 0.01 * error(lambda x: 0.0, model, given)


class Loose(nn.Module):
    """Weights that are no parameters: a buffer, and a tensor that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Buffer(torch.randn(24, 16) / 4), torch.randn(4, 24) / 5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.first)), self.second)


def test_weights_that_are_no_parameters() -> None:
    model = Loose().eval()
    given, others = ([smooth(9, 16, seed=k + first) for k in range(8)] for first in (0, 100))
    plain, fitted = (prepared_for(model, given, weight_bits=4) for _ in range(2))
    assert fit_weights(fitted, given) == 2
    assert error(convert_pt2e(fitted), model, others) < 0.6 * error(convert_pt2e(plain), model, others)


def test_activations_that_are_quantized_while_a_model_runs() -> None:
    """Only weights are rounded before; with 4 bits nearly all of the error is theirs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    given, others = ([smooth(9, 32, seed=k + first) for k in range(8)] for first in (0, 100))
    plain, fitted = (prepared_for(model, given, is_dynamic=True, weight_bits=4) for _ in range(2))
    assert fit_weights(fitted, given) == 2
    assert error(convert_pt2e(fitted), model, others) < 0.6 * error(convert_pt2e(plain), model, others)


def test_programs_compute_what_torch_does() -> None:
    """In integers, and to a step of the result."""
    model = Drawn(2).eval()
    given = model.inputs(0, 6)
    prepared = prepared_for(model, given)
    fit_weights(prepared, given)
    converted = convert_pt2e(prepared)
    with lapilli.compile(torch.export.export(converted, (given[0],)), fallback="error") as program:
        assert program.report().in_integers and not program.report().dequantized
        for x in given:
            wanted = converted(x)
            step = wanted.abs().max() / 127
            assert ((program(x) - wanted).abs() <= 1.01 * step).all()  # a tie may be rounded the other way
            assert (program(x) != wanted).float().mean() <= 0.2


def test_what_it_refuses() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 8)
    with pytest.raises(CompileError, match="no batch"):
        fit_weights(prepared_for(model, [x]), [])
    with pytest.raises(CompileError, match=r"takes 1 tensors, and batches have \[2\]"):
        fit_weights(prepared_for(model, [x]), [(x, x)])
    with pytest.raises(CompileError, match="was not calibrated"):
        fit_weights(prepared_for(model, [x], calibrated=False), [x])
    with pytest.raises(CompileError, match="The inputs of linear have NaN or infinities"):
        fit_weights(prepared_for(model, [x]), [x, x / 0])
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    training = prepare_qat_pt2e(torch.export.export(model, (x,)).module(), VulkanQuantizer().set_global(config))
    spent = prepared_for(model, [x])
    for module in (convert_pt2e(spent), spent, torch.export.export(model, (x,)).module()):
        with pytest.raises(CompileError, match="call fit_weights before it"):
            fit_weights(module, [x])
    with pytest.raises(CompileError, match="prepare_qat_pt2e"):
        fit_weights(training, [x])
