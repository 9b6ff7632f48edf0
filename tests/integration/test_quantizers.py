"""Models that torchao quantizes: `quantize_`, and PT2E with Lapilli's quantizer and torchao's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import lapilli
from lapilli import autoload
from lapilli.errors import CompileError
from lapilli.quantization import VulkanQuantizer, get_symmetric_quantization_config

INT4: Any = getattr(torch, "int4")  # noqa: B009  (no stub has it)


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(F.gelu(self.first(x)))
        return out


# name: (configuration, bytes of a weight, bound relative to the largest result)
CONFIGURATIONS: dict[str, tuple[Any, float, float]] = {
    "int4 weights, groups": (IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32)), 0.5 + 4 / 32, 1e-5),
    "int4 weights, rows": (IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerAxis(0)), 0.5, 1e-5),
    "int8 weights, rows": (IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)), 1, 1e-5),
    "int8 weights": (Int8WeightOnlyConfig(), 1, 1e-5),
    # A number at a tie is rounded to the other step where the scale, a quotient, differs in its last bit: one step of one of
    # 256 values of a row, out of 255 steps.
    "int8 activations, int4 weights": (
        Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=PerGroup(32)), 0.5 + 4 / 32, 2e-3,
    ),
    "int8 activations, int8 weights": (Int8DynamicActivationInt8WeightConfig(), 1, 2e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_quantize_(name: str) -> None:
    config, per_weight, bound = CONFIGURATIONS[name]
    torch.manual_seed(0)
    model = Feed().eval()
    quantize_(model, config)
    for rows in (1, 3, 17):
        x = torch.randn(rows, 256)
        with lapilli.compile(model, (x,), fallback="error") as program:
            wanted = model(x)
            assert (program(x) - wanted).abs().max() <= bound * wanted.abs().max()
            weights, columns = 256 * 512 + 512 * 128, 512 + 128
            assert stored(program) <= 1.05 * (per_weight * weights + 12 * columns)  # biases, and scales of rows
            report = program.report()
            assert len(report.in_integers) == (2 if name == "int8 activations, int8 weights" else 0), str(report)
            if "int8 weights" not in name:  # else the model multiplies by scales itself
                assert len(report.dequantized) == 2, str(report)


def stored(program: lapilli.Program) -> int:
    """Bytes of the constants in the file; the rest are kernels."""
    return sum(c.size for c in program.description.constants)


def test_embedding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(500, 64), torch.nn.Linear(64, 8)).eval()
    config = IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32))
    quantize_(model, config, filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding))
    ids = torch.randint(0, 500, (2, 5))
    with lapilli.compile(model, (ids,), fallback="error") as program:
        torch.testing.assert_close(program(ids), model(ids), rtol=1e-5, atol=1e-5)
        assert stored(program) <= 1.05 * (500 * 64 * (0.5 + 4 / 32) + 4 * 8 * 65)


class Network(torch.nn.Module):
    """What networks of convolutions have: norms, depthwise layers, residual sums, concatenations, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.BatchNorm2d(16)
        self.depthwise, self.point = torch.nn.Conv2d(16, 16, 3, 1, 1, groups=16), torch.nn.Conv2d(16, 16, 1)
        self.wide, self.last = torch.nn.Conv2d(32, 24, 3, 1, 1), torch.nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = x + self.point(F.relu6(self.depthwise(x)))
        z = F.relu(self.wide(F.max_pool2d(torch.cat([x, y], 1), 2)))
        out: torch.Tensor = self.last(F.adaptive_avg_pool2d(z, 1).flatten(1))
        return out


def quantized(model: torch.nn.Module, x: torch.Tensor, quantizer: Any, qat: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    exported = torch.export.export(model, (x,)).module()
    prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(exported, quantizer)
    for _ in range(3):
        prepared(torch.randn_like(x))
    found: torch.nn.Module = convert_pt2e(prepared)
    return found


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "per channel": lambda: VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True)),
    "per tensor": lambda: VulkanQuantizer().set_global(get_symmetric_quantization_config()),
    "dynamic": lambda: VulkanQuantizer().set_global(get_symmetric_quantization_config(is_dynamic=True)),
    "torchao's, for x86": lambda: X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config()),
    "torchao's, dynamic": lambda: X86InductorQuantizer().set_global(
        get_default_x86_inductor_quantization_config(is_dynamic=True)
    ),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name: str) -> None:
    torch.manual_seed(1)
    model, x = Network().eval(), torch.randn(2, 3, 24, 20)
    reference = quantized(model, x, QUANTIZERS[name]())
    with lapilli.compile(torch.export.export(reference, (x,)), fallback="error") as program:
        got, wanted = program(x), reference(x)
    # Ties that are rounded to the other step on the way move a result by about a step of 255.
    assert (got - wanted).abs().max() <= 2 / 255 * (wanted.max() - wanted.min())


