"""What follows a product of a few rows in its kernel, and reads memory before there are sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import random_ends

from lapilli.target import TARGETS

pytestmark = pytest.mark.usefixtures("on_any_device")


@pytest.mark.part(16)
@pytest.mark.parametrize("seed", range(48))
@pytest.mark.parametrize("plan", random_ends.PLANS)
def test_random_ends(seed: int, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, plan, replace(TARGETS[plan], shared_memory=32768))
    random_ends.check(seed, plan)
