"""The networks that are measured, with random weights of a fixed seed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from comparison.models import Encoder
from torch import Tensor, nn


def classifier(name: str) -> nn.Module:
    """A network of torchvision."""
    import torchvision_without_ops

    torchvision_without_ops.allow()
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None)
    for p in model.parameters():
        if not p.any():  # the head of a ViT begins with zeros, and gives nothing else
            nn.init.normal_(p, std=0.02)
    return model.eval()


class Sentence(nn.Module):
    """An encoder of the shape of MiniLM-L6 over embedded tokens: 6 layers of 384, 12 heads."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(words=2000, tokens=tokens)
        self.register_buffer("mask", torch.ones(1, tokens, dtype=torch.bool))

    def forward(self, words: Tensor) -> Tensor:
        """words: [batch, tokens] int64; the result is [batch, tokens, 384]."""
        result: Tensor = self.encoder(words, self.mask)
        return result


class Layer(nn.Module):
    """A layer of a Llama: RMS norms, grouped queries with rotary positions, a gated feed-forward part."""

    def __init__(self, width: int, heads: int, groups: int, size: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, heads * size, bias=False), nn.Linear(heads * size, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, tokens, width]; cos, sin: [tokens, size / 2]."""
        y = self.norm(x)
        q = rotate(self.q(y).unflatten(2, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = rotate(self.k(y).unflatten(2, (self.groups, -1)).transpose(1, 2), cos, sin)
        v = self.v(y).unflatten(2, (self.groups, -1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: [batch, heads, tokens, size]; cos, sin: [tokens, size / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Prefill(nn.Module):
    """What a Llama does with a prompt: the logits of the token after it."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, size: int, hidden: int, words: int, most: int
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups, size, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        angles = torch.arange(most)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [1, n] int64; the result is [1, words]."""
        n = tokens.shape[1]
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:n], self.sin[:n])
        return F.linear(self.norm(x)[:, -1], self.words.weight)


class GPT(nn.Module):
    """A decoder of 6 layers of 384 over 1,024 words, for training."""

    def __init__(self, words: int = 1024, width: int = 384, heads: int = 6, layers: int = 6, tokens: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, n] int64; the result is [batch, n, words]."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        result: Tensor = self.head(self.norm(x))
        return result
