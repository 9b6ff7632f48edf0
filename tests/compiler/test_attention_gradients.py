"""Which kernels compute the gradients of attention, on devices that need not be there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapilli.attention_operators import ATTENTION_BACKWARD
from lapilli.capture import capture
from lapilli.codegen.attention_tiles import RowSizes, gradient_tiles
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import KNOWN, Target, of_device

H100 = of_device(KNOWN["h100"], half=True, matrix=True)
WITHOUT_UNITS = of_device(KNOWN["h100"], half=True, matrix=False)
KERNELS = ["attention_sums", "attention_gradient", "attention_gradient", "attention_gradient"]


class Gradients(nn.Module):
    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.options = causal, scale, False

    def forward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
        return list(ATTENTION_BACKWARD(grad, q, k, v, out, None, *self.options))


def kernels(
    sizes: tuple[int, ...], model: nn.Module, target: Target = H100, dtype: torch.dtype = torch.float16
) -> list[KernelSource]:
    given = (torch.empty(sizes, dtype=dtype),) * 5
    precision = "fp32" if dtype is torch.float32 else "fp16"
    s = schedule_of(lower(prepare(capture(model, given)), precision, True), target)
    made = write_all(s)
    return [made[t.out.id] for t in s.order.run]


@pytest.mark.parametrize("sizes", [(4, 12, 2048, 64), (1, 32, 4096, 128), (1, 2, 16, 8)])
def test_nothing_of_a_pair_of_tokens_is_stored(sizes: tuple[int, ...]) -> None:
    found = kernels(sizes, Gradients())
    assert [k.name for k in found] == ["row_sum" if sizes[-1] >= 16 else "reduce_sum", *KERNELS]


def test_the_sums_are_computed_once_and_strange_operands_copied_once() -> None:
    names = [k.name for k in kernels((2, 3, 40, 13), Gradients())]
    assert names.count("attention_sums") == 1
    assert names.count("map") == 4  # rows of 13 in lines of 16: queries, keys, values and the gradient of the result


@pytest.mark.parametrize("of", [0, 1], ids=["queries", "keys"])
def test_the_longest_rows_of_all_heads_come_first(of: int) -> None:
    found = [k for k in kernels((1, 12, 2048, 64), Gradients(causal=True)) if k.name == "attention_gradient"][of]
    assert [g.value for g in found.groups] == [12, 1, 32]
    assert "struct G" in found.source  # keys before the query need no comparison


@pytest.mark.parametrize(
    "why, sizes, target, dtype",
    [
        ("no matrix units", (1, 2, 64, 64), WITHOUT_UNITS, torch.float16),
        ("float32", (1, 2, 64, 64), H100, torch.float32),
        ("registers do not hold so wide rows", (1, 2, 64, 192), H100, torch.float16),
    ],
)
def test_others_are_whole_products(why: str, sizes: tuple[int, ...], target: Target, dtype: torch.dtype) -> None:
    names = [k.name for k in kernels(sizes, Gradients(), target, dtype)]
    assert not any(name.startswith("attention") for name in names), (why, names)
    assert sum(name.startswith("mat") for name in names) == 5


@pytest.mark.parametrize(
    "batch, rows, sizes, tile",
    [
        (48, 2048, (64, 64), "64 queries, 32 keys"),
        (48, 2048, (64,), "64 queries, 64 keys"),
        (32, 4096, (128, 128), "64 queries, 32 keys"),
        (8, 197, (64, 64), "32 queries, 32 keys"),
        (32, 2048, (80, 80), "32 queries, 32 keys"),  # 5 fragments are not shared out among more
        (1, 64, (256, 256), None),
    ],
)
def test_tiles(batch: int, rows: int, sizes: tuple[int, ...], tile: str | None) -> None:
    found = gradient_tiles(batch, rows, RowSizes(sizes), H100)
    assert (str(found[0]) if found else None) == tile
    assert len(set(found)) == len(found)
    assert all(RowSizes(sizes).shared(t) <= H100.shared_memory for t in found)
