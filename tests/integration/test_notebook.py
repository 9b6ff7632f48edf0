"""examples/tour.ipynb is run, cell by cell, as Jupyter does it."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def test_the_tour(tmp_path: Path) -> None:
    """No cell fails, the program is shown as a table, and the file in the repository has no outputs."""
    notebook = nbformat.read(TOUR, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output.data["text/html"] for cell in code for output in cell.outputs if "text/html" in output.get("data", {})
    ]
    assert len(shown) == 1
    for word in ("lapilli.Program", "batch", "inputs", "outputs", "device", "plan", "kernels of a run", "conv2d"):
        assert word in shown[0], word
    text = "".join(o.get("text", "") for cell in code for o in cell.outputs)
    assert text.count("largest difference") == 2 and "µs" in text and "kB" in text
