"""TorchScript as a source of models: scripted and traced modules, their control flow, states, quantized operators, errors."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision_without_ops
from agreement import FLOAT_BOUND, relative_error
from torch import nn
from torch.ao import quantization
from torch.export import Dim

import lapilli
from lapilli.capture import capture
from lapilli.capture.examples import example_inputs
from lapilli.legalize.passes import prepare
from lapilli.lower import refusals

torchvision_without_ops.allow()
from torchvision import models  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

ROOT = Path(__file__).resolve().parents[2]
TARGET = "cpu-fp32"
KINDS = {
    "scripted": torch.jit.script,
    "traced": lambda model, x=None: torch.jit.trace(model, x, strict=False, check_trace=False),
}


def turned(model: nn.Module, kind: str, x: torch.Tensor) -> torch.jit.ScriptModule:
    """Into TorchScript; through a file, as people have it."""
    return torch.jit.script(model) if kind == "scripted" else KINDS["traced"](model, x)


@cache
def zoo(name: str) -> nn.Module:
    """Random weights; the transformers are small ones of their architecture."""
    torch.manual_seed(30)
    made: dict[str, Callable[[], nn.Module]] = {
        "lraspp": lambda: models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None),
        "vit": lambda: models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=10),
        "swin": lambda: models.SwinTransformer([2, 2], 16, [2, 1], [2, 4], [4, 4], num_classes=10),
    }
    model = made.get(name, lambda: getattr(models, name)(weights=None))()
    for parameter in model.parameters():
        if not bool(parameter.any()):  # ViT's head begins as zeros
            nn.init.normal_(parameter, 0, 0.1)
    return model.eval()


ZOO = ("mobilenet_v2", "mobilenet_v3_small", "resnet18", "efficientnet_b0", "vit", "lraspp", "swin")


ON_THE_DEVICE = [("mobilenet_v2", "traced"), ("lraspp", "scripted"), ("vit", "scripted")]


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in ZOO for k in KINDS if (n, k) not in ON_THE_DEVICE])
@pytest.mark.part(4)
def test_torchvision_models_are_captured(name: str, kind: str) -> None:
    """With a dynamic batch and the parameters' names; every operator has a kernel."""
    model = zoo(name)
    x = torch.rand(2, 3, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = capture(turned(model, kind, x), (x,), ({0: Dim("batch", min=1, max=16)},))
    assert {n for n, _ in exported.named_parameters()} == {n for n, _ in model.named_parameters()}
    if kind == "traced":  # operators that only traces have are the ones that may lack a kernel
        assert not refusals(prepare(exported))
    y = torch.rand(5, 3, 64, 64)
    with torch.no_grad():
        want, got = model(y), exported.module()(y)
    if name == "lraspp":
        assert list(got) == list(want)
        got, want = got["out"], want["out"]
    assert relative_error(got, want) <= FLOAT_BOUND


@pytest.mark.parametrize(("name", "kind"), ON_THE_DEVICE)
def test_torchvision_models_run_on_the_device(name: str, kind: str, tmp_path: Path) -> None:
    """From a file of torch.jit.save; what comes out is nested as the model has it."""
    model, x = zoo(name), torch.rand(2, 3, 64, 64)
    torch.jit.save(turned(model, kind, x), tmp_path / "model.pt")
    dynamic = ({0: Dim("batch", min=1, max=16)},)
    with lapilli.compile(tmp_path / "model.pt", (x,), target=TARGET, dynamic_shapes=dynamic) as program:
        x = torch.rand(3, 3, 64, 64)
        got = program(x)
        assert not program.report().on_cpu
    with torch.no_grad():
        want = model(x)
    if name == "lraspp":
        got, want = got["out"], want["out"]
    assert relative_error(got, want) <= FLOAT_BOUND


# -- silero-vad's own file, on speech


def silero() -> torch.jit.ScriptModule:
    found = importlib.util.find_spec("silero_vad")
    if found is None or not found.submodule_search_locations:
        pytest.skip("silero-vad is not installed; tools/setup.sh test does it")
    return torch.jit.load(Path(found.submodule_search_locations[0]) / "data" / "silero_vad.jit")


def recording(rate: int) -> torch.Tensor:
    """A second of speech between silences, recorded at 8 kHz, in -1 to 1."""
    path = ROOT / ".cache" / "speech" / "test-audio.raw"
    if not path.exists():
        pytest.skip("there is no recording; tools/setup.sh test fetches one")
    samples = np.fromfile(path, np.int16).astype(np.float32) / 32768
    places = np.arange(0, len(samples) - 1, 8000 / rate)
    return torch.from_numpy(np.interp(places, np.arange(len(samples)), samples).astype(np.float32))


@pytest.mark.parametrize(("rate", "chunk"), [(8000, 256), (16000, 512)])
def test_silero_vad_on_speech(rate: int, chunk: int) -> None:
    """Chunk by chunk, with the state from chunk to chunk; after a reset the answers are the first ones again."""
    model, speech = silero(), recording(rate)
    chunks = [speech[i : i + chunk][None] for i in range(0, len(speech) - chunk + 1, chunk)]
    with lapilli.compile(model, (chunks[0], rate), target=TARGET) as program:
        assert not program.report().on_cpu
        assert set(program.state()) == {"_state", "_context"}
        with torch.no_grad():
            want = [model(c, rate).item() for c in chunks]
        got = [program(c, rate).item() for c in chunks]
        program.reset()
        again = [program(c, rate).item() for c in chunks]
        with pytest.raises(lapilli.InvalidInputError, match="sr"):
            program(chunks[0], 24000 - rate)  # the sampling rate is fixed at capture
    assert np.abs(np.array(got) - want).max() < 1e-5
    assert got == again
    assert min(got) < 0.1 and max(got) > 0.9  # there is silence, and there is speech


# -- control flow and values


class Point(NamedTuple):
    x: torch.Tensor
    scale: int


@torch.jit.script
class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Branches(nn.Module):
    """Loops and branches on sizes and flags, early return, optional arguments."""

    def forward(self, x: torch.Tensor, double: bool = False, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            x = x + bias
        for i in range(x.size(-1) // 2):
            if i % 2 == 0:
                continue
            x = x + i
        k = 0
        while k < 3 and x.dim() == 2:
            x = torch.relu(x) - k
            k += 1
        if double:
            return x * 2
        return x


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.named = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.ReLU()})
        self.weights: list[float] = [0.5, 2.0]
        self.mode = "sum"

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            parts.append(layer(x) * self.weights[index % len(self.weights)])
        for name, layer in self.named.items():
            if name.startswith("f"):
                x = layer(x)
        point = Point(x, len(parts))
        found: dict[str, torch.Tensor] = {"scaled": Scaler(3.0).apply(point.x) * point.scale}
        a, *_ = parts[::-1], 0
        if self.mode == "sum":
            found["total"] = torch.stack(a).sum(0)
        names = [f"part{k}" for k in range(len(parts))]
        for name, part in zip(names, parts):  # noqa: B905 (TorchScript has no keywords here)
            found[name.upper()] = part.view(-1, 2, x.shape[1] // 2).transpose(1, 2).contiguous()
        assert "total" in found, "the total is missing"
        return found


class Shapes(nn.Module):
    """Arithmetic on sizes that must stay dynamic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b * h, c * w)
        x = torch.cat([x, x.new_zeros(x.shape[0], 2)], dim=-1)
        x = x[:, : c * w].view(b, h, c, w).permute(0, 2, 1, 3)
        return nn.functional.interpolate(x, size=[h * 2, w + 1]) + torch.arange(w + 1).to(x.dtype)


def agree(model: nn.Module, script: Any, *inputs: Any, dynamic: Any = None, others: tuple[Any, ...] = ()) -> None:
    with lapilli.compile(script, inputs, target=TARGET, dynamic_shapes=dynamic) as program, torch.no_grad():
        for given in (inputs, *others):
            want, got = model(*given), program(*given)
            assert type(got) is type(want)
            for ours, theirs in zip(*((v.values() if isinstance(v, dict) else [v]) for v in (got, want)), strict=True):
                assert ours.shape == theirs.shape
                assert relative_error(ours, theirs) <= FLOAT_BOUND


@pytest.mark.parametrize("inputs", [(), (True,), (False, torch.ones(6))])
def test_branches_and_loops(inputs: tuple[Any, ...]) -> None:
    agree(Branches(), torch.jit.script(Branches()), torch.randn(3, 6), *inputs)


def test_containers_strings_and_classes() -> None:
    torch.manual_seed(31)
    model = Containers().eval()
    agree(model, torch.jit.script(model), torch.randn(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_stay_dynamic(kind: str) -> None:
    x = torch.randn(2, 3, 8, 6)
    script = turned(Shapes(), kind, x)
    dims = {0: Dim("b", min=1, max=8), 2: Dim("h", min=2, max=32), 3: Dim("w", min=2, max=32)}
    agree(Shapes(), script, x, dynamic=(dims,), others=((torch.randn(3, 3, 10, 7),), (torch.randn(1, 3, 4, 12),)))


def test_methods_and_functions(tmp_path: Path) -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        @torch.jit.export
        def decode(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return self.forward(x) * times

    torch.jit.save(torch.jit.script(Coder()), tmp_path / "coder.pt")
    model, x = torch.jit.load(tmp_path / "coder.pt"), torch.randn(2, 4)
    with lapilli.compile({"forward": (model, (x,)), "decode": (model.decode, (x, 3))}, target=TARGET) as program:
        assert torch.allclose(program(x), model(x), atol=1e-6)
        assert torch.allclose(program.methods["decode"](x, 3), model.decode(x, 3), atol=1e-6)
    function = torch.jit.script(_scaled)
    with lapilli.compile(function, {"x": x, "by": 2.0}, target=TARGET) as program:
        assert torch.equal(program(x=x, by=2.0), x * 2)


def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


# -- states


class Counter(nn.Module):
    """A buffer that is written in place, another that is assigned, and an attribute that is made by the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.ones(3))
        self.total = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        before = self.last
        self.last = x
        if len(self.total) == 0:
            self.total = torch.zeros(3)
        self.total = self.total + x
        return before + self.total * self.count


def test_states_persist_and_reset() -> None:
    torch.manual_seed(32)
    inputs = torch.randn(4, 3)
    model = torch.jit.script(Counter())
    with lapilli.compile(model, (inputs[0],), target=TARGET) as program:
        assert set(program.state()) == {"count", "last", "total"}
        want = [model(x) for x in inputs]
        assert all(torch.allclose(program(x), w, atol=1e-6) for x, w in zip(inputs, want, strict=True))
        program.reset()
        assert torch.allclose(program(inputs[0]), want[0], atol=1e-6)
    assert int(model.count) == 4  # capturing ran a copy, not the model


class CountsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.runs


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.empty(0, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum(0)


class BeginsOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.state) == 0:
            self.state = torch.full([3], 7.0)
        self.state = self.state + x
        return self.state


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CountsInPython, "runs.*only tensors"),
        (Grows, "seen changes its shape"),
        (BeginsOdd, "not as if these began as zeros"),
    ],
)
def test_states_that_cannot_be(model: type[nn.Module], message: str) -> None:
    x = torch.randn(2, 3) if model is Grows else torch.randn(3)
    with pytest.raises(lapilli.CompileError, match=message):
        lapilli.compile(torch.jit.script(model()), (x,))


