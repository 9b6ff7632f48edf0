"""Keys and values of the tokens so far, in pages: states of a program, which calls change (after Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapilli.llm.cache_size import CacheSize

Places = tuple[Tensor, Tensor]
"""Where tokens lie: the numbers of their pages [n], and which tokens of these pages they are [n]."""


class PagedCache(nn.Module):
    """Keys and values of a layer: [pages, heads, tokens of a page, size]."""

    def __init__(self, size: CacheSize, heads: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        shape = size.pages + size.spare, heads, size.page, width
        self.keys, self.values = (nn.Buffer(torch.zeros(shape, dtype=dtype), persistent=False) for _ in range(2))

    def keep(self, places: Places, keys: Tensor, values: Tensor) -> None:
        """Keeps those of tokens, [heads, n, size] each."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[places[0], :, places[1]] = new.transpose(0, 1)

    def read(self, pages: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of n sequences, [n, heads, tokens, size] each; pages: theirs, [n, pages]; None: the only one's."""
        if pages is None:
            return self.keys, self.values
        k, v = (cache[pages].transpose(1, 2).flatten(2, 3) for cache in (self.keys, self.values))
        return k, v

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies pages source [n] to pages target [n]."""
        for cache in (self.keys, self.values):
            cache[target] = cache[source]


class PageTable(nn.Module):
    """Which pages each line has: [lines, pages of a line]. At first they are those of a cache with room for all."""

    def __init__(self, size: CacheSize) -> None:
        super().__init__()
        self.size = size
        if size.is_paged:
            pages = torch.arange(size.lines * size.most).view(size.lines, size.most)
            self.table = nn.Buffer(pages.clamp(max=size.pages), persistent=False)
        self.tokens = nn.Buffer(torch.arange(size.most * size.page))

    def of(self, line: Tensor) -> Tensor | None:
        """The pages of lines [n]: [n, pages]; None: there is but one."""
        return self.table.index_select(0, line) if self.size.is_paged else None

    def places(self, line: Tensor, positions: Tensor) -> Places:
        """Where tokens at positions [n] of lines [n] or [1] lie."""
        if not self.size.is_paged:
            return torch.zeros_like(positions), positions
        return self.table[line, positions // self.size.page], positions % self.size.page

    def lay(self, line: Tensor, pages: Tensor) -> None:
        """Sets the pages int64 [pages of a line] of a line int64 [1]."""
        self.table.index_copy_(0, line, pages[None])
