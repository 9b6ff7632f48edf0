"""Training on a Vulkan device: a small CNN and a small transformer, with losses beside those of the CPU.

    python examples/training.py [--model cnn|transformer] [--optimizer sgd|adamw] [--steps N] [--autocast]

Forward, backward and optimizer are PyTorch's own; their operators run on the device. The numbers that both devices begin with
are the same, so the losses are too, up to rounding.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stripes(nn.Module):
    """A CNN that tells noisy stripes apart: across, along, or slanting one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 1, 16, 16]; returns [batch, 4]."""
        return self.layers(x)

    @staticmethod
    def batch(size: int = 16) -> tuple[Tensor, Tensor]:
        kind, phase = torch.randint(4, (size,)), torch.rand(size, 1, 1) * 6
        x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        ways = torch.stack([x, y, x + y, x - y])
        return torch.sin(ways[kind] + phase)[:, None] + 0.5 * torch.randn(size, 1, 16, 16), kind


class Reverse(nn.Module):
    """A transformer that writes ten digits backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(10, 32), nn.Parameter(torch.randn(10, 32) * 0.1)
        nn.init.normal_(self.embedding.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 10, bias=False)
        self.out.weight = self.embedding.weight  # tied: `to` keeps them one

    def forward(self, digits: Tensor) -> Tensor:
        """digits: [batch, 10]; returns [batch, 10 (kinds), 10 (places)]."""
        return self.out(self.layers(self.embedding(digits) + self.places)).transpose(1, 2)

    @staticmethod
    def batch(size: int = 16) -> tuple[Tensor, Tensor]:
        digits = torch.randint(10, (size, 10))
        return digits, digits.flip(1)


MODELS = {"cnn": Stripes, "transformer": Reverse}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.005, foreach=True),
}


def train(model: str, optimizer: str, steps: int, device: str, autocast: bool = False) -> list[float]:
    """The losses of a number of steps, always from the same weights and over the same data."""
    torch.manual_seed(0)
    net = MODELS[model]().to(device)
    step = OPTIMIZERS[optimizer](net.parameters())
    scaler = torch.amp.GradScaler(device, enabled=autocast)
    losses = []
    for _ in range(steps):
        x, y = (tensor.to(device) for tensor in net.batch())
        step.zero_grad()
        with torch.autocast(device, torch.float16, enabled=autocast):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(step)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()  # the first thing that waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--autocast", action="store_true", help="compute in float16 where that is safe")
    options = parser.parse_args()
    begin = time.perf_counter()
    ours = train(options.model, options.optimizer, options.steps, "vulkan", options.autocast)
    print(f"{options.steps} steps on {torch.vulkan.get_device_name()} in {time.perf_counter() - begin:.1f} s")
    theirs = train(options.model, options.optimizer, options.steps, "cpu")
    for number in range(0, options.steps, max(1, options.steps // 10)):
        print(f"step {number:4}: loss {ours[number]:.5f}, on the CPU {theirs[number]:.5f}")
    print(f"on the CPU ran {torch.vulkan.fallbacks() or 'nothing'}")


if __name__ == "__main__":
    main()
