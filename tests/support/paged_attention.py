"""Attention whose keys and values lie in pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Paged(nn.Module):
    """Attention of lines, each with a row of a table. two: values have another one. first, end: the places that are read, None: to
    the last one. nested: an even number of lines is two dimensions.
    """

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
        first: int = 0,
        end: int | None = None,
        nested: bool = False,
    ) -> None:
        super().__init__()
        dtype = torch.float16 if half else torch.float32
        self.keys, self.values = (nn.Buffer(torch.randn(pages, heads, page, n).to(dtype)) for n in (size, width))
        self.table = nn.Buffer(torch.randint(0, pages, (lines, most)))
        self.other = nn.Buffer(torch.randint(0, pages, (lines, most))) if two else self.table
        self.places = nn.Buffer(torch.arange(first, end or most * page))
        self.first, self.end, self.nested = first, end, nested

    def forward(self, q: Tensor, line: Tensor, last: Tensor, key: Tensor, at: Tensor) -> Tensor:
        """q: [lines, heads, n, size]; last: the place that each line's last query sees last; key: written at a place."""
        page = self.keys.shape[2]
        self.keys[at // page, :, at % page] = key
        self.values[at // page, :, at % page] = key[..., :1]
        outer = (2, len(line) // 2) if self.nested and len(line) % 2 == 0 else (len(line),)
        k, v = (
            cache[table[line.view(outer)]].transpose(-4, -3).flatten(-3, -2)[..., self.first : self.end, :]
            for cache, table in ((self.keys, self.table), (self.values, self.other))
        )
        mask = self.places <= (last[:, None] - torch.arange(q.shape[2] - 1, -1, -1, device=q.device))[..., None]
        queries, mask = q.view(*outer, *q.shape[1:]), mask[:, None].view(*outer, 1, *mask.shape[1:])
        found = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[-3])
        return found.flatten(0, -4)


def arguments(m: Paged, lines: int, share: int, queries: int) -> tuple[Tensor, ...]:
    pages, heads, page, size = m.keys.shape
    chosen = torch.randperm(len(m.table))[:lines]
    last = torch.randint(m.first + queries - 1, m.first + len(m.places), (lines,))
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
