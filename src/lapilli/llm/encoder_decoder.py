"""Encoder and decoder in plain PyTorch: T5 and its relatives, and Whisper. What a tensor or a number lacks is left out.

`encode` reads what is given, and keeps the keys and values that the decoder attends to as buffers: states of a program. From then
on the decoder is one of tokens with a cache of its own, as `Decoder` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli.llm.cache_size import CacheSize
from lapilli.llm.decoder import Linear, Norm, Weight
from lapilli.llm.paged_cache import PagedCache, PageTable, Places

Activation = Literal["relu", "gelu", "gelu_new", "silu"]


@dataclass(frozen=True)
class TwoStacks:
    """Numbers of an encoder and a decoder.

    size: of a head. encoders, decoders: layers. context: tokens that the decoder has room for, None: any number. places: what the
    encoder gives at most, None: any number. scale: of attention's scores. head_scale: of what the head reads. buckets, distance: of
    relative positions. bins: of a spectrum, 0: tokens are read. suppressed: tokens that are not written after position first
    and the next ones; first_suppressed: only not after first. alignment: layers and heads of the decoder that attend to the place
    where a token is.
    """

    words: int
    width: int
    encoders: int
    decoders: int
    heads: int
    size: int
    inner: int
    eps: float
    scale: float
    activation: Activation
    context: int | None = None
    places: int | None = None
    head_scale: float = 1.0
    buckets: int = 0
    distance: int = 0
    bins: int = 0
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    first: int = 0
    alignment: tuple[tuple[int, int], ...] = ()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _linear(tensors: Mapping[str, Any], name: str) -> Linear:
    return Linear(Weight.of(tensors[f"{name}.weight"]), tensors.get(f"{name}.bias"))


def _norm(tensors: Mapping[str, Any], name: str, eps: float) -> Norm:
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    return Norm(weight, eps, bias, centred=bias is not None)


class Attending(nn.Module):
    """Attention with a norm before it, and what went into it added."""

    def __init__(self, shape: TwoStacks, tensors: Mapping[str, Any], prefix: str) -> None:
        super().__init__()
        self.shape = shape
        self.norm = _norm(tensors, f"{prefix}norm", shape.eps)
        self.q, self.k, self.v, self.o = (_linear(tensors, f"{prefix}{name}") for name in "qkvo")

    def keys_and_values(self, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of y [1, n, width]: both [1, heads, n, size]."""
        return self._heads(self.k(y)).to(dtype), self._heads(self.v(y)).to(dtype)

    def forward(
        self, x: Tensor, y: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, apart: bool = False
    ) -> Tensor:
        """x: [1, n, width], y: its norm. mask: which keys a query sees, or what is added to scores. apart: each query has keys and
        values of its own, [n, heads, places, size].
        """
        q = self._heads(self.q(y)).to(keys.dtype)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(keys.dtype)
        if apart:
            q = q.transpose(0, 2)
        found = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.shape.scale)
        if apart:
            found = found.transpose(0, 2)
        attended: Tensor = x + self.o(found.transpose(1, 2).flatten(2).to(x.dtype))
        return attended

    def _heads(self, y: Tensor) -> Tensor:
        return y.view(1, -1, self.shape.heads, self.shape.size).transpose(1, 2)


class Network(nn.Module):
    """Feed-forward, gated where there is a gate, with a norm before it, and what went into it added."""

    def __init__(self, shape: TwoStacks, tensors: Mapping[str, Any], prefix: str) -> None:
        super().__init__()
        self.norm = _norm(tensors, f"{prefix}norm", shape.eps)
        self.up, self.down = _linear(tensors, f"{prefix}up"), _linear(tensors, f"{prefix}down")
        self.gate = _linear(tensors, f"{prefix}gate") if f"{prefix}gate.weight" in tensors else None
        self.activation = shape.activation

    def forward(self, x: Tensor) -> Tensor:
        y, act = self.norm(x), _ACTIVATIONS[self.activation]
        inner = act(self.up(y)) if self.gate is None else act(self.gate(y)) * self.up(y)
        moved: Tensor = x + self.down(inner)
        return moved


