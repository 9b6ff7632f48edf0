"""The decoder of a language model, in plain PyTorch: Llama and its relatives, which differ in numbers, biases, norms and
what a layer adds.

Keys and values are kept in a `PagedCache` for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli.code_operators import DEQUANTIZE, LOOK_UP, POWER_OF_TWO, UNPACK
from lapilli.llm.blocks import BlockedMatrix, Parameter
from lapilli.llm.cache_size import CacheSize
from lapilli.llm.paged_cache import PagedCache, PageTable, Places


@dataclass(frozen=True)
class Shape:
    """Numbers of a decoder.

    size: of a head. rotated: how many elements of a head positions rotate. factors: divisors of the frequencies, [rotated / 2].
    attention_factor: of the rotation. window: how many tokens attention sees, None: all. context: the longest text that it was
    made for. score_scale: of attention's scores, None: the usual one. residual_scale: of what a layer adds. near: the layers
    that the window is for, None: all. near_base: of their positions, None: the usual one, with the usual factors. unrotated: layers
    without positions. centred: norms take off the mean. gated: networks have a gate. parallel: a layer's network reads what its
    attention reads.
    """

    words: int
    width: int
    layers: int
    heads: int
    groups: int
    size: int
    inner: int
    eps: float
    base: float
    context: int
    rotated: int
    activation: str = "silu"
    embedding_scale: float = 1.0
    factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    window: int | None = None
    score_scale: float | None = None
    residual_scale: float = 1.0
    near: tuple[int, ...] | None = None
    near_base: float | None = None
    unrotated: tuple[int, ...] = ()
    centred: bool = False
    gated: bool = True
    parallel: bool = False


class Weight(nn.Module):
    """A matrix [rows, columns]: codes with scales and offsets, or (`DenseWeight`) numbers."""

    @staticmethod
    def of(value: BlockedMatrix | Tensor) -> Weight:
        """The weight of a source."""
        return PackedWeight(value) if isinstance(value, BlockedMatrix) else DenseWeight(value)

    def forward(self) -> Tensor:
        """The matrix, float32; in a program, what it is computed from."""
        raise NotImplementedError


class DenseWeight(Weight):
    """Numbers as they are."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Buffer(value)

    def forward(self) -> Tensor:
        return self.value


class PackedWeight(Weight):
    """Codes, which a program decodes where it reads them."""

    def __init__(self, value: BlockedMatrix) -> None:
        super().__init__()
        self.columns, self.block, self.bits, self.above, self.low = (
            value.columns, value.block, value.bits, value.above, value.low
        )  # fmt: skip
        self.numbers, self.by_fours = value.numbers, value.by_fours
        self.codes = nn.Buffer(torch.from_numpy(value.codes))
        self.upper = None if value.upper is None else nn.Buffer(torch.from_numpy(value.upper))
        self.scale, self.offset = _Parameter(value.scale), None if value.offset is None else _Parameter(value.offset)

    def forward(self) -> Tensor:
        codes = self.codes
        if self.bits < 8:
            codes = UNPACK(codes, self.low, self.columns, self.bits, self.upper, self.above, self.by_fours)
        if self.numbers is not None:
            codes = LOOK_UP(codes, self.numbers)
        value: Tensor = DEQUANTIZE(codes, self.scale(), None, [1, self.block], torch.float32)
        if self.offset is not None:
            value = (value.view(len(value), -1, self.block) + self.offset()[..., None]).flatten(1)
        return value


