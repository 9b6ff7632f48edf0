"""The wheel in an environment with what it asks for and nothing else: programs run, and what an extra brings is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import tiny

PYTHON = os.environ.get("LAPILLI_TEST_PLAYER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LAPILLI_TEST_PLAYER_PYTHON is not set; `make test` sets it")

SCRIPT = """
import sys
from importlib.metadata import distributions
import numpy as np
import lapilli

path, folder = sys.argv[1:]
assert sorted(d.name for d in distributions()) == ["cffi", "lapilli", "numpy", "pycparser"], [d.name for d in distributions()]
assert lapilli.is_available() and lapilli.devices()
with lapilli.load(path) as program:
    y = program(np.ones((2, 3), np.float32))
    assert y.tolist() == [[1, 4, 9]] * 2
    assert [r.tolist() for r in program.map([np.ones((1, 3), np.float32)] * 3)] == [[[1, 4, 9]]] * 3
with lapilli.load(path, device="all") as pool:
    assert pool(np.ones((1, 3), np.float32)).tolist() == [[1, 4, 9]]

def photo():
    from pathlib import Path
    from lapilli.runtime.preprocess import open_photo
    open_photo(Path(folder) / "photo.png")

def ray():
    import lapilli.ray

def key():
    from pathlib import Path
    from lapilli.format import signature
    signature.generate(Path(folder) / "key.pem")

def validate():
    import os
    os.environ["PATH"] = ""
    lapilli.load(path, verify="full")

for extra, use in {
    "image": photo,
    "ray": ray,
    "compile": lambda: lapilli.compile("model.pt2"),
    "sign": key,
    "validate": validate,
}.items():
    try:
        use()
    except lapilli.LapilliError as error:
        assert "pip install" in str(error) and f"lapilli[{extra}]" in str(error), (extra, error)
    else:
        raise AssertionError(extra)
print("good")
"""


def test_the_player_alone(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "scaled.lap"
    path.write_bytes(tiny.scales(np.array([1, 2, 3], np.float32)))
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, str(path), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stdout + done.stderr


def test_the_command_says_what_to_install() -> None:
    done = subprocess.run(
        [str(Path(PYTHON).with_name("lapilli")), "devices"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "pip install 'lapilli[cli]'" in done.stderr and "Traceback" not in done.stderr
