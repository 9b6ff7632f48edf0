"""Attention on matrix units, of any sizes, masks and layouts, by each of its tiles."""

import pytest
import random_attention

pytestmark = pytest.mark.usefixtures("on_any_device")


@pytest.mark.part(10)
@pytest.mark.parametrize("seed", random_attention.NARROW)
def test_random_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_attention.check(seed, random_attention.plan_of(seed, monkeypatch.setitem), 2**20)
