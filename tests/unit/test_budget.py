"""The budget of a file of tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from budget import LARGE, MOST, SHARE, Budget, cpu_seconds

MANY = {f"tests/unit/test_{k}.py": 1.0 for k in range(MOST)}


def report(file: str, seconds: float) -> Any:
    return SimpleNamespace(nodeid=f"{file}::test_x[a::b]", when="teardown", user_properties=[["cpu_seconds", seconds]])


def spent(seconds: dict[str, float]) -> Budget:
    budget = Budget()
    for file, of_file in seconds.items():
        for _ in range(2):
            budget.pytest_runtest_logreport(report(file, of_file / 2))
    return budget


def test_a_file_that_takes_too_much_is_named() -> None:
    rest = sum(MANY.values())
    within, beyond = (rest * share / (1 - share) for share in (SHARE * 0.9, SHARE * 1.1))
    assert spent({**MANY, "tests/a.py": within}).over() == []
    (sentence,) = spent({**MANY, "tests/a.py": beyond}).over()
    assert sentence.startswith("tests/a.py takes 16% of the CPU time of all tests, and may take 15%")
    large = next(iter(LARGE))
    assert spent({**MANY, large: beyond}).over() == []


def test_a_few_files_say_nothing() -> None:
    assert spent({"tests/a.py": 100.0, "tests/b.py": 1.0}).over() == []


def test_a_run_fails_for_it() -> None:
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    budget: Any = spent({**MANY, "tests/a.py": 1000.0})
    budget.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_processor_time_is_measured(request: pytest.FixtureRequest) -> None:
    started = cpu_seconds()
    while cpu_seconds() - started < 0.03:
        pass
    assert request.config.pluginmanager.hasplugin("budget")


def test_large_files_exist() -> None:
    assert all((Path(__file__).parents[2] / file).exists() for file in LARGE)
