"""Tests with many like cases, of which a run takes a part: `@pytest.mark.part(3)` is a third of them, and at least one.

The cases are chosen by a hash of their names, so that they are the same in each run. LAPILLI_TEST_ALL=1 takes all of them, and
`make test-all` sets it."""

from __future__ import annotations

from collections import defaultdict
from zlib import crc32

import pytest


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of the cases that this run does not take."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("part"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    result = []
    for (_, of), like in cases.items():
        like.sort(key=lambda item: (crc32(item.nodeid.encode()), item.nodeid))
        result += like[-(-len(like) // of) :]
    return result
