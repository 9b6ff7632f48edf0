"""Tests that a run leaves out: those marked `long`, and a part of those with many like cases: `@pytest.mark.part(3)` takes a third
of them, and at least one.

Without that mark, of the cases of a function that compiles for a device one in SHARE is taken, and at least one; `part(1)` takes
all. The cases are chosen by a hash of their names, so that they are the same in each run, and functions with the
same parameters take different ones. LAPILLI_TEST_ALL=1 takes all of them, and `make test-all` sets it."""

from __future__ import annotations

from collections import defaultdict
from zlib import crc32

import pytest

SHARE = 40
"""Of like cases, a run takes one in so many."""

COMPILING = ("tests/conformance/", "tests/integration/")


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of the cases that this run does not take."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long"):
            continue
        mark = item.get_closest_marker("part")
        if mark or item.nodeid.startswith(COMPILING):
            cases[item.nodeid.partition("[")[0], mark.args[0] if mark else 0].append(item)
    result = [item for item in items if item.get_closest_marker("long")]
    for (_, of), like in cases.items():
        like.sort(key=lambda item: (crc32(item.nodeid.encode()), item.nodeid))
        taken = -(-len(like) // (of or SHARE))
        result += like[taken:]
    return result
