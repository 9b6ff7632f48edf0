"""Any shape of a language model has kernels in every plan. More of them: tests/support/random_decoders.py."""

from __future__ import annotations

import pytest
import random_decoders


@pytest.mark.parametrize("seed", [100, 107, 2001])
def test_every_plan_has_kernels(seed: int) -> None:
    assert random_decoders.check(seed, "all plans")
