"""torchvision's image classifiers with random weights, and a small one of our own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torchvision_without_ops
from torch import nn

torchvision_without_ops.allow()
from torchvision import models  # noqa: E402

# The side of the image is odd and small, as far as the architecture allows.
SIDES = {
    "mobilenet_v2": 97, "mobilenet_v3_small": 97, "resnet18": 97, "resnet50": 65, "squeezenet1_1": 97,
    "shufflenet_v2_x0_5": 97, "mnasnet0_5": 97, "efficientnet_b0": 97, "vgg11": 33, "densenet121": 65, "googlenet": 97,
    "regnet_y_400mf": 97, "convnext_tiny": 65,
}  # fmt: skip


@cache
def model_of(name: str) -> torch.nn.Module:
    """Random weights of our own seed, with batch norm statistics of one batch, so that activations keep their scale.

    The affine parts of the norms (0.5 and 1, about) make the network as well-conditioned as a trained one: with 1 and 0, each
    of 50 layers doubles a rounding error, and torch itself is off by 2e-5 from float64."""
    torch.manual_seed(20)
    options: dict[str, Any] = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    model: torch.nn.Module = getattr(models, name)(weights=None, **options)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
        torch.nn.init.uniform_(norm.weight, 0.4, 0.6)
        torch.nn.init.normal_(norm.bias, 1.0, 0.2)
    with torch.no_grad():
        model(torch.randn(4, 3, SIDES[name], SIDES[name]))
    return model.eval()


def image(name: str, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(21)
    return torch.randn(batch, 3, SIDES[name], SIDES[name])


def small() -> nn.Module:
    """Convolutions of every kind of kernel, a residual, and a classifier."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.point = nn.Conv2d(8, 32, 1)
            self.wide = nn.Conv2d(32, 32, 3, padding=1)
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            x = self.point(x + nn.functional.hardswish(self.depthwise(x)))
            x = nn.functional.max_pool2d(x + self.wide(x), 2)
            return self.head(x.mean((2, 3))).softmax(-1)

    torch.manual_seed(5)
    return Net().eval()