class FrameConvolution(nn.Module):
    """Of three neighbours: [1, columns, n] -> [1, rows, n / stride]."""

    def __init__(self, weight: Tensor, bias: Tensor, stride: int) -> None:
        super().__init__()
        self.weight, self.bias, self.stride = nn.Buffer(weight), nn.Buffer(bias), stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, stride=self.stride, padding=1)


class EncoderLayer(nn.Module):
    """[1, n, width] -> [1, n, width]."""

    def __init__(self, shape: TwoStacks, tensors: Mapping[str, Any], prefix: str) -> None:
        super().__init__()
        self.attention = Attending(shape, tensors, f"{prefix}attn_")
        self.network = Network(shape, tensors, f"{prefix}ffn_")

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.attention.norm(x)
        moved: Tensor = self.network(self.attention(x, y, *self.attention.keys_and_values(y, x.dtype), mask))
        return moved


class DecoderLayer(nn.Module):
    """With caches for each of some sequences: of its own keys and values, and of those that the encoder gives."""

    def __init__(
        self,
        shape: TwoStacks,
        size: CacheSize,
        places: int,
        tensors: Mapping[str, Any],
        prefix: str,
        cached: torch.dtype,
    ) -> None:
        super().__init__()
        self.attention = Attending(shape, tensors, f"{prefix}attn_")
        self.cross = Attending(shape, tensors, f"{prefix}cross_attn_")
        self.network = Network(shape, tensors, f"{prefix}ffn_")

        self.cache = PagedCache(size, shape.heads, shape.size, cached)
        given = size.sequences, shape.heads, places, shape.size
        self.cross_keys, self.cross_values = (
            nn.Buffer(torch.zeros(given, dtype=cached), persistent=False) for _ in range(2)
        )

    def keep(self, encoded: Tensor, sequence: Tensor) -> None:
        """Keeps keys and values of what the encoder gives for a sequence, [1, n, width], from the first place on."""
        keys, values = self.cross.keys_and_values(encoded, self.cross_keys.dtype)
        at = torch.arange(encoded.shape[1])
        for cache, new in ((self.cross_keys, keys), (self.cross_values, values)):
            cache[sequence.expand(encoded.shape[1]), :, at] = new[0].transpose(0, 1)

    def forward(
        self,
        x: Tensor,
        places: Places,
        pages: Tensor | None,
        lines: Tensor,
        mask: Tensor,
        seen: Tensor | None,
        apart: bool,
    ) -> Tensor:
        """x: [1, n, width], which are kept at places, and see what lies in pages, and what the encoder gave for sequences lines
        [1], or [n] if they are apart. mask: of the cache. seen: of the encoder's places.
        """
        x = self.own(x, places, pages, mask, apart)
        x = self.cross(x, self.cross.norm(x), *self._given(lines), seen, apart)
        moved: Tensor = self.network(x)
        return moved

    def own(self, x: Tensor, places: Places, pages: Tensor | None, mask: Tensor, apart: bool) -> Tensor:
        """The layer's first part: arguments as for a call."""
        y = self.attention.norm(x)
        keys, values = self.attention.keys_and_values(y, self.cache.keys.dtype)
        self.cache.keep(places, keys[0], values[0])
        attended: Tensor = self.attention(x, y, *self.cache.read(pages), mask, apart)
        return attended

    def attention_to_given(self, x: Tensor, line: Tensor, heads: Sequence[int]) -> Tensor:
        """How much heads attend to each of the encoder's places: [heads, n, places], of what `own` gives."""
        q = self.cross.q(self.cross.norm(x)).view(x.shape[1], -1, self.cross.shape.size).transpose(0, 1)
        keys, _ = self._given(line)
        chosen = torch.tensor(list(heads))
        scores = q.index_select(0, chosen).float() @ keys[0].index_select(0, chosen).float().transpose(1, 2)
        return torch.softmax(scores * self.cross.shape.scale, -1)

    def _given(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what the encoder gave, [n, heads, places, size] each. Rows in vain read the last one."""
        if len(self.cross_keys) == 1:
            return self.cross_keys, self.cross_values
        at = lines.clamp(max=len(self.cross_keys) - 1)
        return self.cross_keys.index_select(0, at), self.cross_values.index_select(0, at)


def buckets(distances: Tensor, count: int, furthest: int, both: bool) -> Tensor:
    """T5's classes of distances (key - query), int64: exact near, by their logarithm further away. both: of keys after the query,
    too.
    """
    if both:
        count //= 2
        found, distances = (distances > 0) * count, distances.abs()
    else:
        found, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    exact = count // 2
    far = torch.log(distances.float() / exact) / math.log(furthest / exact) * (count - exact)
    near = distances < exact
    far = exact + torch.where(near, 0.0, far).long()
    return found + torch.where(near, distances, far.clamp(max=count - 1))


class EncoderDecoder(nn.Module):
    """tensors: by GGUF's names of T5 (`dec.blk.0.cross_attn_q.weight`); a spectrum's convolutions are `conv1` and `conv2`, learned
    positions `enc.positions` and `dec.positions`. context: the length of a sequence's cache. places: how many tokens or frames the
    encoder gives at most. cached, sequences: as for `Decoder`.
    """

    def __init__(
        self,
        shape: TwoStacks,
        tensors: Mapping[str, Any],
        context: int,
        places: int,
        cached: torch.dtype = torch.float32,
        sequences: int = 1,
    ) -> None:
        super().__init__()
        self.shape, self.size, self.places = shape, CacheSize(sequences, context), places
        self.embedding = Weight.of(tensors["token_embd.weight"])
        head = tensors.get("output.weight")
        self.head = Linear(self.embedding if head is None else Weight.of(head))
        self.encoder = nn.ModuleList(EncoderLayer(shape, tensors, f"enc.blk.{k}.") for k in range(shape.encoders))
        self.decoder = nn.ModuleList(
            DecoderLayer(shape, self.size, places, tensors, f"dec.blk.{k}.", cached) for k in range(shape.decoders)
        )
        self.encoder_norm = _norm(tensors, "enc.output_norm", shape.eps)
        self.decoder_norm = _norm(tensors, "dec.output_norm", shape.eps)
        self.count = nn.Buffer(torch.zeros(sequences, dtype=torch.int64), persistent=False)
        self.pages = PageTable(self.size)
        if shape.bins:
            self.convolutions = nn.ModuleList(
                FrameConvolution(tensors[f"conv{k}.weight"], tensors[f"conv{k}.bias"], k) for k in (1, 2)
            )
            self.encoder_positions, self.decoder_positions = (
                nn.Buffer(tensors[f"{part}.positions"][:count]) for part, count in (("enc", places), ("dec", context))
            )
        else:  # of each distance, [heads, distances]: the encoder's from 1 - places on, the decoder's back from 0
            both = torch.arange(1 - places, places)
            self.encoder_bias, self.decoder_bias = (
                nn.Buffer(tensors[f"{part}.blk.0.attn_rel_b.weight"][classes].T.contiguous())
                for part, classes in (
                    ("enc", buckets(both, shape.buckets, shape.distance, True)),
                    ("dec", buckets(-torch.arange(context), shape.buckets, shape.distance, False)),
                )
            )
        self.never, self.never_first = (
            _marked(shape.words, given) for given in (shape.suppressed, shape.first_suppressed)
        )

    def encode(self, tokens: Tensor, count: Tensor, sequence: Tensor) -> None:
        """Reads tokens int64 [1, n] for a sequence int64 [1]; those after the first count int64 [1] are not seen."""
        n = tokens.shape[1]
        at = torch.arange(n)
        distances = (at - at[:, None] + self.places - 1).flatten()
        bias = self.encoder_bias.index_select(1, distances).view(1, -1, n, n)
        bias = torch.where(at < count, bias, -torch.inf)
        self.count.index_copy_(0, sequence, count)
        self._encoded(F.embedding(tokens, self.embedding()), bias, sequence)

    def encode_spectrum(self, spectrum: Tensor, sequence: Tensor) -> None:
        """Reads a spectrum [1, bins, 2 * places] for a sequence int64 [1]."""
        x = spectrum
        for convolution in self.convolutions:
            x = F.gelu(convolution(x))
        self._encoded(x.transpose(1, 2) + self.encoder_positions, None, sequence)

    def _encoded(self, x: Tensor, mask: Tensor | None, sequence: Tensor) -> None:
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.encoder_norm(x)
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            layer.keep(x, sequence)

    def forward(self, tokens: Tensor, start: Tensor, sequence: Tensor | None = None) -> Tensor:
        """As `Decoder`'s: logits [1, words] of the token after tokens [1, n], at positions start [1] and the next ones."""
        positions = start + torch.arange(tokens.shape[1])
        line = torch.zeros_like(start) if sequence is None else sequence
        return self._logits(self._through(tokens, positions, line, apart=False)[:, -1])

    def step(self, tokens: Tensor, positions: Tensor, lines: Tensor) -> Tensor:
        """As `Decoder`'s: logits [n, words] of the tokens after tokens [n], at positions [n] of sequences lines [n]."""
        return self._logits(self._through(tokens[None], positions, lines, apart=True)[0])

    def writable(self, logits: Tensor, positions: Tensor, timed: Tensor) -> Tensor:
        """Logits [n, words] of tokens after those at positions [n], without those that are never written there. timed: int64 [n],
        1 for answers with times, which begin a token earlier.
        """
        at, first = positions[:, None], (self.shape.first - timed)[:, None]
        if self.never is not None:
            logits = torch.where((at >= first) & self.never, -torch.inf, logits)
        if self.never_first is not None:
            logits = torch.where((at == first) & self.never_first, -torch.inf, logits)
        return logits

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Copies what the encoder gave for sequences source [n] to sequences target [n]."""
        for layer in self.decoder:
            for cache in (layer.cross_keys, layer.cross_values):
                assert isinstance(cache, Tensor)
                cache[target] = cache[source]
        self.count[target] = self.count[source]

    def align(self, tokens: Tensor, sequence: Tensor) -> Tensor:
        """How much the heads of `alignment` attend to each of the encoder's places after each of a sequence's first tokens int64
        [1, n]: [heads, n, places], float32. Keeps their keys and values, as a call does.
        """
        positions = torch.arange(tokens.shape[1])
        x = F.embedding(tokens, self.embedding()) + F.embedding(positions, self.decoder_positions)
        mask = positions[:, None] >= self.pages.tokens
        places, pages = self.pages.places(sequence, positions), self.pages.of(sequence)
        found: list[Tensor] = []
        for k, layer in enumerate(self.decoder[: 1 + max(layer for layer, _ in self.shape.alignment)]):
            assert isinstance(layer, DecoderLayer)
            heads = [head for at, head in self.shape.alignment if at == k]
            if heads:
                found.append(layer.attention_to_given(layer.own(x, places, pages, mask, False), sequence, heads))
            x = layer(x, places, pages, sequence, mask, None, False)
        return torch.cat(found)

    def _through(self, tokens: Tensor, positions: Tensor, lines: Tensor, apart: bool) -> Tensor:
        x = F.embedding(tokens, self.embedding())
        back = positions[:, None] - self.pages.tokens
        mask, seen = back >= 0, None
        if self.shape.bins:
            x = x + F.embedding(positions, self.decoder_positions)
        else:
            bias = self.decoder_bias.index_select(1, back.clamp(min=0).flatten()).view(1, -1, *back.shape)
            mask = torch.where(mask, bias, -torch.inf)
            count = self.count.index_select(0, lines.clamp(max=len(self.count) - 1))
            seen = torch.arange(self.places) < count[:, None]
        if apart:  # of each query, for all heads
            mask = mask[:, None, None] if self.shape.bins else mask.transpose(0, 2)
            seen = None if seen is None else seen[:, None, None]
        places, pages = self.pages.places(lines, positions), self.pages.of(lines)
        for layer in self.decoder:
            x = layer(x, places, pages, lines, mask, seen, apart)
        normed: Tensor = self.decoder_norm(x)
        return normed

    def _logits(self, x: Tensor) -> Tensor:
        if self.shape.head_scale != 1:
            x = x * self.shape.head_scale
        logits: Tensor = self.head(x)
        return logits


def _marked(words: int, tokens: tuple[int, ...]) -> nn.Buffer | None:
    if not tokens:
        return None
    found = torch.zeros(words, dtype=torch.bool)
    found[list(tokens)] = True
    return nn.Buffer(found)
