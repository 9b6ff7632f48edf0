"""The script `lapilli`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import lapilli.cli
import lapilli.command


def test_the_last_collection_of_a_command_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a compilation it took five seconds in which nothing was said."""
    called = list[Any]()
    monkeypatch.setattr("atexit.register", called.append)
    monkeypatch.setattr(lapilli.cli, "main", lambda: called.append("run"))
    lapilli.command.main()
    assert called == [gc.freeze, "run"]
