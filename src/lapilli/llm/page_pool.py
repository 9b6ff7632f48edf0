"""Which pages of a cache are taken: a page that several sequences begin with alike is there once."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 0 to count - 1. Whoever holds a page alone may write into it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A page that nobody holds; None: there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> list[int]:
        """The same pages for one more holder."""
        found = list(pages)
        for page in found:
            self._holders[page] += 1
        return found

    def release(self, pages: Iterable[int]) -> None:
        """One holder of each page less."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several hold it."""
        return self._holders[page] > 1
