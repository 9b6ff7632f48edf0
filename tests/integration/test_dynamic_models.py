"""Models with several sizes that are known only when they run: at the lower bounds, at the upper bounds, and between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import lapilli

HALF_BOUND = 5e-3  # of the models below, whose weights and intermediates are rounded to 11 bits
PLANS = [
    pytest.param("any-fp32", "fp32", marks=pytest.mark.poor_device),
    ("cpu-fp32", "fp32"),
    ("gpu-fp32", "fp32"),
    ("cpu-fp16", "fp16"),
    ("gpu-fp16", "fp16"),
]


@dataclass(frozen=True)
class Case:
    """inputs: what goes in for given sizes; dims: the Dims of every input; sizes: of runs in turn; the second traces."""

    model: Callable[[], nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]
    dims: tuple[Any, ...]
    sizes: Sequence[tuple[int, ...]]


class Attention(nn.Module):
    """Four heads, then a residual and a norm."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.norm(x + self.out(y.transpose(1, 2).flatten(2)))


class Transformer(nn.Module):
    """Token ids [batch, length] to scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(40, 32)
        self.blocks = nn.Sequential(Attention(32, True), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), Attention(32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.blocks(x) @ self.tokens.weight.T


class ViT(nn.Module):
    """Patches of 14: the number of tokens is (h // 14) * (w // 14), and the positions are resampled for it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, 32, 14, 14), Attention(32), nn.Linear(32, 10)
        self.positions = nn.Parameter(torch.randn(1, 32, 4, 4))

    def forward(self, image: Tensor) -> Tensor:
        size = (image.shape[2] // 14, image.shape[3] // 14)
        x = self.patches(image) + F.interpolate(self.positions, size=size, mode="bilinear")
        return self.head(self.block(x.flatten(2).transpose(1, 2)).mean(1))


class Mixer(nn.Module):
    """Mixes a fixed number of pooled tokens, then their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.tokens, self.channels = nn.Linear(12, 12), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, image: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.stem(image), (3, 4)).flatten(2)
        x = x + F.gelu(self.tokens(x))
        return x.transpose(1, 2) + F.gelu(self.channels(self.norm(x.transpose(1, 2))))


class UNet(nn.Module):
    """Strided convolution and pooling down, two kinds of upsampling up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(19, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down(x))
        b = F.avg_pool2d(F.max_pool2d(self.middle(a), 2), 3, 1, 1)
        smooth = F.interpolate(b, size=x.shape[2:], mode="bilinear")
        learned = F.interpolate(self.up(b), size=x.shape[2:])
        return self.last(torch.cat([x, smooth, learned], 1))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape)


def rows(x: Tensor) -> tuple[Tensor, ...]:
    """What is computed over whole rows, and of rows among each other."""
    n = x.shape[-1]
    return (
        x.softmax(-1),
        F.layer_norm(x, (n,)) * 2,
        x.log_softmax(0),
        (x - x.mean(-1, True)).square().mean(-1),
        x.amax(0),
    )


def ordered(keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Sorting, scans, gathers and scatters of rows of a dynamic length."""
    order = keys.argsort(stable=True, dim=1)
    taken = values.gather(1, order)
    counts = torch.zeros(keys.shape[0], 50, dtype=torch.int64).scatter_add(1, keys, torch.ones_like(keys))
    sums = torch.zeros(50).index_add(0, keys.flatten(), values.flatten())
    return keys.sort(1).values, taken.cumsum(1), counts, sums, values.max(1).indices, values.flip(1)


def scaled(x: Tensor) -> tuple[Tensor, ...]:
    """Sizes that torch says as int(1.5 * h)."""
    return F.interpolate(x, scale_factor=1.5), F.interpolate(x, scale_factor=(0.25, 1.25), mode="bilinear")


def joined(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = torch.cat([x, y * 2, x])
    return z.softmax(0), torch.cat([z, z.flip(0)], 1).reshape(-1), F.pad(z, (0, 0, 1, 2)), x @ y.T


def derived(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """x has 2 n + 1 rows, y has n."""
    return (
        (x[1:] + torch.cat([y, y])).softmax(0),
        F.max_pool2d(x.T[None], (1, 2)),
        x.flatten() * x.shape[0],
        x[::2].sum(0),
    )


def pairs(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """x has 4 n elements."""
    return x.reshape(-1, 4) @ w, x.view(2, -1).softmax(1), x.view(-1, 2).flip(1).flatten()


def merged(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    n, m, c = x.shape
    flat = x.reshape(n * m, c) @ w
    return flat.reshape(n, m, -1).mean(1), flat.softmax(0), x.permute(1, 0, 2).reshape(m, n * c), flat.view(-1)


batch, length, height, width = (Dim("batch", min=1, max=3), Dim("length", min=1, max=33), Dim("height", min=28, max=71),
                                Dim("width", min=28, max=71))  # fmt: skip
n, m, half = Dim("n", min=1, max=17), Dim("m", min=1, max=9), Dim("half", min=1, max=20)
IMAGES = ((1, 28, 28), (2, 42, 56), (3, 71, 71), (1, 29, 70), (3, 43, 33), (1, 28, 28), (2, 71, 28))
TEXTS = ((1, 1), (2, 6), (3, 33), (1, 17), (2, 2), (3, 7), (1, 33), (1, 1))
PAIRS = ((1, 1), (3, 4), (17, 9), (2, 7), (11, 1), (1, 9), (17, 9))
HALVES = ((1,), (4,), (20,), (7,), (2,), (13,), (1,))
IMAGE = {0: batch, 2: height, 3: width}

CASES = {
    "transformer": Case(Transformer, lambda b, n: (ids(b, n),), ({0: batch, 1: length},), TEXTS),
    "vit": Case(ViT, lambda b, h, w: (torch.randn(b, 3, h, w),), (IMAGE,), IMAGES),
    "mixer": Case(Mixer, lambda b, h, w: (torch.randn(b, 3, h, w),), (IMAGE,), IMAGES),
    "unet": Case(UNet, lambda b, h, w: (torch.randn(b, 3, h, w),), (IMAGE,), IMAGES),
    "scaled": Case(lambda: Function(scaled), lambda b, h, w: (torch.randn(b, 3, h, w),), (IMAGE,), IMAGES),
    "rows": Case(lambda: Function(rows), lambda b, n: (torch.randn(b, n),), ({0: batch, 1: length},), TEXTS),
    "ordered": Case(
        lambda: Function(ordered),
        lambda b, n: (ids(b, n), torch.randn(b, n)),
        ({0: batch, 1: length}, {0: batch, 1: length}),
        TEXTS,
    ),
    "joined": Case(lambda: Function(joined), lambda n, m: (torch.randn(n, 6), torch.randn(m, 6)), ({0: n}, {0: m}), PAIRS),
    "merged": Case(lambda: Function(merged), lambda n, m: (torch.randn(n, m, 4), W), ({0: n, 1: m}, None), PAIRS),
    "derived": Case(
        lambda: Function(derived), lambda n: (torch.randn(2 * n + 1, 3), torch.randn(n, 3)), ({0: 2 * half + 1}, {0: half}),
        HALVES,
    ),
    "multiple": Case(lambda: Function(pairs), lambda n: (torch.randn(4 * n), W), ({0: 4 * half}, None), HALVES),
}  # fmt: skip
torch.manual_seed(0)
W = torch.randn(4, 5)


@pytest.mark.parametrize("target, precision", PLANS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.part(6)
def test_sizes_in_changing_order(name: str, target: str, precision: Any, gpu_plans: None) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model = case.model().eval()
    shapes = (case.dims,) if isinstance(model, Function) else case.dims
    program = lapilli.compile(
        model, case.inputs(*case.sizes[1]), dynamic_shapes=shapes, target=target, precision=precision, fallback="error"
    )
    assert len(program.description.methods[0].inputs) == len(
        program.inputs
    )  # none for sizes: each is read from a tensor
    bound = FLOAT_BOUND if precision == "fp32" else HALF_BOUND
    for sizes in case.sizes:
        inputs = case.inputs(*sizes)
        with torch.no_grad():
            want, got = model(*inputs), program(*inputs)
        for theirs, ours in zip(*((x if isinstance(x, tuple) else (x,)) for x in (want, got)), strict=True):
            assert ours.dtype == theirs.dtype
            if theirs.is_floating_point():
                assert relative_error(ours, theirs) <= bound, sizes
            else:
                assert torch.equal(ours, theirs), sizes


def test_sizes_rounded_from_floats_are_refused() -> None:
    """Integers cannot say what 1.7 * n is rounded to."""
    model = Function(lambda x: F.interpolate(x, scale_factor=1.7))
    with pytest.raises(lapilli.CompileError, match=r"1\.7.* is rounded from a float"):
        lapilli.compile(model, (torch.randn(2, 3, 40, 40),), dynamic_shapes=((IMAGE,),), target="any-fp32")