# -- attention's fast paths, which only exist in TorchScript's graphs


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_with_padding(norm_first: bool) -> None:
    torch.manual_seed(33)
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padded = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    given = {"src": x, "src_key_padding_mask": padded}
    with torch.no_grad():
        want = model(**given)
    with lapilli.compile(torch.jit.script(model), given, target=TARGET) as program:
        assert not program.report().on_cpu
        assert relative_error(program(**given), want) <= FLOAT_BOUND


# -- quantized


class Quantizable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.add = torch.ao.nn.quantized.FloatFunctional()
        self.pool, self.classify = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.add.add(x, self.second(x))
        return self.dequant(self.classify(self.pool(x).flatten(1)))


@pytest.fixture(scope="module")
def quantized() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(34)
    model, x = Quantizable().eval(), torch.randn(4, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.fuse_modules(model, [["conv", "bn", "relu"]], inplace=True)
        model.qconfig = quantization.get_default_qconfig("qnnpack")
        quantization.prepare(model, inplace=True)
        model(x)
        return quantization.convert(model), x


@pytest.mark.parametrize("kind", ["module", *KINDS])
def test_quantized_models_compute_in_integers(quantized: tuple[nn.Module, torch.Tensor], kind: str) -> None:
    """On the grid of the quantized values: equal, but for a sum that rounds the other way by one step."""
    model, x = quantized
    source = model if kind == "module" else turned(model, kind, x)
    with lapilli.compile(source, (x,), target=TARGET) as program:
        assert not program.report().on_cpu
        assert {c.dtype for c in program.description.constants if len(c.shape) > 1} == {"int8"}
        off = (program(x) - model(x)).abs() / model.classify.scale
    assert off.max() < 1.01
    assert (off < 0.01).float().mean() > 0.9


def test_dynamically_quantized_linear() -> None:
    torch.manual_seed(35)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(5, 16)
    with lapilli.compile(converted, (x,), target=TARGET) as program:
        assert {c.dtype for c in program.description.constants if len(c.shape) > 1} == {"int8"}
        # No activation of this model is at a tie between two codes.
        assert relative_error(program(x), converted(x).detach()) <= FLOAT_BOUND


@pytest.mark.parametrize("kind", ["module", *KINDS])
def test_linear_layers_of_halves(kind: str) -> None:
    """`quantize_dynamic` to float16: weights are rounded, what is computed is float32."""
    torch.manual_seed(37)
    x = torch.randn(5, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        converted = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)
        source = converted if kind == "module" else turned(converted, kind, x)
    for layer in (model[0], model[2]):
        layer.weight.data = layer.weight.half().float()
    with lapilli.compile(source, (x,), target=TARGET) as program:
        found = program(x)
    assert relative_error(found, model(x).detach()) <= FLOAT_BOUND
    assert relative_error(found, converted(x).detach()) <= FLOAT_BOUND


def test_fused_modules() -> None:
    """Those of fuse_modules: conv+bn, conv+bn+relu, conv+relu, linear+relu."""
    torch.manual_seed(36)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 16, 16)
    fused = quantization.fuse_modules(model, [["0", "1"], ["2", "3", "4"], ["5", "6"], ["9", "10"]])
    with torch.no_grad():
        want = model(x)
    for source in (fused, torch.jit.script(fused)):
        with lapilli.compile(source, (x,), target=TARGET) as program:
            assert relative_error(program(x), want) <= FLOAT_BOUND
            labels = [command.label for command in program.description.methods[0].plans[0].run]
            assert sum("relu" in label for label in labels) == 3  # each in the kernel of its convolution or product
            assert not any(label == "relu" for label in labels)


