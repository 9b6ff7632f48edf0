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
from torch.nn import functional as F
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
from lapilli.eager import packed_codes
from lapilli.player import NativeProgram

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


def ideal_bytes(weight: Any) -> int:
    """Bytes of codes, each with its bits or four at least, and of what their blocks share."""
    bits = 4 if str(getattr(weight, "target_dtype", "")) in ("torch.int2", "torch.int3", "torch.int4") else 8
    shared = (weight.scale, weight.zero_point)
    return weight.numel() * bits // 8 + sum(t.nbytes for t in shared if t is not None)


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
@pytest.mark.poor_device
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
@pytest.mark.part(14)
@pytest.mark.poor_device
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


@pytest.mark.parametrize("name", ["int4, groups", "int4, rows", "int8, groups", "Int8WeightOnly", "8da8w"])
def test_bytes_on_the_device(name: str) -> None:
    n = k = 512
    model = quantized(name, n, k, bias=False)
    ideal = ideal_bytes(weight_of(model))
    torch.vulkan.init()  # type: ignore[attr-defined]
    gc.collect()
    before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
    model.to("vulkan")
    gc.collect()
    assert torch.vulkan.memory_allocated() - before <= 1.01 * ideal  # type: ignore[attr-defined]
    for rows in (1, 16):
        x = torch.randn(rows, k, device="vulkan")
        with torch.no_grad():
            model(x)
            before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
            torch.vulkan.reset_peak_memory_stats()  # type: ignore[attr-defined]
            model(x)
        torch.vulkan.synchronize()  # type: ignore[attr-defined]
        took = torch.vulkan.max_memory_allocated() - before  # type: ignore[attr-defined]
        # Drivers of type CPU read a copy of codes and parameters in another order; none has floats. Activations may be codes, too.
        assert took <= 1.05 * ideal + 3 * n * k // 32 + rows * (n + k) * 8 + 4096 < n * k * 4, took


def test_refuses_and_warns_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_codes, "_warned", set())  # another test of this process may have warned already
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


def test_calls_by_name_and_by_type() -> None:
    model, x = quantized("int4, groups", 8, 32), torch.randn(2, 32)
    with torch.no_grad():
        expected = model(x)
        model.to("vulkan")
        weight, bias, given = weight_of(model), model[0].bias, x.to("vulkan")
        for got in (
            F.linear(input=given, weight=weight, bias=bias),
            F.linear(given, weight, bias=bias),
            F.linear(given, weight) + bias,
        ):
            assert torch.allclose(got.cpu(), expected, atol=1e-5)
        with torch.autocast("vulkan", dtype=torch.float16):
            half = model(given)
        assert half.dtype is torch.float16 and torch.allclose(half.cpu().float(), expected, atol=1e-2)
        with pytest.raises(RuntimeError, match="input of torch.float16 and a quantized weight of torch.float32"):
            F.linear(given.half(), weight)
        with pytest.raises(RuntimeError, match="on the same device"):
            model(x)
        model.to(torch.float16)
        assert torch.allclose(model(given.half()).cpu().float(), expected, atol=1e-2)


@pytest.mark.parametrize("name", ["int4, groups", "8da8w"])
def test_quantized_on_the_device(name: str) -> None:
    torch.manual_seed(0)
    there, here = nn.Sequential(nn.Linear(64, 24)), nn.Sequential(nn.Linear(64, 24))
    here.load_state_dict(there.state_dict())
    there.to("vulkan")
    for model in (there, here):
        quantize_(model, CONFIGURATIONS[name])
    check_equal(weight_of(there.cpu()).detach(), weight_of(here).detach())


def test_adapters_beside_a_quantized_weight_learn() -> None:
    """A layer that learns beside one that does not, eager and compiled; gradients of the input are those of a float layer."""
    base = quantized("int4, groups", 16, 32)
    w, x = numbers(weight_of(base)).float(), torch.randn(3, 32)
    base.requires_grad_(False).to("vulkan")

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.more = base, nn.Linear(32, 16, bias=False, device="vulkan")

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.base(x) + self.more(x)
            return made

    model = Adapted()
    for run in (model, torch.compile(model, backend="vulkan", options={"fallback": "error"})):
        model.zero_grad()
        given = x.to("vulkan").requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="linear of a quantized weight decodes it to floats")
            run(given).sum().backward()
        assert model.more.weight.grad is not None and given.grad is not None
        assert torch.allclose(model.more.weight.grad.cpu(), x.sum(0).expand(16, 32), atol=1e-5)
        assert torch.allclose(given.grad.cpu(), (w + model.more.weight.detach().cpu()).sum(0).expand(3, 32), atol=1e-4)


