"""Attention in 16 bits, of any sizes, masks and layouts: on matrix units by each of their tiles, and on devices without halves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import random_attention
import torch
import torch.nn.functional as F
from agreement import relative_error
from torch import Tensor, nn

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")


@pytest.mark.part(10)
@pytest.mark.parametrize("seed", random_attention.NARROW)
def test_random_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_attention.check(seed, random_attention.plan_of(seed, monkeypatch.setitem), 2**20)


@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
@pytest.mark.parametrize("seed", random_attention.NARROW[::4])
def test_halves_on_devices_without_them(seed: int, target: str) -> None:
    """Results that share words are copied into them: attention is one kernel all the same."""
    c = random_attention.case(seed, 2**18)
    fits = target == "gpu-fp32" or (c.size % 4 == c.width % 4 == 0)
    names = random_attention.check(seed, target, 2**18)
    assert names[0].startswith("attention") or not fits


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def computed(x: Tensor) -> Tensor:
    return x * 0.5


def packed(x: Tensor) -> list[Tensor]:
    return [turned(part.unflatten(-1, (2, 16))) for part in x.chunk(3, -1)]


HEADS, TOKENS = (1, 2, 19, 16), (1, 19, 2, 16)
READ: dict[str, tuple[Callable[..., list[Tensor]], list[tuple[int, ...]], int]] = {  # copies that a host makes
    "keys and values turned": (lambda q, k, v: [computed(q), turned(k), turned(v)], [HEADS, TOKENS, TOKENS], 2),
    "keys and values as they are": (lambda q, k, v: [computed(q), k, v], [HEADS] * 3, 2),
    "queries turned": (lambda q, k, v: [turned(q), computed(k), computed(v)], [TOKENS, HEADS, HEADS], 1),
    "all turned": (lambda q, k, v: [turned(q), turned(k), turned(v)], [TOKENS] * 3, 3),
    "all as they are": (lambda q, k, v: [q, k, v], [HEADS] * 3, 3),
    "parts of one": (packed, [(1, 19, 96)], 1),
    "parts that begin anywhere": (lambda q, k: [q[..., 1:], k[..., 3:19], k[..., 5:21]], [(1, 2, 19, 17), (1, 2, 19, 23)], 0),
    "keys also read as they are": (lambda q, k, v: [q, k + k[:, :1], k[:, 1:].expand(HEADS)], [HEADS] * 3, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_half_precision_reads_inputs_in_float32(name: str) -> None:
    """Matrix units multiply halves: inputs are rounded to them, once, however attention sees them."""
    torch.manual_seed(0)
    read, shapes, rounded = READ[name]

    class Attends(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            q, k, v = read(*inputs)
            return F.scaled_dot_product_attention(q, k, v)

    given = tuple(torch.randn(shape) for shape in shapes)
    with lapilli.compile(Attends(), given, precision="fp16", target="gpu-fp16-matrix", fallback="error") as program:
        commands = program.description.methods[0].plans[0].run
        result = program(*given)
    assert [d.kernel for d in commands].count("attention_matrix") == 1
    assert sum(d.rounds_input for d in commands) == rounded
    exact = Attends()(*(x.double() for x in given))
    assert relative_error(result, exact) <= 2**-10


class Caches(nn.Module):
    """Keys and values that it keeps from run to run, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Buffer(torch.zeros(2, *TOKENS))

    def forward(self, q: Tensor, new: Tensor) -> Tensor:
        self.kept[:, :, 2:] = new
        k, v = (turned(x) for x in self.kept)
        return F.scaled_dot_product_attention(computed(q), k, v)


def test_half_precision_reads_caches_in_float32() -> None:
    """They keep their type between runs, and are not copied."""
    torch.manual_seed(0)
    given = torch.randn(HEADS), torch.randn(2, 1, 17, 2, 16)
    with lapilli.compile(Caches(), given, precision="fp16", target="gpu-fp16-matrix", fallback="error") as program:
        result = program(*given)
    exact = Caches().double()(*(x.double() for x in given))
    assert relative_error(result, exact) <= 2**-10