def test_layers_stay_in_integers() -> None:
    """Every convolution and the linear layer read codes, and the file has them."""
    torch.manual_seed(1)
    model, x = Network().eval(), torch.randn(2, 3, 24, 20)
    reference = quantized(model, x, QUANTIZERS["per channel"]())
    with lapilli.compile(torch.export.export(reference, (x,)), fallback="error") as program:
        weights = [c for c in program.description.constants if len(c.shape) > 1 and c.dtype not in ("int8", "uint8")]
        assert not [c.name for c in weights if "folded" in c.name or c.shape[0] > 1]
        assert len(program.report().in_integers) == 5
        assert not program.report().dequantized
        assert "quantized: 5 in integers, 0 in floats" in str(program.report())


@pytest.mark.long
def test_training_and_back() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 24, 20)
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    reference = quantized(Network().eval(), x, VulkanQuantizer().set_global(config), qat=True)
    with lapilli.compile(torch.export.export(reference, (x,)), fallback="error") as program:
        got, wanted = program(x), reference(x)
    assert (got - wanted).abs().max() <= 2 / 255 * (wanted.max() - wanted.min())


def kinds(model: torch.nn.Module) -> list[str]:
    """The operators whose weights are quantized."""
    assert isinstance(model, torch.fx.GraphModule)
    found = []
    for node in model.graph.nodes:
        weight = node.args[1] if str(node.target) in ("aten.conv2d.default", "aten.linear.default") else None
        if isinstance(weight, torch.fx.Node) and "dequantize" in str(weight.target):
            found.append(str(node.target).split(".")[1])
    return found


def test_what_is_quantized() -> None:
    config = get_symmetric_quantization_config(is_per_channel=True)
    model, x = Network().eval(), torch.randn(1, 3, 24, 20)
    by_name = VulkanQuantizer().set_module_name("wide", config)
    assert kinds(quantized(model, x, by_name)) == ["conv2d"]
    by_type = VulkanQuantizer().set_module_type(torch.nn.Linear, config)
    assert kinds(quantized(model, x, by_type)) == ["linear"]
    without = VulkanQuantizer().set_global(config).set_module_name("last", None)
    assert kinds(quantized(model, x, without)) == ["conv2d"] * 4
    chosen = VulkanQuantizer().set_global(config).set_filter_function(lambda n: "linear" in str(n.target))
    assert kinds(quantized(model, x, chosen)) == ["linear"]


TRANSPOSED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1-D": (nn.Sequential(nn.ConvTranspose1d(8, 6, 4, 2, 1), nn.ReLU()), (2, 8, 9)),
    "2-D": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, 2), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3)),
        (2, 3, 11, 12),
    ),
    "groups": (nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 2, groups=2), nn.Conv2d(6, 5, 3)), (2, 8, 7, 7)),
    "3-D": (nn.ConvTranspose3d(4, 6, 2, 2), (2, 4, 5, 6, 7)),
}  # fmt: skip


