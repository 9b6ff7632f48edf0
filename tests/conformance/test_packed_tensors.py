"""torchao's quantized weights as tensors of the device: they move there and back bit for bit, take as many bytes as their codes and
scales, and layers of them give what float64 does with the numbers that they mean."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

from lapilli import autoload

autoload.register()

INT: dict[int, Any] = {bits: getattr(torch, f"int{bits}") for bits in (2, 3, 4, 5, 8)}  # no stub has them
ASYMMETRIC = MappingType.ASYMMETRIC
WEIGHTS: dict[str, Any] = {
    "int4, groups": IntxWeightOnlyConfig(weight_dtype=INT[4], granularity=PerGroup(32)),
    "int4, groups, zero points": IntxWeightOnlyConfig(weight_dtype=INT[4], granularity=PerGroup(32), mapping_type=ASYMMETRIC),
    "int4, rows": IntxWeightOnlyConfig(weight_dtype=INT[4], granularity=PerAxis(0)),
    "int3, rows, zero points": IntxWeightOnlyConfig(weight_dtype=INT[3], granularity=PerAxis(0), mapping_type=ASYMMETRIC),
    "int5, rows": IntxWeightOnlyConfig(weight_dtype=INT[5], granularity=PerAxis(0)),
    "int8, groups": IntxWeightOnlyConfig(weight_dtype=INT[8], granularity=PerGroup(32)),
    "Int8WeightOnly": Int8WeightOnlyConfig(),
}  # fmt: skip
ACTIVATIONS: dict[str, Any] = {
    "8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=INT[4], weight_granularity=PerGroup(32)),
    "8da8w": Int8DynamicActivationInt8WeightConfig(),
}  # fmt: skip
CONFIGURATIONS = WEIGHTS | ACTIVATIONS


def takes(name: str, k: int) -> bool:
    """Whether a row of k weights can be quantized so: torchao's groups are full."""
    return k % 32 == 0 or not ("groups" in name or name == "8da4w")


def quantized(name: str, n: int, k: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(n + k)
    model = nn.Sequential(nn.Linear(k, n, bias=bias)).to(dtype).eval()
    quantize_(model, CONFIGURATIONS[name])
    return model


def weight_of(model: nn.Module) -> Any:
    weight: Any = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)).weight
    return weight


def check_equal(a: Any, b: Any) -> None:
    """Whether two of torchao's tensors consist of the same bits."""
    assert type(a) is type(b)
    (names, kept), others = a.__tensor_flatten__(), b.__tensor_flatten__()
    assert (names, kept) == others
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert type(x) is type(y) is Tensor and x.dtype is y.dtype and torch.equal(x, y), name


