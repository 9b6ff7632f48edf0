"""Attention of several heads and encoder layers as PyTorch infers them: compiled, from TorchScript, and on the eager device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import lapilli

Masks = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Heads(nn.Module):
    """Every kind of mask in one graph; the results come with the weights of attention, where they are asked for."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.channels, self.heads = channels, heads
        self.qkv, self.qkv_bias = (
            nn.Parameter(torch.randn(3 * channels, channels)),
            nn.Parameter(torch.randn(3 * channels)),
        )
        self.out, self.out_bias = nn.Parameter(torch.randn(channels, channels)), nn.Parameter(torch.randn(channels))

    def one(self, x: Tensor, mask: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        e, h = self.channels, self.heads
        a, b, c, d = self.qkv, self.qkv_bias, self.out, self.out_bias
        first, averaged = torch._native_multi_head_attention(x, x, x, e, h, a, b, c, d, mask, True, True, kind)
        _, weights = torch._native_multi_head_attention(x, x, x, e, h, a, b, c, d, mask, True, False, kind)
        alone, _ = torch._native_multi_head_attention(x, x, x, e, h, a, b, c, d, mask, False, True, kind)
        return first, averaged, weights, alone

    def forward(self, x: Tensor, masks: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for mask, kind in zip(masks, (0, 0, 0, 1, 2)):  # noqa: B905  # TorchScript has no strict
            found += self.one(x, mask, kind)
        e, h = self.channels, self.heads
        bare = torch._native_multi_head_attention(x, x, x, e, h, self.qkv, self.qkv_bias, self.out, self.out_bias)
        q = x.unsqueeze(1)
        dot = torch.nn.functional.scaled_dot_product_attention
        found += [bare[0], bare[1], dot(q, q, q, scale=0.3), dot(q, q, q, is_causal=True), dot(q, q, q, masks[1])]
        return found


def masks_of(batch: int, length: int, heads: int) -> Masks:
    """Booleans, infinities with a row that is left out whole, finite numbers (which PyTorch's kernel takes for true), padding, and
    one of all axes."""
    random = torch.Generator().manual_seed(length)
    plain = torch.rand(length, length, generator=random) < 0.4
    plain[:, 0] = False
    empty = torch.zeros(length, length).masked_fill(plain, -math.inf)
    empty[-1] = -math.inf
    finite = torch.where(plain, -1.5, 0.0)
    padding = torch.arange(length).expand(batch, length) >= max(1, length - 2)
    whole = torch.rand(batch, heads, length, length, generator=random) < 0.5
    return plain, empty, finite, padding, whole


def compiled(model: nn.Module, *args: object) -> Callable[..., Sequence[Tensor]]:
    return lapilli.compile(model, args)


def scripted(model: nn.Module, *args: object) -> Callable[..., Sequence[Tensor]]:
    return lapilli.compile(torch.jit.script(model), args)


def eager(model: nn.Module, *args: object) -> Callable[..., Sequence[Tensor]]:
    on_device = type(model)(model.channels, model.heads) if isinstance(model, Heads) else model
    on_device.load_state_dict(model.state_dict())
    on_device.to("vulkan")

    def run(x: Tensor, masks: Masks) -> list[Tensor]:
        return [t.cpu() for t in on_device(x.to("vulkan"), tuple(m.to("vulkan") for m in masks))]

    return run


WAYS = pytest.mark.parametrize("way", [compiled, scripted, eager])


@pytest.mark.part(2)
@WAYS
@pytest.mark.parametrize("batch, length, channels, heads", [(2, 5, 6, 2), (1, 13, 15, 5)])
def test_masks(
    way: Callable[..., Callable[..., Sequence[Tensor]]], batch: int, length: int, channels: int, heads: int
) -> None:
    torch.manual_seed(length)
    model = Heads(channels, heads).eval()
    x, masks = torch.randn(batch, length, channels), masks_of(batch, length, heads)
    with torch.no_grad():
        wanted = model.double()(x.double(), tuple(m.double() if m.is_floating_point() else m for m in masks))
        model.float()
        found = way(model, x, masks)(x, masks)
    assert any(bool(t.isnan().any()) for t in wanted)  # rows that are left out whole
    for got, want in zip(found, wanted, strict=True):
        # Float32 sums of some tens of products of numbers up to about 30, and their exponentials.
        torch.testing.assert_close(got.double(), want, rtol=3e-4, atol=3e-4, equal_nan=True)


def traced(model: nn.Module, *args: Tensor) -> Callable[..., Sequence[Tensor]]:
    """PyTorch cannot script these layers."""
    return lapilli.compile(torch.jit.trace(model, args, check_trace=False), args)


@pytest.mark.parametrize("way, norm_first, activation", [(compiled, True, "gelu"), (traced, False, "relu")])
def test_encoder_layers(way: Callable[..., Callable[..., Tensor]], norm_first: bool, activation: str) -> None:
    """The layers of torch.nn, padded and with a mask of numbers, of odd sizes and batch first."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        12, 3, 17, dropout=0, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()
    x, padding = torch.randn(3, 7, 12), torch.arange(7).expand(3, 7) >= torch.tensor([[7], [5], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(7)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, padding: Tensor, causal: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x, src_key_padding_mask=padding), self.layer(x, causal)

    model = Both().eval()
    with torch.no_grad():
        wanted = model(x, padding, causal)
        found = way(model, x, padding, causal)(x, padding, causal)
        there = model.to("vulkan")(*(t.to("vulkan") for t in (x, padding, causal)))
    for got, on_device, want in zip(found, there, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(on_device.cpu(), want, rtol=1e-4, atol=1e-4)