@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_stay_in_integers(name: str, per_channel: bool, qat: bool) -> None:
    torch.manual_seed(1)
    model, shape = TRANSPOSED[name]
    x = torch.randn(shape)
    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_qat=qat)
    reference = quantized(copy.deepcopy(model).eval(), x, VulkanQuantizer().set_global(config), qat)
    layers = sum(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    with lapilli.compile(torch.export.export(reference, (x,)), fallback="error") as program:
        assert f"quantized: {layers} in integers, 0 in floats" in str(program.report())
        got, wanted = program(x), reference(x)
    assert (got - wanted).abs().max() <= 1.01 / 255 * (wanted.max() - wanted.min())


def test_dynamic_reference_representation() -> None:
    """torch finds its scales in float64, so it runs there."""
    model, x = nn.Linear(13, 5).eval(), torch.randn(7, 13)
    prepared = prepare_pt2e(
        torch.export.export(model, (x,)).module(),
        VulkanQuantizer().set_global(get_symmetric_quantization_config(is_dynamic=True)),
    )
    reference = convert_pt2e(prepared, use_reference_representation=True)
    with lapilli.compile(torch.export.export(reference, (x,))) as program:
        assert torch.equal(program(x), reference(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_halves_are_refused(dtype: torch.dtype) -> None:
    model, x = nn.Linear(16, 8).to(dtype), torch.randn(2, 16, dtype=dtype)
    quantizer = VulkanQuantizer().set_global(get_symmetric_quantization_config())
    with pytest.raises(CompileError, match=r"scales are found in float32. Quantize model.float\(\)"):
        prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)


def test_what_is_no_configuration_or_module() -> None:
    config, quantizer = get_symmetric_quantization_config(), VulkanQuantizer()
    for call in (quantizer.set_global, lambda c: quantizer.set_module_name("last", c)):
        with pytest.raises(CompileError, match="takes what get_symmetric_quantization_config returns, or None"):
            call(3)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="takes a module's name, as named_modules"):
        quantizer.set_module_name(3, config)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="takes a class of modules"):
        quantizer.set_module_type(F.linear, config)  # type: ignore[arg-type]
    quantizer.set_module_name("nope", config).set_module_type(nn.LSTM, config)
    with pytest.warns(UserWarning, match="calls no module named 'nope', and none of type .*LSTM"):
        quantized(Network().eval(), torch.randn(1, 3, 24, 20), quantizer)


def test_other_bits_are_refused() -> None:
    with pytest.raises(CompileError, match="weights may have 4 or 8 bits"):
        get_symmetric_quantization_config(weight_bits=2)


def test_filters_of_four_bits_are_packed() -> None:
    torch.manual_seed(1)
    model, x = Network().eval(), torch.randn(1, 3, 24, 20)
    four = VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, weight_bits=4))
    reference = quantized(model, x, four)
    with lapilli.compile(torch.export.export(reference, (x,)), fallback="error") as program:
        got, wanted = program(x), reference(x)
        filters = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert sum(c.size for c in program.description.constants if len(c.shape) > 1) <= 0.5 * filters + 64
    assert (got - wanted).abs().max() <= 2 / 255 * (wanted.max() - wanted.min())


def test_the_examples_of_the_page_for_activations_follow_each_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval(),
        torch.randn(8, 16),
    )
    names = {"torch": torch, "lapilli": lapilli, "model": model, "x": x, "calibration": [x]}
    programs = []
    for title in ("## Activations too", "## Accuracy"):
        code = page[page.index(title) :].partition("```python\n")[2].partition("```")[0]
        exec(compile(code, "docs/quantization.md", "exec"), names)
        programs.append(names["program"])
    for program in programs:
        assert (program(x) - model(x)).abs().max() < 0.05
    assert not torch.equal(programs[0](x), programs[1](x))  # the second one's weights are fitted


def test_the_example_of_the_page_for_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    autoload.register()
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")
    section = page[page.index("## On the device, and compiled by torch") :]
    code = section[section.index("```python") + len("```python") : section.index("```\n\n")]
    exec(compile(code, "docs/quantization.md", "exec"), {})
    apart, memory = capsys.readouterr().out.split()
    assert float(apart) < 1e-5 and int(memory) > 1024 * 1024 // 2


class Residual(nn.Module):
    """A layer of a transformer before its norms, whose sums have outliers, or with convolutions, whose sums others read."""

    def __init__(self, convolutions: bool) -> None:
        super().__init__()
        self.convolutions = convolutions
        layer: Any = (lambda: nn.Conv2d(16, 16, 1)) if convolutions else (lambda: nn.Linear(16, 16))
        self.first, self.second, self.third = layer(), layer(), layer()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x)
        if not self.convolutions:
            y = self.norm(y)
        y = y + self.second(F.relu(y))
        out: torch.Tensor = self.third(y) if self.convolutions else self.norm(y)
        return out


@pytest.mark.parametrize("convolutions", [False, True])
def test_what_only_norms_read_stays_a_float(convolutions: bool) -> None:
    """Where layers read a sum, its operands and itself are codes; where a norm does, only the layer's own operand is."""
    torch.manual_seed(0)
    model = Residual(convolutions).eval()
    x = torch.randn(2, 16, 3, 3) if convolutions else torch.randn(2, 5, 16)
    quantizer = VulkanQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    graph = convert_pt2e(prepared).graph
    rounded = {str(n.args[0]) for n in graph.nodes if ".quantize_per_tensor" in str(n.target)}
    if convolutions:
        assert rounded == {"x", "conv2d", "add", "relu", "conv2d_1", "add_1", "conv2d_2"}
    else:
        assert rounded == {"x", "relu"}
