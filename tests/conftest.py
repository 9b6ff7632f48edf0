"""What all tests share: the validation layers' verdict, what each file costs, tiny programs, devices."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import as_gpu
import in_parts
import numpy as np
import one_plan
import phones
import pytest
import tiny
from budget import Budget
from numpy.typing import NDArray

from lapilli import compiler
from lapilli.codegen import build

BUDGET = pytest.StashKey[Budget]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BUDGET] = Budget()
    config.pluginmanager.register(config.stash[BUDGET], "budget")
    # Processes of tests have the processors already, and each of the compiler takes long to start.
    build._PARALLEL = sys.maxsize


def _reports(config: pytest.Config) -> str:
    """What the Vulkan validation layers reported in this run; asked once, by xdist's controller."""
    log = os.environ.get("LAPILLI_VALIDATION_LOG")
    if log is None or hasattr(config, "workerinput") or not Path(log).exists():
        return ""
    return Path(log).read_text(encoding="utf-8", errors="replace")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the whole run where the validation layers reported anything."""
    if _reports(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Says last, where it is seen, why a run failed in which every test passed."""
    if reports := _reports(config):
        print(f"The Vulkan validation layers reported ({os.environ['LAPILLI_VALIDATION_LOG']}):\n{reports[:4000]}")
    for sentence in config.stash[BUDGET].over():
        print(sentence)


@pytest.hookimpl(trylast=True)  # a part of what `-m` leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: set[pytest.Item] = set()
    if config.getoption("markexpr") == "poor_device":
        left_out.update(_too_much_for_the_poor(items))
        _take_the_plainest(items)
    if not os.environ.get("LAPILLI_TEST_ALL"):
        left_out.update(in_parts.left_out([item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is there before the first test stays to the end: collections need not look through torch's objects each time. And they
    are rarer, for a seventh of the processors' time was theirs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _too_much_for_the_poor(items: list[pytest.Item]) -> list[pytest.Item]:
    """SwiftShader has neither large texel buffers nor 16-bit types: plans that need them are not tested on it; and phones take
    those that phones.py says."""
    phone = os.environ.get("LAPILLI_TEST_PHONE")
    taken = phones.PHONES[phone].plans if phone else {"gpu-fp32", "any-fp32"}
    rich = {"cpu-fp32", "cpu-fp16", "gpu-fp32", "gpu-fp16", "gpu-fp16-matrix"} - taken
    given = {item: getattr(item, "callspec", None) for item in items}
    return [item for item, spec in given.items() if spec is not None and spec.params.get("target") in rich]


def _take_the_plainest(items: list[pytest.Item]) -> None:
    """Tests of the plan for any device are run by the plan that a phone takes every program of."""
    phone = phones.PHONES.get(os.environ.get("LAPILLI_TEST_PHONE", ""))
    for item in items if phone is not None else ():
        spec = getattr(item, "callspec", None)
        if phone is not None and spec is not None and spec.params.get("target") == "any-fp32":
            spec.params["target"] = phone.plainest


@pytest.fixture(autouse=True)
def _plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if one_plan.is_for(request.node):
        monkeypatch.setattr(compiler, "plans_here", one_plan.plan_here)


@pytest.fixture
def weights() -> NDArray[np.float32]:
    """Of the program `scaled`."""
    return np.array([1, 2, 3], np.float32)


@pytest.fixture
def scaled(weights: NDArray[np.float32], tmp_path: Path) -> Path:
    """A program file: y = x * weights²; x float32 (N, 3), N from 1 to 16."""
    path = tmp_path / "scaled.lap"
    path.write_bytes(tiny.scales(weights))
    return path


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile knows no graph and no size of other tests; random numbers are the same each time."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def gpu_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for GPUs are made for every device, so that their kernels run here too."""
    as_gpu.accept_gpu_plans(monkeypatch.setattr)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every device takes plans for GPUs, kept in a cache of the test's own; matrix units are emulated."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of files for any device need no more shared memory than software devices have."""
    from lapilli.target import TARGETS

    for name, target in list(TARGETS.items()):
        monkeypatch.setitem(TARGETS, name, replace(target, shared_memory=min(target.shared_memory, as_gpu.SHARED)))
