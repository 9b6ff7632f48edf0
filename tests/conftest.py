"""What all tests share: the validation layers' verdict, tiny programs, devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the whole run where the Vulkan validation layers reported anything; asked once, by xdist's controller."""
    log = os.environ.get("LAPILLI_VALIDATION_LOG")
    if log is None or hasattr(session.config, "workerinput"):
        return
    reports = Path(log).read_text(encoding="utf-8", errors="replace") if Path(log).exists() else ""
    if reports:
        print(f"\nThe Vulkan validation layers reported ({log}):\n{reports[:4000]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
