"""Attention on matrix units, of any sizes, masks and layouts, by each of its tiles."""

from dataclasses import replace

import pytest
import random_attention

from lapilli.target import TARGETS

pytestmark = pytest.mark.usefixtures("on_any_device")


NARROW = [s for s in range(80) if (c := random_attention.case(s)).size + c.width <= 80]
"""Drivers take long to compile the emulation of long rows, which the other tests of attention have."""


@pytest.mark.part(10)
@pytest.mark.parametrize("seed", NARROW)
def test_random_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_attention.PLANS[seed % 2]
    monkeypatch.setitem(TARGETS, plan, replace(TARGETS[plan], shared_memory=32768))
    random_attention.check(seed, plan, 2**20)
