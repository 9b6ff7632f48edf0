"""Runs what most models do, once, to fill the cache with its programs: `lapilli cache warm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def train_usual_models(device: str = "vulkan") -> int:
    """Trains an image classifier and a transformer for a few steps, with the usual optimizers, on random data, and
    generates a few elementwise results. Returns the number of operators that were called.
    """
    torch.manual_seed(0)
    images = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.Conv2d(16, 32, 1), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip
    words = _Words()
    count = _Count()
    with count:
        _train(images, torch.rand(4, 3, 32, 32), torch.randint(10, (4,)), device, torch.optim.SGD, momentum=0.9)
        _train(words, torch.randint(100, (2, 16)), torch.randint(100, (2, 16)), device, torch.optim.AdamW)
        _elementwise(torch.rand(4, 6, device=device) + 0.5)
    torch.get_device_module(device).synchronize()
    return count.calls


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.norm(self.layer(self.embedding(tokens)))).transpose(1, 2)
        return made


def _train(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    device: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    **options: Any,
) -> None:
    model.to(device)
    steps = optimizer(model.parameters(), lr=1e-3, **options)
    for _ in range(2):  # the second step has momenta
        steps.zero_grad()
        loss = functional.cross_entropy(model(x.to(device)), target.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    loss.item()
    with torch.no_grad():
        model.eval()(x.to(device)).argmax(1).cpu()


def _elementwise(x: Tensor) -> None:
    for made in (
        x + x, x * 2, x - 1, x / x, x**2, -x, x.abs(), x.exp(), x.log(), x.sqrt(), x.rsqrt(), x.tanh(), x.sigmoid(), x.relu(),
        x.clamp(0, 1), x.sum(), x.mean(-1), x.amax(-1), x.std(), x.softmax(-1), x @ x.T, x.T.contiguous(), x > 1, x.half(),
        torch.cat([x, x]), torch.stack([x, x]), torch.where(x > 1, x, 0.0), x.topk(2).values, x.sort().values, x.cumsum(0),
    ):  # fmt: skip
        made.cpu()
