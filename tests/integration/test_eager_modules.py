"""Modules on the device "vulkan": moving, saving and loading, autocast."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import run_installed
from torch import Tensor, nn

from lapilli import autoload

autoload.register()
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Tied(nn.Module):
    """An embedding and a linear layer of one weight, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.arange(-10, 10).view(5, 4) / 4)  # so that sums are exact
        self.linear.weight = self.embedding.weight
        self.register_buffer("shift", torch.ones(5))
        self.plain = torch.arange(5.0)

    def forward(self, indices: Tensor) -> Tensor:
        return self.linear(self.embedding(indices)) + self.shift + self.plain


def on_device() -> tuple[Tied, Tensor, Tensor]:
    """A module on the device, an input there, and what it gives."""
    module = Tied().to("vulkan")
    module.plain = module.plain.to("vulkan")
    indices = torch.tensor([1, 2], device="vulkan")
    return module, indices, module(indices).detach().cpu()


@pytest.mark.parametrize(
    "move", [lambda m: m.to("vulkan"), lambda m: m.vulkan(), lambda m: nn.Sequential(m).to("vulkan:0")]
)
def test_tied_weights_stay_tied(move: Callable[[nn.Module], nn.Module]) -> None:
    module = Tied()
    before = module.linear.weight.detach().clone()
    move(module)
    assert module.linear.weight is module.embedding.weight and isinstance(module.linear.weight, nn.Parameter)
    assert module.linear.weight.is_vulkan and module.shift.is_vulkan and module.linear.weight.requires_grad
    assert len(list(module.parameters())) == 1
    module.half().cpu()
    assert module.linear.weight is module.embedding.weight and module.linear.weight.dtype == torch.float16
    assert torch.equal(module.linear.weight, before.half())


def test_gradients_move_with_their_module() -> None:
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    module.to("vulkan")
    assert module.weight.grad is not None and module.weight.grad.is_vulkan
    assert torch.equal(module.weight.grad.cpu(), torch.ones(2, 3))


def test_state_dict_and_deepcopy() -> None:
    module, indices, expected = on_device()
    other = Tied()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.linear.weight, module.linear.weight.cpu())
    back = Tied().vulkan()
    back.load_state_dict(other.state_dict())
    assert back.linear.weight.is_vulkan and torch.equal(back.linear.weight.cpu(), other.linear.weight)
    twin = copy.deepcopy(module)
    assert twin.linear.weight is twin.embedding.weight and twin.linear.weight is not module.linear.weight
    twin.linear.weight.detach().zero_()
    assert torch.equal(module(indices).cpu(), expected)


def through_file(value: Any, **load: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **load)


def test_save_and_load() -> None:
    x = torch.arange(12.0, device="vulkan").view(3, 4)
    weight = nn.Parameter(torch.ones(2, device="vulkan"))
    saved = {"x": x, "transposed": x.t(), "row": x[1], "weight": weight, "half": x.half(), "number": 3}
    for where, kind in ((None, "cpu"), ("cpu", "cpu"), ("vulkan", "vulkan"), (torch.device("vulkan:0"), "vulkan"),
                        ({"cpu": "vulkan:0"}, "vulkan")):  # fmt: skip
        loaded = through_file(saved, map_location=where)
        assert loaded["x"].device.type == kind and torch.equal(loaded["x"].cpu(), x.cpu())
        assert loaded["transposed"].stride() == (1, 4) and loaded["half"].dtype == torch.float16
        assert isinstance(loaded["weight"], nn.Parameter) and loaded["weight"].requires_grad
        loaded["x"].zero_()
        assert loaded["row"].tolist() == [0, 0, 0, 0]  # still one storage
    assert torch.equal(pickle.loads(pickle.dumps(x)).cpu(), x.cpu())
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    again = torch.optim.AdamW([weight])
    again.load_state_dict(through_file(optimizer.state_dict()))
    assert again.state[weight]["exp_avg"].is_vulkan


