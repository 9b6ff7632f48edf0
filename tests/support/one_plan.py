"""Which plans `lapilli.compile` writes in a test: the one that runs here, for the others take longer to make than the test.

A test in SHARE writes all, and so do those marked `all_plans`, the phones of phones.py, and everything with LAPILLI_TEST_ALL=1.
tests/compiler schedules all of them."""

from __future__ import annotations

import os
from collections.abc import Collection
from zlib import crc32

import pytest

from lapilli.backend.placement import device_of, targets
from lapilli.ir.dtype import DType
from lapilli.program import schema
from lapilli.target import Target
from lapilli.target.device import plans_here

SHARE = 8
FOLDERS = ("tests/conformance/", "tests/integration/")


def is_for(node: pytest.Item) -> bool:
    whole = any(os.environ.get(name) for name in ("LAPILLI_TEST_ALL", "LAPILLI_TEST_PHONE"))
    if whole or not node.nodeid.startswith(FOLDERS) or node.get_closest_marker("all_plans"):
        return False
    return bool(crc32(node.nodeid.encode()) % SHARE)


def plan_here(stored: Collection[DType]) -> list[Target]:
    """As `plans_here`, of those only the one that the device of the tests takes, a GPU too."""
    plans = plans_here(stored)
    if schema.DeviceKind.gpu == schema.DeviceKind.any:  # as_gpu.py: the device takes the best
        return plans
    name = targets(bool(stored), device_of((), None))[0].name
    return [t for t in plans if t.name == name] or plans
