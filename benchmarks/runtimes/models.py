"""The models that all systems run, in PyTorch, and their files: TorchScript, ONNX, weights, inputs, and the results of torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 256, 4


class Convolutions(nn.Module):
    """A residual network of 3×3 convolutions for pictures [N, 3, 128, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, 2, 1)
        self.second = nn.Conv2d(32, 64, 3, 2, 1)
        self.rest = nn.ModuleList(nn.Conv2d(64, 64, 3, 1, 1) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        for layer in self.rest:
            x = F.relu(layer(x)) + x
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.reshape(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        weights = torch.softmax(q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(1, -1, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """An encoder of four blocks for [1, 128, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Products(nn.Module):
    """Three products of [64, 1024] with matrices [1024, 1024]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (1, 3, 128, 128)),
    "transformer": (Transformer, (1, 128, WIDTH)),
    "products": (Products, (64, 1024)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The model with its weights, and its input: the same in every process."""
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind().eval().requires_grad_(False), torch.rand(shape)


def write(folder: Path) -> None:
    """NAME.npz (weights, x, and y of torch in float64), NAME.pt and NAME.onnx of each model; products-open.onnx has open rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        model, x = made(name)
        exact = made(name)[0].double()(x.double()).numpy()
        weights = {key: value.numpy() for key, value in model.state_dict().items()}
        np.savez(folder / f"{name}.npz", **weights, x=x.numpy(), y=exact)
        torch.jit.trace(model, x).save(str(folder / f"{name}.pt"))
        torch.onnx.export(model, (x,), folder / f"{name}.onnx", dynamo=True, external_data=False, verbose=False)
    model, x = made("products")
    rows = {0: torch.export.Dim("rows", min=1, max=256)}
    open_file = folder / "products-open.onnx"
    torch.onnx.export(model, (x,), open_file, dynamo=True, dynamic_shapes=(rows,), external_data=False, verbose=False)
