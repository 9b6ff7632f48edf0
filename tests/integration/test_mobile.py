"""optimize_for_mobile: its backends, its arguments, what it leaves of a module, and what survives saving."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from torch import nn
from torch.jit.mobile import _load_for_lite_interpreter
from torch.utils import bundled_inputs, mobile_optimizer

import lapilli.mobile
from lapilli.runtime.description import Description

lapilli.mobile.install()  # what the entry point does in an installed package
Kind: Any = mobile_optimizer.MobileOptimizerType  # type: ignore[attr-defined]


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript's own


class Net(nn.Module):
    """Convolution, batch norm, dropout, a sum with ReLU after it, and a second method."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.second, self.classify = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.version = 3
        nn.init.uniform_(self.bn.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
        nn.init.uniform_(self.bn.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        return torch.relu(x + self.second(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.drop(self.features(x).mean((2, 3))))

    @torch.jit.export
    def embed(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.features(x).mean((2, 3)) * scale


@pytest.fixture
def net() -> tuple[nn.Module, torch.jit.ScriptModule, torch.Tensor]:
    class Own(Net):
        """Modules of one class share a TorchScript type in a process, and bundled inputs change it."""

    torch.manual_seed(40)
    model = Own().eval()
    return model, torch.jit.script(model), torch.randn(1, 3, 12, 12)


def optimize(*args: Any, **kwargs: Any) -> Any:
    return mobile_optimizer.optimize_for_mobile(*args, **kwargs)


def saved(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def test_the_cpu_backend_folds(net: Any) -> None:
    """Batch norm and dropout are gone, sum and ReLU are one operator; the module given is left alone."""
    model, script, x = net
    before = str(script.graph)
    with torch.no_grad():
        want = model(x)
    for source in (script, torch.jit.trace(model, x)):
        result = optimize(source)
        operators = torch.jit.export_opnames(result)
        assert not any("batch_norm" in o or "dropout" in o for o in operators)
        assert "aten::_add_relu.Tensor" in operators
        assert result.mobile_optimized
        for module in (result, saved(result)):
            assert relative_error(module(x), want) <= FLOAT_BOUND
    assert str(script.graph) == before
    kept = optimize(script, {Kind.CONV_BN_FUSION, Kind.FUSE_ADD_RELU})
    assert "aten::batch_norm" in torch.jit.export_opnames(kept)
    assert "aten::_add_relu.Tensor" not in torch.jit.export_opnames(kept)


def test_training_mode_is_left_for_inference(net: Any) -> None:
    model, _, x = net
    with torch.no_grad():
        want = model(x)
    result = optimize(torch.jit.script(model.train()))
    assert relative_error(result(x).detach(), want) <= FLOAT_BOUND


def test_the_vulkan_backend(net: Any, tmp_path: Path) -> None:
    """One operator of ours, the weights inside; saved for both interpreters, and run by a fresh process."""
    model, script, x = net
    result = optimize(script, backend="vulkan")
    assert torch.jit.export_opnames(result) == ["aten::__getitem__.t", "lapilli_prepack::run"]
    assert result.optimized_for_vulkan and not result.requires_backend_transfers
    assert not list(result.named_parameters())
    with torch.no_grad():
        want = model(x)
    got = result(x)
    assert got.device.type == "cpu"
    assert relative_error(got, want) <= FLOAT_BOUND
    assert relative_error(saved(result)(x), want) <= FLOAT_BOUND
    torch.jit.save(result, tmp_path / "model.pt")
    result._save_for_lite_interpreter(str(tmp_path / "model.ptl"))
    assert relative_error(_load_for_lite_interpreter(str(tmp_path / "model.ptl"))(x), want) <= FLOAT_BOUND
    torch.save((x, want), tmp_path / "expected.pt")
    fresh.run(
        tmp_path,
        """
import sys, torch
from torch.jit.mobile import _load_for_lite_interpreter
x, want = torch.load("expected.pt")
for module in (torch.jit.load("model.pt"), _load_for_lite_interpreter("model.ptl")):
    assert torch.allclose(module(x), want, atol=1e-5)
""",
    )


def test_sizes_that_vary_are_compiled_once_as_dynamic(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lapilli.mobile import model as runtime

    model, script, _ = net
    made: list[Any] = []
    compiled = runtime.compile_to_bytes  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "compile_to_bytes", lambda *a, **k: made.append(k) or compiled(*a, **k))  # type: ignore[func-returns-value]
    monkeypatch.setattr(runtime.CACHE, "file", lambda name: None)  # nothing on the disk
    monkeypatch.setattr(runtime.CACHE, "keep", lambda name, data: None)  # which cannot be written
    result = optimize(script, backend="vulkan")
    for batch in (1, 3, 2, 5, 1):
        x = torch.randn(batch, 3, 12, 12)
        with torch.no_grad():
            assert relative_error(result(x), model(x)) <= FLOAT_BOUND
    assert len(made) == 2


def test_the_metal_backend_computes_in_half_precision(net: Any) -> None:
    model, script, x = net
    result = optimize(script, backend="Metal")
    assert result.optimized_for_metal
    with torch.no_grad():
        error = relative_error(result(x), model(x))
    assert FLOAT_BOUND < error < 5e-3


def test_without_automatic_transfer(tmp_path: Path) -> None:
    """Tensors of the device in and out; those of the CPU are refused."""
    fresh.run(
        tmp_path,
        """
import torch
from torch import nn
from torch.utils.mobile_optimizer import MobileOptimizerType, optimize_for_mobile
torch.manual_seed(41)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
blocked = {MobileOptimizerType.VULKAN_AUTOMATIC_GPU_TRANSFER}
result = optimize_for_mobile(torch.jit.script(model), backend='vulkan', optimization_blocklist=blocked)
assert "lapilli_prepack::run_on_device" in torch.jit.export_opnames(result)
x = torch.randn(2, 3, 8, 8)
with torch.no_grad():
    want = model(x)
for given in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
    with torch.no_grad():
        want = model(given)
    y = result(given.to('vulkan'))
    assert y.device.type == 'vulkan'
    assert torch.allclose(y.cpu(), want, atol=1e-5)
    assert torch.allclose((y * 2).cpu(), want * 2, atol=1e-5)  # in order with the device's other work
try:
    result(x)
except RuntimeError as error:
    assert 'without automatic transfer' in str(error), error
else:
    raise AssertionError
""",
    )


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eig(x @ x)[0].real * 2


def test_what_runs_on_the_cpu_is_said() -> None:
    x = torch.randn(3, 3)
    with pytest.warns(UserWarning, match=r"run on the CPU: .*linalg_eig"):
        optimize(torch.jit.script(Eigenvalues()), backend="vulkan")(x)


class Nested(nn.Module):
    """What operators cannot take as it is: dictionaries, lists, optionals, numbers, tuples."""

    def forward(
        self,
        parts: list[torch.Tensor],
        weights: dict[str, torch.Tensor],
        pair: tuple[torch.Tensor, int],
        bias: torch.Tensor | None = None,
        mode: str = "sum",
        flag: bool = False,
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor | None, int]:
        total = torch.stack(parts).sum(0) * pair[0] * pair[1]
        found = {key: total * value for key, value in weights.items()}
        if mode == "mean":
            total = total / len(parts)
        return found, [total, total + 1], total + bias if bias is not None else None, pair[1] + 1 + int(flag)


@pytest.mark.parametrize("last", [(), (torch.ones(3),), (None, "mean", True)])
def test_nested_arguments_and_results(last: tuple[Any, ...]) -> None:
    torch.manual_seed(42)
    model = Nested()
    args = [torch.randn(3), torch.randn(3)], {"a": torch.randn(3), "b": torch.randn(3)}, (torch.randn(3), 2), *last
    want, got = model(*args), optimize(torch.jit.script(model), backend="vulkan")(*args)
    assert list(got[0]) == ["a", "b"] and got[3] == want[3]
    assert all(torch.allclose(got[0][key], want[0][key], atol=1e-6) for key in "ab")
    assert all(torch.allclose(g, w, atol=1e-6) for g, w in zip(got[1], want[1], strict=True))
    assert (got[2] is None) == (want[2] is None)
    assert want[2] is None or torch.allclose(got[2], want[2], atol=1e-6)


def test_preserved_methods_and_bundled_inputs(net: Any) -> None:
    model, script, x = net
    bundled_inputs.augment_model_with_bundled_inputs(script, [(torch.zeros_like(x),)])
    result = optimize(script, preserved_methods=["embed", "version"], backend="vulkan")
    with torch.no_grad():
        assert relative_error(result.embed(x, 3.0), model.embed(x, 3.0)) <= FLOAT_BOUND
        assert relative_error(result.embed(x), model.embed(x)) <= FLOAT_BOUND
    assert result.version == 3
    assert torch.equal(result.get_all_bundled_inputs()[0][0], torch.zeros_like(x))
    assert not hasattr(optimize(script), "embed")
    lints = {lint["name"] for lint in mobile_optimizer.generate_mobile_module_lints(script)}
    assert "DROPOUT" in lints and "BATCHNORM" in lints
    lints = {lint["name"] for lint in mobile_optimizer.generate_mobile_module_lints(result)}
    assert not lints & {"DROPOUT", "BATCHNORM", "REQUIRES_GRAD"}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.last
        self.last = x
        return y


def test_what_is_refused(net: Any) -> None:
    model, script, _ = net
    with pytest.raises(TypeError, match="ScriptModule is expected"):
        optimize(model)
    with pytest.raises(TypeError, match="Unknown backend 'opengl', must be one of 'CPU', 'Vulkan' or 'Metal'"):
        optimize(script, backend="opengl")
    with pytest.raises(TypeError, match="'bn'; it is a set of MobileOptimizerType: CONV_BN_FUSION"):
        optimize(script, {"bn"})
    with pytest.raises(AttributeError, match="do not exist in script_module: embedd.*Did you mean embed"):
        optimize(script, preserved_methods=["embedd"])
    with pytest.raises(lapilli.CompileError, match=r"assigns the attribute last.*lapilli\.compile"):
        optimize(torch.jit.script(Remembers()), backend="vulkan")
    assert "last" in dict(optimize(torch.jit.script(Remembers())).named_buffers())  # on the CPU it may


def test_modules_in_training_mode_are_fused_with_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.warns(UserWarning, match=r"training mode and are fused for inference.*model\.eval\(\)"):
        fused = torch.quantization.fuse_modules(model, ["0", "1", "2"])
    assert isinstance(fused[0], torch.ao.nn.intrinsic.ConvReLU2d)
    assert model[0].training and isinstance(model[1], nn.BatchNorm2d)


def portable(module: Any, path: Path, lite: bool = False) -> lapilli.Program:
    """The program that the player finds in the module's file, without torch."""
    if lite:
        module._save_for_lite_interpreter(str(path))
    else:
        torch.jit.save(module, path)
    return lapilli.load(path)


@pytest.mark.parametrize("lite", [False, True])
def test_saved_modules_carry_a_program(net: Any, tmp_path: Path, lite: bool) -> None:
    """Its sizes are what the module was run with; before, what its first layer tells: one picture of any size."""
    model, script, x = net
    result = optimize(script, backend="vulkan")
    any_size = portable(result, tmp_path / "told.pt", lite)
    wide = torch.randn(1, 3, 9, 23)
    with torch.no_grad():
        assert relative_error(any_size(wide), model(wide)) <= FLOAT_BOUND
        result(x)
        exact = portable(result, tmp_path / "run.pt", lite)
        assert exact.inputs[0].shape == x.shape
        assert relative_error(exact(x), model(x)) <= FLOAT_BOUND
    assert torch.equal(torch.jit.load(tmp_path / "run.pt")(x), result(x)) if not lite else True


def test_traced_and_bundled_sizes_are_kept(net: Any, tmp_path: Path) -> None:
    model, script, x = net
    traced = portable(optimize(torch.jit.trace(model, x), backend="metal"), tmp_path / "traced.pt")
    assert traced.inputs[0].shape == x.shape
    assert [plan.name for plan in Description.of(tmp_path / "traced.pt").methods[0].plans] == ["gpu-fp16", "any-fp32"]
    example = torch.zeros(2, 3, 5, 7)
    bundled_inputs.augment_model_with_bundled_inputs(script, [(example,)])
    assert portable(optimize(script, backend="vulkan"), tmp_path / "bundled.pt").inputs[0].shape == example.shape


def test_a_file_without_a_program_says_so(tmp_path: Path) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.warns(UserWarning, match=r"no program for C\+\+, Java and Kotlin.*Run it once"):
        torch.jit.save(optimize(torch.jit.script(Double()), backend="vulkan"), tmp_path / "double.pt")
    with pytest.raises(lapilli.InvalidFileError, match="without a Lapilli program"):
        lapilli.load(tmp_path / "double.pt")
