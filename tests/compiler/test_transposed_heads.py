"""nn.MultiheadAttention and what is built of it turn batch and tokens around twice: no device copies a value for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapilli.capture import capture
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.select import schedule_of, write_all
from lapilli.ir.integer import Var, as_int, of
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.realize import invert
from lapilli.target import KNOWN, TARGETS, of_device


class Block(nn.Module):
    """As torchvision's vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("batch", [1, 6])
def test_no_copies(batch: int) -> None:
    for target in (of_device(KNOWN["h100"], half=True, matrix=True), TARGETS["gpu-fp32"], TARGETS["cpu-fp32"]):
        given = (torch.randn(batch, 50, 128),)
        graph = lower(prepare(capture(Block().eval(), given)), "fp16" if target.half else "fp32", target.half)
        s = schedule_of(graph, target)
        made = write_all(s)
        names = [made[t.out.id].name for t in s.order.run]
        norms = sum(isinstance(t.template, Tiles) and t.template.norms is not None for t in s.order.run)
        assert "map" not in names and len(names) + norms == 7, (target.name, names)


def test_a_reshape_of_transposed_axes_is_inverted() -> None:
    b, t, h, d = (Var(name, as_int(size)) for name, size in (("b", 6), ("t", 50), ("h", 4), ("d", 32)))
    m, k = Var("m", as_int(300)), Var("k", as_int(128))
    space = (b, h, t, d)
    found = invert((m, k), (of(m) % 6, of(k) // 32, of(m) // 6, of(k) % 32), [of(a) for a in space], space)
    assert found == {m: of(t) * 6 + of(b), k: of(h) * 32 + of(d)}
    turned = invert((b, t, k), (of(t) * 6 + of(b), of(k)), [of(m), of(k)], (m, k))
    assert turned == {b: of(m) % 6, t: of(m) // 6, k: of(k)}
    assert invert((m, k), (of(m) % 6, of(k) // 32, of(m) // 7, of(k) % 32), [of(a) for a in space], space) is None
