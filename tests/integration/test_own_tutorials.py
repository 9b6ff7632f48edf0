"""Every page of docs/tutorials is run from top to bottom. `make test` leaves out those that take minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tutorial

LONG = {"chat", "many-gpus", "photo", "compile"}
"""tests/integration/test_smollm.py, test_ray.py, test_cli_files.py and test_backend.py do these things for `make test`, smaller."""
PAGES = sorted(tutorial.FOLDER.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in LONG and not os.environ.get("LAPILLI_TEST_ALL"):
        pytest.skip("make test-all runs it")
    monkeypatch.chdir(tmp_path)
    tutorial.run(page)