def test_saved_files_are_loaded_without_the_device(tmp_path: Path) -> None:
    module, _, expected = on_device()
    torch.save({"state": module.state_dict(), "expected": expected}, tmp_path / "state.pt")
    torch.jit.save(torch.jit.script(module), tmp_path / "script.pt")
    run_installed(
        f"""
        import torch

        saved = torch.load({str(tmp_path / "state.pt")!r})
        module = torch.jit.load({str(tmp_path / "script.pt")!r})
        assert torch.equal(module(torch.tensor([1, 2])), saved["expected"])
        assert torch.equal(module.state_dict()["linear.weight"], saved["state"]["linear.weight"])
        """,
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


@pytest.mark.parametrize("make", [lambda m, x: torch.jit.script(m), torch.jit.trace], ids=["script", "trace"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_torchscript(make: Callable[..., Any], as_bytes: bool, tmp_path: Path) -> None:
    module, indices, expected = on_device()
    script = make(module, indices)
    assert torch.equal(script(indices).cpu(), expected)
    if as_bytes:
        file = io.BytesIO()
        torch.jit.save(script, file)
        data = file.getvalue()
    else:
        script.save(tmp_path / "script.pt")
        data = (tmp_path / "script.pt").read_bytes()
    assert b"vulkan:0" not in data
    assert all(value.is_vulkan for value in script.state_dict().values())
    assert torch.equal(script(indices).cpu(), expected)  # as it was before

    on_host = torch.jit.load(io.BytesIO(data))
    assert torch.equal(on_host(indices.cpu()), expected)
    there = torch.jit.load(io.BytesIO(data), map_location="vulkan")
    assert all(value.is_vulkan for value in there.state_dict().values())
    assert torch.equal(there(indices).cpu(), expected)
    moved = torch.jit.load(io.BytesIO(data)).to("vulkan")
    assert moved.linear.weight.is_vulkan and moved.linear.weight.data_ptr() == moved.embedding.weight.data_ptr()
    assert not any(value.is_vulkan for value in moved.cpu().state_dict().values())


class Network(nn.Module):
    """Convolutions, which torch.jit.trace does not record by their own name, and a tensor that is written in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.up, self.linear = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(4 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.features(x))
        x[:, 1] = 1
        x[:, :, 0] = x[:, :, 2]
        return self.linear(x.flatten(1))


def test_traces_of_the_device_are_right_on_the_host(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    module, x, other = Network().eval(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = module(other)
    traced = torch.jit.trace(module.to("vulkan"), x.to("vulkan"))
    assert not [w for w in recwarn if issubclass(w.category, torch.jit.TracerWarning)]  # type: ignore[attr-defined]
    torch.testing.assert_close(traced(other.to("vulkan")).cpu(), expected)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    torch.testing.assert_close(torch.jit.load(io.BytesIO(file.getvalue()), map_location="cpu")(other), expected)


def test_scripted_functions_are_saved_with_their_constants() -> None:
    constant = torch.arange(3.0, device="vulkan")
    traced = torch.jit.trace(lambda x: x * constant, torch.ones(3, device="vulkan"))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    assert torch.equal(torch.jit.load(io.BytesIO(file.getvalue()))(torch.ones(3)), constant.cpu())
    assert torch.equal(traced(torch.ones(3, device="vulkan")).cpu(), constant.cpu())


def test_exported_programs() -> None:
    module, indices, expected = on_device()
    program = torch.export.export(module, (indices,))
    assert torch.equal(program.module()(indices).cpu(), expected)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert torch.equal(loaded.state_dict["linear.weight"].cpu(), module.linear.weight.cpu())
    assert torch.equal(loaded.constants["plain"].cpu(), module.plain.cpu())
    assert torch.equal(loaded.module()(indices).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).to("vulkan")
    x = torch.randn(5, 4, device="vulkan")
    plain = net(x)
    with torch.autocast("vulkan", dtype=dtype):
        hidden = net[0](x)
        normed = net[1](hidden)
        y = net(x)
        assert (hidden.dtype, normed.dtype, y.dtype) == (dtype, torch.float32, dtype)
        assert hidden.sum().dtype == hidden.softmax(-1).dtype == torch.cat([hidden, normed]).dtype == torch.float32
        assert hidden.softmax(-1, dtype=dtype).dtype == dtype
        assert (x.double() @ x.double().t()).dtype == torch.float64
        with torch.autocast("vulkan", enabled=False):
            assert net(x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
            nn.functional.binary_cross_entropy(torch.rand(3, device="vulkan"), torch.rand(3, device="vulkan"))
        loss = nn.functional.cross_entropy(y, torch.tensor([0, 1, 2, 0, 1], device="vulkan"))
        assert loss.dtype == torch.float32
    near = 1e-2 if dtype is torch.float16 else 5e-2  # a bfloat16 has three bits less
    torch.testing.assert_close(y.float().cpu(), plain.cpu(), rtol=near, atol=near)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.is_vulkan for p in net.parameters())
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast("vulkan", dtype=torch.float64)


def test_autocast_converts_a_weight_once() -> None:
    from lapilli.eager import autocast

    linear, x = nn.Linear(3, 3, bias=False).to("vulkan"), torch.rand(2, 3, device="vulkan")
    with torch.autocast("vulkan"):
        linear(linear(x)).sum().backward()
        assert len(autocast._cache.casts) == 1
    assert not autocast._cache.casts and linear.weight.grad is not None
