"""The networks of the comparison; some of them are trained. Only torch and torchvision are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comparison.cases import Case, Inputs


class Encoder(nn.Module):
    """A text encoder as BERT: learnt positions, post-norm layers, exact GELU, a mask for padding."""

    def __init__(self, words: int = 2000, width: int = 384, heads: int = 12, layers: int = 6, tokens: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """words, mask: [batch, tokens], int64 and bool; the result is [batch, tokens, width]."""
        x = self.norm(self.words(words) + self.places(torch.arange(words.shape[1], device=words.device)))
        for layer in self.layers:
            x = layer(x, mask[:, None, None])
        return x


class Layer(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norms[0](x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.narrow(F.gelu(self.wide(x))))


def _torchvision(name: str, image: int, **options: int) -> Case:
    def make() -> tuple[nn.Module, Inputs]:
        import torchvision_without_ops

        torchvision_without_ops.allow()
        import torchvision

        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None, **options)
        for p in model.parameters():
            if not p.any():  # the head of a ViT begins with zeros, and gives nothing else
                nn.init.normal_(p, std=0.02)
        return model.eval(), (torch.rand(1, 3, image, image),)

    return Case(make)


def _encoder() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model = Encoder().eval()
    return model, (torch.randint(0, 2000, (1, 64)), torch.arange(64)[None] < 50)


MODELS = {
    "MobileNetV2, 3×224×224": _torchvision("mobilenet_v2", 224),
    "ResNet18, 3×224×224": _torchvision("resnet18", 224),
    "BERT-like encoder, 6 layers of 384, 64 tokens": Case(_encoder),
    "ViT-B/16, 3×64×64": _torchvision("vit_b_16", 64, image_size=64),
}


def small_cnn() -> nn.Module:
    """A classifier of 10 classes for images of any size, with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def small_transformer() -> nn.Module:
    """A classifier of 10 classes for texts of 16 tokens."""
    torch.manual_seed(0)
    return TextClassifier()


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(words=50, width=32, heads=4, layers=2, tokens=16), nn.Linear(32, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(words, torch.ones_like(words, dtype=torch.bool)).mean(1))


def images_and_labels() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(16, 3, 32, 32, generator=g), torch.randint(0, 10, (16,), generator=g)


def texts_and_labels() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (16, 16), generator=g), torch.randint(0, 10, (16,), generator=g)


@dataclass(frozen=True)
class Training:
    """make: the model; batch: its inputs and labels, the same at every call."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: type[torch.optim.SGD] | type[torch.optim.AdamW]


TRAINING = {
    "CNN, batch 16 of 3×32×32, SGD": Training(small_cnn, images_and_labels, torch.optim.SGD),
    "transformer, batch 16 of 16 tokens, AdamW": Training(small_transformer, texts_and_labels, torch.optim.AdamW),
}