def test_codes_out_of_range_are_refused() -> None:
    from lapilli.eager.packed_codes import pack

    with pytest.raises(ValueError, match="between -8 and 7; these are between -8 and 9"):
        pack(torch.tensor([[-8, 9]], dtype=torch.int8), -8)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[NativeProgram]:
    """The programs that are loaded, as the list grows."""
    loaded: list[NativeProgram] = []
    load = NativeProgram.load

    def noted(*args: Any, **kwargs: Any) -> NativeProgram:
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(NativeProgram, "load", noted)
    return loaded


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("where", ["vulkan", "cpu"])
def test_compiled(name: str, where: str, programs: list[NativeProgram]) -> None:
    model, x = quantized(name, 512, 256), torch.randn(5, 256)
    ideal = ideal_bytes(weight_of(model)) + 512 * 4
    with torch.no_grad():
        expected = model(x)
        model.to(where)
        for dynamic in (False, True):
            torch._dynamo.reset()
            programs.clear()
            compiled = torch.compile(
                model, backend="vulkan", fullgraph=True, dynamic=dynamic, options={"fallback": "error"}
            )
            for rows in (5, 1, 3):
                got = compiled(x[:rows].to(where)).cpu()
                # Activations at a tie may be rounded to the other code.
                bound = expected.abs().max() * (1e-2 if name in ACTIVATIONS else 1e-5)
                assert ((got - expected[:rows]).abs() <= bound).all()
                assert (got - expected[:rows]).abs().mean() <= expected.abs().max() * 1e-5
            held = [program.memory().constants for program in programs]
            assert held and all(size <= 1.1 * ideal + 4096 for size in held), (held, ideal)


@pytest.mark.parametrize("name", ["int4, groups", "8da8w"])
@pytest.mark.parametrize("where", ["vulkan", "cpu"])
def test_compiled_weights_that_keep_changing(name: str, where: str) -> None:
    """They are arguments of each call then, and still not decoded to floats in memory."""
    n = k = 512
    model, x = quantized(name, n, k), torch.randn(1, k)
    with torch.no_grad():
        reference = copy.deepcopy(model)
        model.to(where)
        given = x.to(where)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="vulkan", fullgraph=True, dynamic=False, options={"fallback": "error"})
        for _ in range(4):
            for changed in (model, reference):
                weight_of(changed).scale.mul_(0.5)
            got = compiled(given)
            expected = reference(x)
            assert ((got.cpu() - expected).abs() <= expected.abs().max() * 1e-5).all()
        gc.collect()
        before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
        torch.vulkan.reset_peak_memory_stats()  # type: ignore[attr-defined]
        compiled(given)
        torch.vulkan.synchronize()  # type: ignore[attr-defined]
        took = torch.vulkan.max_memory_allocated() - before  # type: ignore[attr-defined]
        # Codes of a model on the CPU have a byte each in a call.
        assert took <= 1.2 * max(ideal_bytes(weight_of(model)), n * k) + 65536 < n * k * 4, took


class Tied(nn.Module):
    """An embedding, and a layer that has its weight, too."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, columns, padding_idx=3), nn.Linear(columns, rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.table(ids))
        return made


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_embedding(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied(50, 64).to(dtype).eval()
    quantize_(model, CONFIGURATIONS[name], filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    model.head.weight = model.table.weight
    w = numbers(model.table.weight)
    model.to("vulkan")
    assert model.head.weight is model.table.weight
    unit = 2.0**-22 if dtype is torch.float32 else 2.0**-10
    for shape in ((4,), (2, 3), ()):
        ids = torch.randint(0, 50, shape)
        with torch.no_grad():
            rows, got = model.table(ids.to("vulkan")), model(ids.to("vulkan"))
        assert rows.dtype is dtype and ((rows.cpu().double() - w[ids]).abs() <= w[ids].abs() * unit).all()
        bound = (w[ids].abs() @ w.mT.abs()) * (4 * unit + 72 * 2.0**-24)
        assert ((got.cpu().double() - w[ids] @ w.mT).abs() <= bound).all()


def test_a_call_of_an_embedding_decodes_its_rows_alone() -> None:
    model = nn.Sequential(nn.Embedding(2000, 64))
    quantize_(model, WEIGHTS["int4, rows"], filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    model.to("vulkan")
    ids = torch.randint(0, 2000, (3,)).to("vulkan")
    with torch.no_grad():
        model(ids)
        before = torch.vulkan.memory_allocated()  # type: ignore[attr-defined]
        torch.vulkan.reset_peak_memory_stats()  # type: ignore[attr-defined]
        model(ids)
    torch.vulkan.synchronize()  # type: ignore[attr-defined]
    assert torch.vulkan.max_memory_allocated() - before <= 8192  # type: ignore[attr-defined]


def test_a_compiled_embedding() -> None:
    torch.manual_seed(0)
    model = Tied(50, 64).eval()
    quantize_(model, WEIGHTS["int4, groups"], filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    model.head.weight = model.table.weight
    ids, w = torch.randint(0, 50, (2, 5)), numbers(model.table.weight)
    with torch.no_grad():
        model.to("vulkan")
        compiled = torch.compile(model, backend="vulkan", fullgraph=True, options={"fallback": "error"})
        for given in (ids, ids[:, :3]):
            got = compiled(given.to("vulkan")).cpu().double()
            assert ((got - w[given] @ w.mT).abs() <= (w[given].abs() @ w.mT.abs()) * 2.0**-20).all()


def test_norms_of_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(20, 32, max_norm=1.0))
    quantize_(model, WEIGHTS["int4, rows"], filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    model.to("vulkan")
    with pytest.raises(NotImplementedError, match="max_norm changes an embedding's weight, which is quantized"):
        model(torch.tensor([1], device="vulkan"))
