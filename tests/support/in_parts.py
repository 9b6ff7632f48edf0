"""Tests with many like cases, of which a run takes a part: `@pytest.mark.part(3)` is a third of them, and at least one.

Without that mark, more than MANY cases of a function that compiles for a device are halved; `part(1)` takes all. The cases are
chosen by a hash of their names, so that they are the same in each run. LAPILLI_TEST_ALL=1 takes all of them, and `make test-all`
sets it."""

from __future__ import annotations

from collections import defaultdict
from zlib import crc32

import pytest

MANY = 8
"""Cases that a run takes whole."""

COMPILING = ("tests/conformance/", "tests/integration/")


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of the cases that this run does not take."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("part")
        if mark or item.nodeid.startswith(COMPILING):
            cases[item.nodeid.partition("[")[0], mark.args[0] if mark else 0].append(item)
    result = []
    for (_, of), like in cases.items():
        like.sort(key=lambda item: (crc32(item.nodeid.encode()), item.nodeid))
        taken = -(-len(like) // of) if of else max(MANY, -(-len(like) // 2))
        result += like[taken:]
    return result
