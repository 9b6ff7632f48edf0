"""Small models whose kernels, tiles and layouts golden tests pin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from agreement import Function

from lapilli.capture import capture
from lapilli.graph.module import Module
from lapilli.legalize.passes import prepare

decomposed = torch.ops.quantized_decomposed


def weight(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01)


def image(channels: int, size: int) -> torch.Tensor:
    return torch.zeros(1, channels, size, size)


class Layer(torch.nn.Module):
    """A layer of a language model, for one token: norms, rotations, grouped queries, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(512) for _ in range(2))
        shapes = {
            "q": (512, 512), "k": (128, 512), "v": (128, 512), "o": (512, 512), "gate": (1024, 512), "up": (1024, 512),
            "down": (512, 1024),
        }  # fmt: skip
        made = {n: torch.nn.Parameter(weight(*s), requires_grad=False) for n, s in shapes.items()}
        self.weights = torch.nn.ParameterDict(made)
        self.keys, self.values = (torch.nn.Buffer(torch.zeros(1, 2, 1024, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, 64)).transpose(1, 2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        y, w, place = self.norms[0](x), self.weights, torch.zeros(1, dtype=torch.int64)
        q, k, v = (heads(F.linear(y, w[name])) for name in "qkv")
        k, v = self.keys.index_copy_(2, place, turned(k)), self.values.index_copy_(2, place, v)
        attended = F.scaled_dot_product_attention(turned(q), k, v, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), w["o"])
        y = self.norms[1](x)
        return x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])


CASES: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
    "linear, one row": (Function(F.linear, weight(1024, 1024)), (torch.zeros(1, 1024),)),
    "linear, one row of 4 bits": (
        Function(
            lambda x, q, s: F.linear(x, ((q.to(s.dtype).reshape(1024, 32, 32) - 8) * s[..., None]).reshape(1024, 1024)),
            torch.arange(1 << 20).reshape(1024, 1024).remainder(16).to(torch.uint8), weight(1024, 32),
        ),
        (torch.zeros(1, 1024),),
    ),
    "linear, 128 rows": (Function(F.linear, weight(1024, 512)), (torch.zeros(128, 512),)),
    "product of 2048": (Function(torch.matmul, weight(2048, 2048)), (torch.zeros(2048, 2048),)),
    "gradient of a weight": (Function(lambda x, y: x.t() @ y), (torch.zeros(4096, 384), torch.zeros(4096, 1536))),
    "batch of products": (Function(torch.matmul), (torch.zeros(12, 64, 64), torch.zeros(12, 64, 64))),
    "first convolution": (Function(lambda x, w: F.conv2d(x, w, stride=2, padding=1), weight(32, 3, 3, 3)), (image(3, 64),)),
    "convolution": (Function(lambda x, w: F.conv2d(x, w, padding=1), weight(64, 64, 3, 3)), (image(64, 28),)),
    "pointwise convolution": (Function(F.conv2d, weight(96, 64, 1, 1)), (image(64, 28),)),
    "depthwise convolution": (Function(lambda x, w: F.conv2d(x, w, padding=1, groups=64), weight(64, 1, 3, 3)), (image(64, 28),)),
    "gradient of depthwise weights": (
        Function(
            lambda g, x: torch.ops.aten.convolution_backward(
                g, x, x.new_empty(64, 1, 3, 3), None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 64, [False, True, False]
            )[1]
        ),
        (image(64, 28), image(64, 28)),
    ),
    "attention, one query": (
        Function(F.scaled_dot_product_attention),
        (torch.zeros(1, 8, 1, 64), *(torch.zeros(1, 8, 2048, 64) for _ in range(2))),
    ),
    "attention": (Function(F.scaled_dot_product_attention), tuple(torch.zeros(1, 8, 197, 64) for _ in range(3))),
    "a token's attention and gate": (Layer(), (torch.zeros(1, 1, 512), torch.zeros(1, 32), torch.zeros(1, 32))),
    "softmax": (Function(lambda x: x.softmax(-1)), (torch.zeros(64, 512),)),
    "layer norm": (Function(lambda x, w: F.layer_norm(x, (512,), w), weight(512)), (torch.zeros(64, 512),)),
    "products of layer norms": (
        Function(
            lambda x, g, w, v: F.linear(F.layer_norm(x + F.linear(x, v), (512,), g), w),
            weight(512) + 1, weight(768, 512), weight(512, 512),
        ),
        (torch.zeros(64, 512),),
    ),
    "sum": (Function(lambda x: x.sum()), (torch.zeros(100_000),)),
    "map": (Function(lambda x: x.relu() * 2), (torch.zeros(7, 1000),)),
}  # fmt: skip


def codes(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits, as PT2E's graphs have them."""
    q = decomposed.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8)
    result: torch.Tensor = decomposed.dequantize_per_tensor(q, 0.1, 3, -128, 127, torch.int8)
    return result


def quantized(layer: Callable[..., torch.Tensor], *shape: int) -> Function:
    """A layer of two quantized operands whose result is quantized."""
    weights = torch.ones(shape, dtype=torch.int8), torch.full(shape[:1], 0.02), torch.zeros(shape[0], dtype=torch.int64)

    def f(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return codes(layer(codes(x), decomposed.dequantize_per_channel(q, s, z, 0, -127, 127, torch.int8)))

    return Function(f, *weights)


QUANTIZED: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
    "int8 linear, one row": (quantized(F.linear, 1024, 1024), (torch.zeros(1, 1024),)),
    "int8 linear, 128 rows": (quantized(F.linear, 1024, 512), (torch.zeros(128, 512),)),
    "int8 product of 2048": (quantized(F.linear, 2048, 2048), (torch.zeros(2048, 2048),)),
    "int8 first convolution": (quantized(lambda x, w: F.conv2d(x, w, stride=2, padding=1), 32, 3, 3, 3), (image(3, 64),)),
    "int8 convolution": (quantized(lambda x, w: F.conv2d(x, w, padding=1).relu(), 64, 64, 3, 3), (image(64, 28),)),
    "int8 pointwise convolution": (quantized(F.conv2d, 96, 64, 1, 1), (image(64, 28),)),
    "int8 depthwise convolution": (
        quantized(lambda x, w: F.conv2d(x, w, padding=1, groups=64), 64, 1, 3, 3), (image(64, 28),)
    ),
}  # fmt: skip


@cache
def prepared(name: str, half: bool) -> Module:
    if name in QUANTIZED:
        model, inputs = QUANTIZED[name]
        return prepare(capture(model.eval(), inputs))
    model, inputs = CASES[name]
    dtype = torch.float16 if half else torch.float32
    return prepare(capture(model.to(dtype).eval(), tuple(x.to(dtype) for x in inputs)))
