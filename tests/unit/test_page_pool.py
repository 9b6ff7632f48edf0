"""Who holds pages of a cache."""

from __future__ import annotations

import random
from collections import Counter

from lapilli.llm.cache_size import CacheSize
from lapilli.llm.page_pool import PagePool


def test_a_page_is_free_when_nobody_holds_it() -> None:
    """Random holders against a plain count."""
    r = random.Random(0)
    pool, holders = PagePool(13), [list[int]() for _ in range(5)]
    for _ in range(5000):
        own = r.choice(holders)
        match r.randrange(3):
            case 0:
                page = pool.take()
                assert (page is None) == (len({p for h in holders for p in h}) == 13)
                assert page is None or all(page not in h for h in holders)
                own += [page] if page is not None else []
            case 1:
                own += pool.share(p for p in r.choice(holders)[: r.randrange(4)] if p not in own)
            case _:
                count = r.randrange(len(own) + 1)
                pool.release(own[count:])
                del own[count:]
        counts = Counter(p for h in holders for p in h)
        assert pool.free == 13 - len(counts)
        assert all(pool.is_shared(p) == (n > 1) for p, n in counts.items())


def test_sizes_of_caches() -> None:
    one, many, less = CacheSize(1, 100), CacheSize(4, 100), CacheSize(4, 100, 200)
    assert (one.page, one.most, one.pages, one.lines, one.is_paged) == (100, 1, 1, 1, False)
    assert (many.page, many.most, many.pages, many.lines, many.is_paged) == (64, 2, 8, 5, True)
    assert (less.most, less.pages) == (2, 4)
    assert (CacheSize(2, 10).page, CacheSize(2, 10).pages) == (10, 2)
    assert CacheSize(3, 128, 128).pages == 2  # one sequence fits at least