class _Parameter(nn.Module):
    def __init__(self, given: Parameter) -> None:
        super().__init__()
        self.values = nn.Buffer(torch.from_numpy(given.values))
        self.codes, self.bits = None if given.codes is None else nn.Buffer(torch.from_numpy(given.codes)), given.bits
        self.bias = given.bias

    def forward(self) -> Tensor:
        if self.bias is not None:
            powers: Tensor = POWER_OF_TWO(self.values, self.bias)
            return powers
        if self.codes is None:
            return self.values
        count = self.codes.shape[1] * 8 // self.bits
        codes = self.codes if self.bits == 8 else UNPACK(self.codes, 0, count)
        found: Tensor = DEQUANTIZE(codes, self.values, None, [1, count // self.values.shape[1]], torch.float32)
        return found


class Linear(nn.Module):
    """x [*, columns] -> [*, rows]."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class Norm(nn.Module):
    """By the root mean square, or, centred, by mean and variance; [*, n] -> [*, n]."""

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None = None, centred: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Buffer(weight), None if bias is None else nn.Buffer(bias)
        self.eps, self.centred = eps, centred

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return y if self.bias is None else y + self.bias


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding; x: [1, heads, tokens, size], cosines and sines: [tokens, rotated / 2]."""
    cos, sin = rotation
    turned = 2 * cos.shape[-1]
    (a, b), rest = x[..., :turned].chunk(2, -1), x[..., turned:]
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts + [rest] * (turned < x.shape[-1]), -1)


class Block(nn.Module):
    """Attention with grouped queries and a cache, and a feed-forward network, after it or beside it."""

    def __init__(
        self, shape: Shape, size: CacheSize, tensors: Mapping[str, Any], prefix: str, cached: torch.dtype
    ) -> None:
        super().__init__()
        self.shape = shape

        def linear(name: str) -> Linear:
            return Linear(Weight.of(tensors[f"{prefix}{name}.weight"]), tensors.get(f"{prefix}{name}.bias"))

        def norm(name: str) -> Norm | None:
            weight = tensors.get(f"{prefix}{name}.weight")
            bias = tensors.get(f"{prefix}{name}.bias")
            return None if weight is None else Norm(weight, shape.eps, bias, shape.centred)

        self.before_attention, self.before_network = norm("attn_norm"), norm("ffn_norm")
        self.after_attention, self.after_network = norm("post_attention_norm"), norm("post_ffw_norm")
        self.q_norm, self.k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self.q, self.k, self.v, self.out = map(linear, ("attn_q", "attn_k", "attn_v", "attn_output"))
        self.gate = linear("ffn_gate") if shape.gated else None
        self.up, self.down = map(linear, ("ffn_up", "ffn_down"))
        self.cache = PagedCache(size, shape.groups, shape.size, cached)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Tensor,
        places: Places,
        pages: Tensor | None,
        apart: bool,
    ) -> Tensor:
        """x: [1, tokens, width], which are kept at places, and see what lies in pages. apart: each has pages of its own, and the
        mask is [tokens, 1, 1, places], not [tokens, places].
        """
        y = x if self.before_attention is None else self.before_attention(x)
        q, k = (
            self._normed(self.q(y), self.q_norm, self.shape.heads),
            self._normed(self.k(y), self.k_norm, self.shape.groups),
        )
        q, k = (z.transpose(1, 2) for z in (q, k))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        v = self._heads(self.v(y), self.shape.groups).transpose(1, 2)
        q, k, v = (z.to(self.cache.keys.dtype) for z in (q, k, v))
        self.cache.keep(places, k[0], v[0])
        k, v = self.cache.read(pages)
        if apart:
            attended = self._rows(q, k, v, mask)
        else:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.shape.score_scale, enable_gqa=True
            )
        x = self._added(x, self.out(attended.transpose(1, 2).flatten(2).to(x.dtype)), self.after_attention)
        if not self.shape.parallel:
            y = x if self.before_network is None else self.before_network(x)
        return self._added(x, self._network(y), self.after_network)

    def _network(self, y: Tensor) -> Tensor:
        up = self.up(y)
        inner = self._activated(up) if self.gate is None else self._activated(self.gate(y)) * up
        found: Tensor = self.down(inner)
        return found

    def _activated(self, x: Tensor) -> Tensor:
        if self.shape.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.shape.activation == "gelu_tanh" else "none")

    def _added(self, x: Tensor, y: Tensor, norm: Norm | None) -> Tensor:
        """What a part of the layer gives, added to what went into it."""
        if norm is not None:
            y = norm(y)
        return x + (y if self.shape.residual_scale == 1 else y * self.shape.residual_scale)

    def _normed(self, x: Tensor, norm: Norm | None, count: int) -> Tensor:
        """As so many heads, with the norm of each of them, or of all together."""
        if norm is None:
            return self._heads(x, count)
        whole = norm.weight.shape[0] != self.shape.size
        found: Tensor = self._heads(norm(x), count) if whole else norm(self._heads(x, count))
        return found

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention of q [1, heads, n, size], whose token b reads keys k[b]. Heads that share keys are rows of one product: keys
        and values are read where they are, once.
        """
        groups, count = self.shape.groups, q.shape[2]
        rows = q.view(groups, -1, count, self.shape.size).permute(2, 0, 1, 3)
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=self.shape.score_scale)
        return attended.flatten(1, 2).transpose(0, 1)[None]

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(1, -1, count, self.shape.size)


class Decoder(nn.Module):
    """From tokens to logits, with a cache of keys and values for each of some sequences.

    tensors: by GGUF's names (`blk.0.attn_q.weight`); matrices are `BlockedMatrix` or tensors, all others tensors. context: the
    tokens of a sequence. cached: the dtype of keys and values, in which attention is computed. tokens: of all sequences that there
    is room for, None: all.
    """

    def __init__(
        self,
        shape: Shape,
        tensors: Mapping[str, Any],
        context: int,
        cached: torch.dtype = torch.float32,
        sequences: int = 1,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.size = shape, CacheSize(sequences, context, tokens)
        self.embedding = Weight.of(tensors["token_embd.weight"])
        head = tensors.get("output.weight")
        self.head = Linear(self.embedding if head is None else Weight.of(head), tensors.get("output.bias"))
        self.blocks = nn.ModuleList(Block(shape, self.size, tensors, f"blk.{k}.", cached) for k in range(shape.layers))
        self.norm = Norm(tensors["output_norm.weight"], shape.eps, tensors.get("output_norm.bias"), shape.centred)
        powers = torch.arange(0, shape.rotated, 2).float() / shape.rotated
        frequencies = 1.0 / (shape.base**powers)
        if shape.factors is not None:
            frequencies = frequencies / torch.tensor(shape.factors)
        self.frequencies = nn.Buffer(frequencies)
        self.near_frequencies = None if shape.near_base is None else nn.Buffer(1.0 / (shape.near_base**powers))
        self.pages = PageTable(self.size)

    def forward(self, tokens: Tensor, start: Tensor, sequence: Tensor | None = None) -> Tensor:
        """Logits [1, words] of the token after tokens [1, n], which a sequence [1] has at positions start [1], start + 1, ...;
        None: the first one. All are int64.
        """
        logits: Tensor = self.head(self.hidden(tokens, start, sequence)[:, -1])
        return logits

    def hidden(self, tokens: Tensor, start: Tensor, sequence: Tensor | None = None) -> Tensor:
        """What the head reads, of each token: [1, n, width]. Arguments as for a call."""
        positions = start + torch.arange(tokens.shape[1])
        line = torch.zeros_like(start) if sequence is None else sequence
        return self._through(tokens, positions, self._masks(positions), line, apart=False)

    def step(self, tokens: Tensor, positions: Tensor, lines: Tensor) -> Tensor:
        """Logits [n, words] of the tokens after tokens [n], at positions [n] of sequences lines [n]."""
        masks = [m[:, None, None] for m in self._masks(positions)]
        x = self._through(tokens[None], positions, masks, lines, apart=True)
        logits: Tensor = self.head(x[0])
        return logits

    def _masks(self, positions: Tensor) -> list[Tensor]:
        """Which places of the cache are seen: by layers that see all, and by those that see the window."""
        mask = self.pages.tokens <= positions[:, None]
        if self.shape.window is None:
            return [mask, mask]
        return [mask, mask & (self.pages.tokens > positions[:, None] - self.shape.window)]

    def _rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def _through(
        self, tokens: Tensor, positions: Tensor, masks: Sequence[Tensor], lines: Tensor, apart: bool
    ) -> Tensor:
        """masks: as `_masks` gives them. apart: as for a block."""
        places, pages = self.pages.places(lines, positions), self.pages.of(lines)
        rotations = [self._rotation(positions, self.frequencies, self.shape.attention_factor)] * 2
        if self.near_frequencies is not None:
            rotations[1] = self._rotation(positions, self.near_frequencies, 1.0)
        x = F.embedding(tokens, self.embedding())
        if self.shape.embedding_scale != 1.0:
            x = x * self.shape.embedding_scale
        for k, block in enumerate(self.blocks):
            near = self.shape.near is None or k in self.shape.near
            rotation = None if k in self.shape.unrotated else rotations[near]
            x = block(x, rotation, masks[near], places, pages, apart)
        normed: Tensor = self.norm(x)
        return normed