# -- errors


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 2:
            raise ValueError(f"two rows are wanted, not {x.shape[0]}")
        return x


class LooksAtValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 0).all()):
            return x * 2
        return x


def test_errors_name_the_operator_and_its_line() -> None:
    with pytest.raises(lapilli.CompileError, match=r"ValueError: two rows are wanted, not 3") as raised:
        lapilli.compile(torch.jit.script(Raises()), (torch.ones(3),))
    assert "prim::RaiseException in " in str(raised.value)
    assert "test_torchscript.py, line " in str(raised.value)
    with pytest.raises(lapilli.CompileError, match=r"aten::Bool.*depends on the values of a tensor"):
        lapilli.compile(torch.jit.script(LooksAtValues()), (torch.ones(3),))


def test_inputs_must_be_given_and_fit() -> None:
    model = torch.jit.script(Branches())
    with pytest.raises(lapilli.CompileError, match=r"forward\(Tensor x, bool double, .*bias\)"):
        lapilli.compile(model)
    with pytest.raises(lapilli.CompileError, match="too many positional"):
        lapilli.compile(model, (torch.ones(2, 2), True, None, 1))
    with pytest.raises(lapilli.CompileError, match="missing a required argument: 'x'"):
        lapilli.compile(model, {"double": True})


def test_files_that_are_no_models(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(lapilli.CompileError, match=r"weights\.pt.*holds no code"):
        lapilli.compile(tmp_path / "weights.pt", (torch.ones(2),))
    with pytest.raises(FileNotFoundError):
        lapilli.compile(tmp_path / "missing.pt", (torch.ones(2),))


@pytest.mark.long
def test_command_line(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Branches()), tmp_path / "model.pt")

    def cli(*args: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "lapilli.cli", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    cli("compile", "model.pt", "--input", "n=2..16,6", "--input", "bool=true", "--target", TARGET)
    with lapilli.load(tmp_path / "model.lap") as program:
        assert str(program.inputs[0]) == "'x': float32[n=1..16, 6]"
        x = torch.randn(5, 6)
        assert torch.allclose(program(x, True), Branches()(x, True), atol=1e-6)
    assert "give example_inputs for forward(Tensor x" in cli("compile", "model.pt", code=1)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a,3", "'a' is no size"),
        ("2..5,3", "batch=2..16"),
        ("bool=maybe", "'maybe' is no bool"),
        ("int=1.5", "'1.5' is no int"),
        ("1,2:single", "'single' is no type"),
    ],
)
def test_words_for_inputs_that_are_none(word: str, message: str) -> None:
    with pytest.raises(lapilli.InvalidInputError, match=re.escape(message)):
        example_inputs([word])


def test_words_for_inputs() -> None:
    inputs, dynamic = example_inputs(["n=2..16,3", "n=2,4:int64", "", "int=7", "str=a=b"])
    assert inputs is not None and dynamic is not None
    assert [tuple(x.shape) for x in inputs[:3]] == [(2, 3), (2, 4), ()] and inputs[3:] == (7, "a=b")
    assert inputs[1].dtype is torch.int64 and dynamic[0][0] is dynamic[1][0]
    assert example_inputs([]) == (None, None) and example_inputs(["1,3"])[1] is None
