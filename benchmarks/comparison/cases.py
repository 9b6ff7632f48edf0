"""Operators that backends are known to get wrong, and dtypes, as modules with their inputs, so that systems that compile can take
part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """make: the module and its inputs, the same at every call."""

    make: Callable[[], tuple[nn.Module, Inputs]]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*inputs)


def _call(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Callable[[], Inputs]) -> Case:
    def make() -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        return Call(function), inputs()

    return Case(make)


def _normal(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _symmetric() -> Inputs:
    a = torch.randn(12, 12)
    return (a + a.T,)


def _eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and the matrix put together again: eigenvectors are not unique."""
    values, vectors = torch.linalg.eigh(a)
    return values, vectors @ torch.diag(values) @ vectors.mT


def _sdpa(causal: bool = False, scale: float | None = None) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)

    return attention


def _attention(mask: str = "") -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        qkv = (torch.randn(2, 4, 17, 20), torch.randn(2, 4, 23, 20), torch.randn(2, 4, 23, 20))
        if mask == "bool":
            chosen = torch.rand(2, 1, 17, 23) > 0.3
            chosen[1, 0, 3] = False  # a query that may look at nothing
            return *qkv, chosen
        return (*qkv, torch.randn(2, 4, 17, 23)) if mask else qkv

    return inputs


def _written_window(x: Tensor) -> Tensor:
    y = x.clone()
    y.as_strided((3,), (7,), 2).mul_(-3)
    y.t()[1:3, ::2].add_(1)
    return y


def _matrix() -> Inputs:
    return (torch.arange(48.0).reshape(6, 8) + 1,)


def _large() -> Inputs:
    return (torch.tensor([2**40 + 3, -(2**35), 5, 2**62], dtype=torch.int64),)


WRONG_ELSEWHERE = {
    "grouped convolution, 3 channels a group": _call(
        lambda x, w: F.conv2d(x, w, groups=2), _normal((1, 6, 9, 9), (8, 3, 3, 3))
    ),
    "grouped convolution, 5 channels a group": _call(
        lambda x, w: F.conv2d(x, w, groups=3, padding=1), _normal((2, 15, 9, 9), (9, 5, 3, 3))
    ),
    "depthwise convolution, 3 filters a channel": _call(
        lambda x, w: F.conv2d(x, w, groups=6), _normal((2, 6, 9, 9), (18, 1, 3, 3))
    ),
    "grouped transposed convolution": _call(
        lambda x, w: F.conv_transpose2d(x, w, groups=2, stride=2), _normal((1, 6, 9, 9), (6, 3, 3, 3))
    ),
    "two convolutions that differ in their filters' number": _call(
        lambda x, a, b: (F.conv2d(x, a), F.conv2d(x, b)), _normal((1, 16, 9, 9), (24, 16, 1, 1), (32, 16, 1, 1))
    ),
    "GELU, exact": _call(F.gelu, lambda: (torch.linspace(-6, 6, 1001),)),
    "attention": _call(_sdpa(), _attention()),
    "attention, causal, 17 × 23": _call(_sdpa(causal=True), _attention()),
    "attention, bool mask, one row empty": _call(_sdpa(), _attention("bool")),
    "attention, float mask, own scale": _call(_sdpa(scale=0.3), _attention("float")),
    "attention, grouped queries": _call(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        _normal((1, 8, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)),
    ),
    "eigh": _call(_eigh, _symmetric),
    "as_strided, windows that overlap": _call(lambda x: x.as_strided((10, 5), (2, 1), 1) + 0, _matrix),
    "as_strided of a view": _call(lambda x: x[1:, 2:].as_strided((2, 3), (6, 2)) + 0, _matrix),
    "writes through views": _call(_written_window, _matrix),
    "int64 indices: gather, index_put, embedding": _call(
        lambda x, i: (x.gather(1, i), x.index_put((i[:, 0],), x[:1], accumulate=True), F.embedding(i, x)),
        lambda: (torch.randn(6, 6), torch.randint(0, 6, (6, 6))),
    ),
    "int64 beyond 2³²: arithmetic, sort, cumsum": _call(
        lambda x: (x * 3 + x // 7 - x % 11, x.sort()[0], x.cumsum(0)), _large
    ),
    "int64 beyond 2³²: arange": _call(
        lambda x: torch.arange(2**33, 2**33 + 4, device=x.device) + torch.zeros_like(x), _large
    ),
    "softmax of large numbers": _call(lambda x: torch.softmax(x * 100, -1), _normal((7, 33))),
    "remainder and floor division": _call(
        lambda x: (torch.remainder(x, -0.7), x // 0.3), lambda: (torch.linspace(-6, 6, 1001),)
    ),
}
"""Cases that systems of this table, or others of their kind, have been reported or seen to get wrong."""


DTYPES = {
    **{
        str(dtype).removeprefix("torch."): _call(
            lambda a, b: (a @ b + a, (a * 3).sum(0)), lambda dtype=dtype: (torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype))
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    },
    **{
        str(dtype).removeprefix("torch."): _call(
            lambda a, b: (a * 3 + b, a.sum(0), a < b),
            lambda dtype=dtype: (torch.randint(0, 20, (8, 8)).to(dtype), torch.randint(0, 20, (8, 8)).to(dtype)),
        )
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    },
    "bool": _call(lambda a, b: (a & ~b, a.any(0)), lambda: (torch.rand(8, 8) > 0.5, torch.rand(8, 8) > 0.5)),
    "complex64": _call(
        lambda a, b: (a * b + a, a.sum(0)), lambda: (torch.randn(8, 8) + 1j * torch.randn(8, 8), torch.randn(8, 8) * 1j)
    ),
}  # fmt: skip
