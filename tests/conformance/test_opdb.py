"""Shards of PyTorch's operator tests on the device: what `make opdb` and `make specials` do with all of them."""

from __future__ import annotations

import opdb
import opinfo
import pytest
import special_operators
from measure import compile_for_device


@pytest.mark.parametrize("name", opinfo.shard(opinfo.entries(), 30))
def test_entry(name: str) -> None:
    """The first sample with its own sizes, and one with every size dynamic: what torch.export takes is right, or is refused
    with a sentence."""
    samples = opdb.calls(name, 1)
    for measured in (opdb.static, opdb.dynamic):
        found = measured(name, samples[0], compile_for_device)
        assert found.verdict in ("right", "refused", "unexportable"), f"{measured.__name__}: {found.reason}"


@pytest.mark.parametrize("name", opinfo.shard(filter(special_operators.defined, opinfo.entries()), 30, 7))
def test_special_values(name: str) -> None:
    """NaN and infinities are where torch has them."""
    assert list(special_operators.differences(name, 1)) == []
