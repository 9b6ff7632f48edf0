"""Every page of docs/tutorials, and the README's program, is run from top to bottom; what takes minutes, in `make test-all`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tutorial

from lapilli.eager.fallback import reset_fallbacks

LONG = {"chat", "many-gpus", "photo", "compile"}
"""tests/integration/test_smollm.py, test_ray.py, test_cli_files.py and test_backend.py do these things for `make test`, smaller."""
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.long] if page.stem in LONG else [])
    for page in sorted(tutorial.FOLDER.glob("*.md"))
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    reset_fallbacks()  # a page begins in a process of its own, which counted nothing yet
    tutorial.run(page)


def test_the_ten_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (tutorial.ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for language, block in tutorial.BLOCK.findall(text) if language == "python")
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), names)
    model, x = names["model"], names["x"]
    with torch.no_grad():
        for y in (names["y"], names["program"](x), names["compiled"](x)):
            torch.testing.assert_close(y, model(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(names["z"], (x @ x.T).relu(), atol=1e-5, rtol=1e-5)
