"""Keys and values in pages of a cache are read where they are, by every kernel of attention, and the results are torch's."""

from __future__ import annotations

import random

import as_gpu
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import KNOWN, TARGETS, Target, of_device

FAST = {"attention", "attention_few", "attention_matrix"}


class Paged(nn.Module):
    """Attention of lines, each with a row of a table. What no line sees yet is NaN."""

    def __init__(
        self,
        pages: int,
        heads: int,
        page: int,
        size: int,
        width: int,
        lines: int,
        most: int,
        half: bool,
        two: bool = False,
    ) -> None:
        super().__init__()
        dtype = torch.float16 if half else torch.float32
        self.keys, self.values = (nn.Buffer(torch.randn(pages, heads, page, n).to(dtype)) for n in (size, width))
        self.table = nn.Buffer(torch.randint(0, pages, (lines, most)))
        self.other = nn.Buffer(torch.randint(0, pages, (lines, most))) if two else self.table
        self.places = nn.Buffer(torch.arange(most * page))

    def forward(self, q: Tensor, line: Tensor, last: Tensor, key: Tensor, at: Tensor) -> Tensor:
        """q: [lines, heads, n, size]; last: the place that each line's last query sees last; key: written at a place."""
        page = self.keys.shape[2]
        self.keys[at // page, :, at % page] = key
        self.values[at // page, :, at % page] = key[..., :1]
        k, v = (
            cache[table.index_select(0, line)].transpose(1, 2).flatten(2, 3)
            for cache, table in ((self.keys, self.table), (self.values, self.other))
        )
        mask = self.places <= (last[:, None] - torch.arange(q.shape[2] - 1, -1, -1))[..., None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=q.shape[1] != k.shape[1])


def arguments(m: Paged, lines: int, share: int, queries: int) -> tuple[Tensor, ...]:
    pages, heads, page, size = m.keys.shape
    chosen = torch.randperm(len(m.table))[:lines]
    last = torch.randint(queries - 1, len(m.places), (lines,))
    q, key = torch.randn(lines, heads * share, queries, size), torch.randn(1, heads, size)
    return q.to(m.keys.dtype), chosen, last, key.to(m.keys.dtype), torch.randint(0, pages * page, (1,))


def hidden(m: Paged, given: tuple[Tensor, ...]) -> None:
    """Makes NaN of what the lines do not see."""
    page, seen = m.keys.shape[2], set[tuple[int, int]]()
    for line, last in zip(given[1].tolist(), given[2].tolist(), strict=True):
        seen |= {(int(m.table[line, n // page]), n % page) for n in range(last + 1)}
    for number in range(len(m.keys)):
        for n in range(page):
            if (number, n) not in seen:
                m.keys[number, :, n] = m.values[number, :, n] = torch.nan


@pytest.mark.part(2)
@pytest.mark.parametrize("seed", range(24))
def test_random_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    r, _ = random.Random(seed), torch.manual_seed(seed)
    half, page, most = r.random() < 0.4, r.choice([1, 3, 16, 64]), r.randint(1, 6)
    size, width = (r.choice([8, 32, 64]) for _ in range(2))
    m = Paged(r.randint(most, 20), r.choice([1, 3]), page, size, width, 5, most, half, two=r.random() < 0.1)
    queries = r.choice([n for n in (1, 2, 5, 40) if n <= page * most])
    given = arguments(m, r.choice([1, 4]), r.choice([1, 2]), queries)
    target = "gpu-fp16" if half else r.choice(["cpu-fp32", "gpu-fp32", "any-fp32"])
    if m.other is m.table and page > 1 and target != "any-fp32":  # else all is copied, or multiplied by weights of zero
        hidden(m, given)
    with lapilli.compile(m, given, target=target, precision="fp16" if half else "fp32", fallback="error") as p:
        found = p(*given)
    # NaN times a weight of zero is NaN in torch; a key that is not seen is not read here
    m.keys.nan_to_num_()
    m.values.nan_to_num_()
    wanted = m.double()(given[0].double(), *given[1:3], given[3].double(), given[4])
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < (3e-3 if half else 3e-6), (target, m.keys.shape, given[0].shape)


def kernels(m: Paged, given: tuple[Tensor, ...], target: Target) -> list[str]:
    s = schedule_of(lower(prepare(capture(m.eval(), given)), "fp16" if target.half else "fp32", target.half), target)
    made = write_all(s)
    return [made[t.out.id].name for t in s.order.run]


@pytest.mark.parametrize("lines, queries", [(1, 1), (8, 1), (1, 40), (8, 40)])
def test_nothing_is_copied(lines: int, queries: int) -> None:
    """Besides what keeps the new key and value there is one kernel, whatever the device, and what zeroes its counters."""
    targets = [
        TARGETS["cpu-fp32"],
        TARGETS["gpu-fp32"],
        TARGETS["gpu-fp16"],
        of_device(KNOWN["h100"], half=True, matrix=True),
    ]
    for target in targets:
        m = Paged(12, 3, 64, 64, 64, 9, 4, target.half)
        names = kernels(m, arguments(m, lines, 2, queries), target)
        assert len(FAST & {*names}) == 1 and len(names) <= 4, (target.name, names)


def test_whole_lines_of_a_cache_are_not_copied() -> None:
    """As a decoder reads what an encoder gave for each of its sequences."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.values = (nn.Buffer(torch.randn(5, 3, 33, 32)) for _ in range(2))

        def forward(self, q: Tensor, line: Tensor) -> Tensor:
            self.keys[0, 0, 0, 0] = self.values[0, 0, 0, 0] = 1.0
            return F.scaled_dot_product_attention(q, self.keys[line], self.values.index_select(0, line))

    given = torch.randn(4, 3, 2, 32), torch.tensor([4, 0, 0, 2])
    with lapilli.compile(Given().eval(), given, target="cpu-fp32") as p:
        plan = p.description.methods[0].plans[0]
        assert [d.kernel for d in plan.run if d.kernel != "map"] == ["attention"]
