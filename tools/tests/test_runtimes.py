"""benchmarks/runtimes: the page that it makes of what was measured, and its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtimes.models import MODELS, made
from runtimes.page import COLUMNS, FEATURES, TITLES, page
from runtimes.systems import OPEN, SYSTEMS
from runtimes.worker import NAMES

ABOUT: dict[str, Any] = {
    "started": "2026-11-25", "cores": 2, "load": (1.0, 2.0), "others": 0.5, "rounds": 2, "clang": False
}  # fmt: skip


def test_systems_have_titles() -> None:
    assert list(SYSTEMS) == list(TITLES) and set(OPEN) <= set(SYSTEMS) and tuple(MODELS) == NAMES
    assert all(len(cells) == len(COLUMNS) for cells in FEATURES.values())


@pytest.mark.parametrize("name", MODELS)
def test_models_are_the_same_each_time(name: str) -> None:
    (model, x), (again, same) = made(name), made(name)
    assert torch.equal(x, same) and torch.equal(model(x), again(same))


def test_the_page_says_what_failed_and_what_is_wrong() -> None:
    def numbers(median: float, error: float) -> dict[str, Any]:
        return {"first": 2.0, "median": median, "fastest": median, "runs": 20, "error": error}

    rounds: dict[str, list[dict[str, Any]]] = {
        "lapilli": [
            {name: numbers(m, 1e-7) for name in NAMES} | {"peak": 1e8, "open sizes": {"verdict": "right"}}
            for m in (0.004, 0.002)
        ],
        "ncnn": [
            {"convolutions": numbers(0.003, 1e-3), "transformer": {"failed": "OSError: no file"}},
            {"failed": "exit code 1"},
        ],
        "mlx": [{"failed": "no answer in five minutes"}],
    }
    facts = {"installed": 2e6, "packages": 3, "version": "1.0"}
    text = page({"lapilli": facts, "ncnn": facts, "mlx": facts, "tinygrad": {"failed": "pip fails"}}, rounds, ABOUT)
    row = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "| 2.00 / 2.00 | 2.00 / 2.00 | 2.00 / 2.00 | 2.00 | 100 |" in row["| Lapilli (lavapipe)"]
    assert "3.00 / 3.00 (wrong) | no result | no result" in row["| ncnn (CPU)"]
    assert "no answer in five minutes" in text and "OSError: no file" in text and "1.0e-03" in text
    assert "| tinygrad | pip fails |" in text and "Lapilli right" in text and "is not installed here" in text
