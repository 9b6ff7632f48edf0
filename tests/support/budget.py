"""What each file of tests costs: CPU time, which other work on the machine hardly changes, of the process and of those it started.

A run of most files fails where one of them takes more than SHARE of the whole: it makes everybody wait, and is to be made quicker,
taken apart, or entered in LARGE with a reason. Shares are much the same on slow and on fast machines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SHARE = 0.15
"""Of the CPU time of all tests of a run: twice that of the largest file, some ten times that of the mean one."""

LARGE = {
    "tests/conformance/test_operators.py": 0.5,  # every operator in six configurations
    "tests/compiler/test_lowering.py": 0.3,  # every operator again, among the few files that need no device
}
"""Files that may take more."""

MOST = 50
"""Files that a run must have for their shares to say anything."""

_STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Of this process with all its threads, and of processes that it has started and waited for."""
    return sum(os.times()[:4])


class Budget:
    """A plugin of pytest. Works with xdist: workers measure, and the controller sums."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        item.stash[_STARTED] = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash.get(_STARTED, cpu_seconds())))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds[report.nodeid.partition("::")[0]] += dict(report.user_properties).get("cpu_seconds", 0.0)

    def over(self) -> list[str]:
        """A sentence for each file that takes too much of the whole."""
        whole = self.seconds.total()
        if len(self.seconds) < MOST or not whole:
            return []
        return [
            f"{file} takes {seconds / whole:.0%} of the CPU time of all tests, and may take {LARGE.get(file, SHARE):.0%}: make it "
            "quicker, take it apart, or say in tests/support/budget.py why it has to be so."
            for file, seconds in self.seconds.items()
            if seconds > LARGE.get(file, SHARE) * whole
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and self.over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        whole = self.seconds.total()
        if len(self.seconds) > 1 and whole > 0:
            terminalreporter.section("files by CPU time")
            for file, seconds in self.seconds.most_common(20):
                terminalreporter.write_line(f"{seconds:7.1f} s  {seconds / whole:4.0%}  {file}")
        for sentence in self.over():
            terminalreporter.write_line(sentence, red=True)
