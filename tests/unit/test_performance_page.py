"""benchmarks/performance writes docs/performance.md anew without losing what was measured on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from performance.page import write
from performance.tables import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "performance.md").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def result(device: str, *names: str) -> dict[str, Any]:
    row = {"case": "one case", "seconds": {"lapilli": 0.5, "torch": 0.8}, "flops": None, "error": 0.0, "note": ""}
    return {"device": device, "key": "key", "circumstances": "Today.", "tables": {name: [row] for name in names}}


def test_nothing_measured_changes_nothing(docs: Path) -> None:
    write([], docs)
    assert (docs / "performance.md").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_a_table_of_a_device_takes_the_place_of_its_old_one_alone(docs: Path) -> None:
    old = PAGE.read_text(encoding="utf-8").splitlines()
    write([result("NVIDIA H200", "products")], docs)
    new = (docs / "performance.md").read_text(encoding="utf-8").splitlines()
    assert (
        "Measured since then: Matrix products: Today." in new and new.count("| one case | 500 | 800 | 0.0e+00 |") == 1
    )
    assert [line for line in new if line.startswith("#")] == [line for line in old if line.startswith("#")]
    lost = [line for line in old if line not in new]
    assert 0 < len(lost) < 12 and all(line.startswith(("| ", "![Matrix")) for line in lost)
    write([result("NVIDIA H200", "products", "batches")], docs)
    again = (docs / "performance.md").read_text(encoding="utf-8")
    assert again.count("Measured since then") == 1 and "since then: Matrix products, Batches: Today." in again


def test_a_device_that_is_measured_whole_is_told_of_anew(docs: Path) -> None:
    write([result("NVIDIA H200", *TABLES), result("Another", "batches")], docs)
    text = (docs / "performance.md").read_text(encoding="utf-8")
    assert "Measured since then" not in text and "## NVIDIA H200\n\nToday.\n\n### One input" in text
    assert text.endswith("\n") and text.index("## llvmpipe") < text.index("## Another\n\nToday.\n\n### Batches")
