"""A batch of nothing through every front door: what PyTorch gives, or what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import lapilli
from lapilli import autoload, backend

autoload.register()
CPU_OR_DEVICE = pytest.mark.parametrize("device", ["cpu", "vulkan"])


class Images(nn.Module):
    """[n, 4, 8, 8]: convolutions, norms, all kinds of pooling, scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.deep = nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 4, 3, groups=4)
        self.norm, self.group, self.head = nn.BatchNorm2d(8), nn.GroupNorm(2, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.deep(self.group(self.up(F.max_pool2d(x, 2) + F.avg_pool2d(x, 2))))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear") + F.interpolate(x, scale_factor=2.0)
        return self.head((F.adaptive_avg_pool2d(x, 2) + F.adaptive_max_pool2d(x, 2)).flatten(1))


class Tokens(nn.Module):
    """[n, 5] numbers of tokens: embedding, attention, norms, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.embed(x))
        return self.head(y.softmax(-1).mean(1) + y.amax(1) + y.cumsum(1)[:, -1] + torch.cat([y, y], 1).sum(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "images": (Images, lambda n: torch.rand(n, 4, 8, 8)),
    "tokens": (Tokens, lambda n: torch.randint(0, 10, (n, 5))),
}
ALL = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, example = MODELS[name]
    return model(), example


def loss_of(scores: Tensor) -> Tensor:
    """Sums, for means of nothing are NaN."""
    wanted = torch.zeros(scores.shape[0], dtype=torch.int64, device=scores.device)
    losses = F.cross_entropy(scores, wanted, reduction="sum"), F.mse_loss(scores, scores * 0, reduction="sum")
    return losses[0] + losses[1] + F.binary_cross_entropy_with_logits(scores, scores * 0, reduction="sum")


@ALL
@pytest.mark.part(2)
def test_programs(name: str) -> None:
    model, example = made(name)
    model.eval()
    shapes = ({0: Dim("n", min=0, max=64)},)
    with lapilli.compile(model, (example(2),), dynamic_shapes=shapes) as program, torch.no_grad():
        for n in (0, 3):
            x = example(n)
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    with lapilli.compile(model, (example(0),)) as program, torch.no_grad():
        assert program(example(0)).shape == (0, 3)


@CPU_OR_DEVICE
@pytest.mark.parametrize("dynamic", [False, None])
@ALL
@pytest.mark.part(2)
def test_torch_compile(name: str, dynamic: bool | None, device: str) -> None:
    """dynamic None: the second size makes the batch dynamic, then comes an empty one."""
    model, example = made(name)
    own = copy.deepcopy(model.eval()).to(device)
    run = torch.compile(own, backend=backend.vulkan, dynamic=dynamic)
    with torch.no_grad():
        for n in (0,) if dynamic is False else (2, 3, 0):
            x = example(n)
            torch.testing.assert_close(run(x.to(device)).cpu(), model(x), rtol=1e-4, atol=1e-5)


def trained(model: nn.Module, run: Any, batches: list[Tensor], device: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        loss_of(run(x.to(device))).backward()
        optimizer.step()
    return [t.detach().cpu() for p in model.parameters() for t in (p, p.grad)]


@CPU_OR_DEVICE
@pytest.mark.parametrize("compiled", [False, True])
@ALL
def test_training(name: str, compiled: bool, device: str) -> None:
    """Without what draws random numbers and what refuses empty batches in training (batch norm)."""
    if not compiled and device == "cpu":
        pytest.skip("that is PyTorch itself")
    model, example = made(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout | nn.MultiheadAttention):
            module.train(False)
            module.dropout = 0.0
    batches = [example(0), example(4), example(0)] if compiled else [example(4), example(0)]
    own = copy.deepcopy(model).to(device)
    got = trained(own, torch.compile(own, backend=backend.vulkan) if compiled else own, batches, device)
    torch.testing.assert_close(got, trained(model, model, batches, "cpu"), rtol=1e-3, atol=1e-4)


@CPU_OR_DEVICE
def test_what_refuses_an_empty_batch(device: str) -> None:
    """Maxima of nothing: compiled and eager as PyTorch says it."""
    for f in (lambda x: x.amax(0), lambda x: x.max(0)):
        torch._dynamo.reset()
        x = torch.rand(0, 3, requires_grad=True)
        own = x.detach().to(device).requires_grad_()
        for run in (f, torch.compile(f, backend=backend.vulkan)):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                f(x)
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                run(own)


@CPU_OR_DEVICE
def test_errors_in_a_traced_backward_arrive(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those that the autograd engine meets under a guard of the device: they ended the process."""
    from lapilli.backend import trace

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("in the formula of a gradient")

    table = trace._decompositions() | {torch.ops.aten.tanh_backward.default: refuses}
    monkeypatch.setattr(trace, "_decompositions", lambda: table)
    torch._dynamo.reset()
    x = torch.rand(3).to(device).requires_grad_()
    with pytest.raises(Exception, match="in the formula of a gradient"):
        torch.compile(lambda x: x.tanh(), backend=backend.vulkan)(x)
