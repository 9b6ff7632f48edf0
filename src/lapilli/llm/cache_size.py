"""How large the cache of a language model is, and how it is divided: what its program and who runs it must agree on."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 64
"""Tokens whose keys and values lie together. Attention takes tiles of so many or fewer."""


@dataclass(frozen=True)
class CacheUse:
    """tokens: whose keys and values there is room for. tokens_held: those of answers, and of what ended ones left, in whole pages.
    waits_total: how often an answer gave its pages to an older one, and read its tokens again.
    """

    tokens: int
    tokens_held: int
    waits_total: int


@dataclass(frozen=True)
class CacheSize:
    """sequences: how many are written at once. context: the tokens of the longest. tokens: of all together, None: room for all.

    Keys and values lie in pages, and a table says which ones a sequence has: its line. A single sequence has one page. Of more,
    there is a line and a page that nobody reads, for rows that are computed in vain.
    """

    sequences: int
    context: int
    tokens: int | None = None

    @property
    def is_paged(self) -> bool:
        """Whether there is a table."""
        return self.sequences > 1

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return min(PAGE, self.context) if self.is_paged else self.context

    @property
    def most(self) -> int:
        """Pages of a sequence at most."""
        return self.count(self.context)

    @property
    def pages(self) -> int:
        """Pages of all sequences together."""
        return self.sequences * self.most if self.tokens is None else self.count(self.tokens)

    @property
    def is_enough(self) -> bool:
        """Whether one sequence fits, and no more is asked for than all can fill."""
        return self.tokens is None or self.context <= self.tokens <= self.sequences * self.context

    @property
    def spare(self) -> int:
        """Pages, and lines, for rows that are computed in vain."""
        return int(self.is_paged)

    @property
    def lines(self) -> int:
        """Rows of the table, and of all other states that sequences have."""
        return self.sequences + self.spare

    def count(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page)