def numbers(weight: Any) -> Tensor:
    """The numbers that a weight means, in float64."""
    codes, scale = weight.qdata.double(), weight.scale.double()
    n, k = codes.shape
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    zero = weight.zero_point

    def spread(parameter: Tensor) -> Tensor:
        return parameter.reshape(scale.shape).repeat_interleave(k // scale.shape[1], 1).expand(n, k)

    return (codes - (0 if zero is None else spread(zero.double()))) * spread(scale)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No operator may run on the CPU, and nothing may be unpacked, without a test's knowing."""
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(("name", "k"), [(name, k) for name in CONFIGURATIONS for k in (96, 33) if takes(name, k)])
def test_moves_bit_for_bit(name: str, k: int) -> None:
    model = quantized(name, 40, k)
    kept = copy.deepcopy(weight_of(model))
    model.to("vulkan")
    weight = weight_of(model)
    assert weight.device.type == "vulkan" and type(weight) is type(kept)
    check_equal(weight.cpu().detach(), kept.detach())
    copied = copy.deepcopy(model)
    assert weight_of(copied).device.type == "vulkan" and type(weight_of(copied).qdata) is type(weight.qdata)
    check_equal(weight_of(copied.cpu()).detach(), kept.detach())
    check_equal(weight_of(model.cpu()).detach(), kept.detach())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_dict(name: str) -> None:
    on_host, on_device = quantized(name, 40, 96), quantized(name, 40, 96).to("vulkan")
    kept = copy.deepcopy(weight_of(on_host).detach())
    file = io.BytesIO()
    torch.save(on_device.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    check_equal(loaded["0.weight"].detach(), kept)
    file.seek(0)
    there = torch.load(file, weights_only=True, map_location="vulkan")
    assert type(there["0.weight"].qdata) is type(weight_of(on_device).qdata)
    for given in (on_host.state_dict(), there, loaded):
        other = quantized(name, 40, 96).to("vulkan")
        with torch.no_grad():
            weight_of(other).scale.zero_()
        other.load_state_dict(given)
        assert type(weight_of(other).qdata) is type(weight_of(on_device).qdata)
        check_equal(weight_of(other.cpu()).detach(), kept)
    on_host.load_state_dict(on_device.state_dict())
    check_equal(weight_of(on_host).detach(), kept)


CASES = [(40, 96, True), (31, 33, False), (1, 64, True), (130, 32, False)]


@pytest.mark.parametrize(
    ("name", "n", "k", "bias"), [(name, *case) for name in WEIGHTS for case in CASES if takes(name, case[1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear(name: str, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    model = quantized(name, n, k, bias, dtype)
    w, b = numbers(weight_of(model)), model[0].bias.double() if bias else torch.zeros(n, dtype=torch.float64)
    model.to("vulkan")
    unit = {torch.float32: 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    for shape in ((1, k), (7, k), (2, 3, k), (65, k), (k,)):
        x = torch.randn(shape).to(dtype)
        exact = x.double() @ w.mT + b
        # A sum rounds once a term; numbers are rounded when decoded, and so is the result.
        bound = (x.double().abs() @ w.mT.abs() + b.abs()) * (unit + (k + 8) * 2.0**-24)
        with torch.no_grad():
            got = model(x.to("vulkan"))
        assert got.dtype is dtype and got.device.type == "vulkan"
        assert ((got.cpu().double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("n", "k"), [(40, 96), (7, 32)])
def test_activations_are_rounded_as_torchao_rounds(name: str, n: int, k: int) -> None:
    model = quantized(name, n, k)
    for shape in ((1, k), (9, k), (2, 3, k)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected, got = model.cpu()(x), model.to("vulkan")(x.to("vulkan")).cpu()
        # A number at a tie may be rounded to the other of two codes: a step of a row's 255, times a weight.
        step = (
            (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True))
            / 127
            * numbers(weight_of(model.cpu())).abs().max().float()
        )
        assert ((got - expected).abs() <= step + 1e-5).all()
        assert (got - expected).abs().mean() < 1e-5


@pytest.mark.parametrize("name", ["int4, groups", "int4, rows", "int8, groups", "Int8WeightOnly"])
def test_bytes_on_the_device(name: str) -> None:
    n = k = 512
    model = quantized(name, n, k, bias=False)
    weight = weight_of(model)
    bits = 8 if "8" in name else 4
    ideal = n * k * bits // 8 + sum(
        t.numel() * t.element_size() for t in (weight.scale, weight.zero_point) if t is not None
    )
    torch.vulkan.init()  # type: ignore[attr-defined]
    del weight
    gc.collect()
    before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
    model.to("vulkan")
    gc.collect()
    assert torch.vulkan.memory_allocated() - before <= 1.01 * ideal  # type: ignore[attr-defined]
    for rows in (1, 64):
        x = torch.randn(rows, k, device="vulkan")
        with torch.no_grad():
            model(x)
            before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
            torch.vulkan.reset_peak_memory_stats()  # type: ignore[attr-defined]
            y = model(x)
        torch.vulkan.synchronize()  # type: ignore[attr-defined]
        took = torch.vulkan.max_memory_allocated() - before  # type: ignore[attr-defined]
        # Drivers of type CPU read a copy of the codes and parameters in another order; none has floats.
        assert took <= 1.05 * ideal + 3 * n * k // 32 + 2 * y.numel() * 4 + 4096, took


def test_refuses_and_warns_in_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = nn.Sequential(nn.Conv2d(32, 4, 3))
        quantize_(conv, WEIGHTS["int4, groups"], filter_fn=lambda m, _: isinstance(m, nn.Conv2d))
    conv.to("vulkan")
    with torch.no_grad(), pytest.warns(UserWarning, match="conv2d of a quantized weight decodes it to floats"):
        conv(torch.randn(1, 32, 5, 5, device="vulkan"))
    model = quantized("int4, groups", 8, 32).to("vulkan")
    x = torch.randn(2, 32, device="vulkan", requires_grad=True)
    with pytest.warns(UserWarning, match="decodes it to floats for each call, since gradients are recorded"):
        model(x).sum().backward()
    assert x.grad is not None
    expected = numbers(weight_of(model.cpu())).sum(0).expand(2, 32)
    assert torch.allclose(x.grad.cpu().double(), expected, atol=1e-5)


def test_codes_out_of_range_are_refused() -> None:
    from lapilli.eager.packed_codes import pack

    with pytest.raises(ValueError, match="between -8 and 7; these are between -8 and 9"):
        pack(torch.tensor([[-8, 9]], dtype=torch.int8), -8)
