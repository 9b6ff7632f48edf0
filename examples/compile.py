"""torch.compile(backend="vulkan"): inference with sizes that vary, training, and what ran where.

python examples/compile.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

from lapilli import backend


def network() -> nn.Module:
    """A small classifier of images [N, 3, 32, 32] in 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def inference() -> float:
    """Batches of any size by one program; returns the largest difference from torch on the CPU."""
    model = network().eval()
    compiled = torch.compile(model, backend="vulkan", options={"fallback": "error"})
    worst = 0.0
    with torch.no_grad():
        for batch in (2, 5, 16):
            x = torch.rand(batch, 3, 32, 32)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
            start = time.perf_counter()
            got = compiled(x)
            print(f"batch {batch:2}: {(time.perf_counter() - start) * 1e3:8.2f} ms")
            worst = max(worst, float((got - model(x)).abs().max()))
    return worst


def training(device: str, steps: int = 20) -> list[float]:
    """Losses of a model on the CPU (whose weights are copied when they change), or on the device (where nothing moves)."""
    torch.manual_seed(0)
    model = network().to(device)
    compiled = torch.compile(model, backend="vulkan")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = torch.rand(16, 3, 32, 32).to(device), torch.randint(0, 10, (16,)).to(device)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def main() -> None:
    print(f"largest difference from torch: {inference():.1e}")
    for device in ("cpu", "vulkan"):
        losses = training(device)
        print(f"training on {device}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    for kind, report in backend.reports():
        print(f"{kind}: {str(report).splitlines()[0]}")


if __name__ == "__main__":
    main()
