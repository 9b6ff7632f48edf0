"""How attention on matrix units is shared out, on devices that need not be there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapilli.capture import capture
from lapilli.codegen.attention_tiles import attention_tiles
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import KNOWN, of_device

H100 = of_device(KNOWN["h100"], half=True, matrix=True)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "heads, tokens, groups",
    [(12, 4096, (12, 1, 64)), (32, 2048, (32, 1, 32)), (2048, 512, (8, 1, 2048))],
    ids=["few heads", "few rounds", "many heads"],
)
def test_the_longest_rows_of_all_heads_come_first(heads: int, tokens: int, groups: tuple[int, ...]) -> None:
    """Unless there are so many that they would not share keys and values in the cache."""
    given = [torch.empty(1, heads, tokens, 64, dtype=torch.float16)] * 3
    s = schedule_of(lower(prepare(capture(Causal(), tuple(given))), "fp16", True), H100)
    made = write_all(s)
    kernels = [made[t.out.id] for t in s.order.run]
    (found,) = [k for k in kernels if k.name == "attention_matrix"]
    assert tuple(g.value for g in found.groups) == groups
    assert "struct G" in found.source  # keys before the query need no comparison


@pytest.mark.parametrize(
    "batch, rows, size, tile",
    [
        (12, 4096, 64, "64 queries, 32 keys"),
        (32, 2048, 128, "128 queries, 64 keys"),
        (12, 197, 64, "32 queries, 32 keys"),
        (1, 2048, 128, "32 queries, 32 keys"),
    ],
)
def test_tiles(batch: int, rows: int, size: int, tile: str) -> None:
    """The largest of which every compute unit has one; 128 queries where registers leave one work group to a unit anyway."""
    assert str(attention_tiles(batch, rows, size, size, H100)[0]) == tile
