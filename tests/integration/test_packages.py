"""The wheel in an environment with what it asks for and nothing else: programs run, and what an extra brings is named."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from check_wheel_contents import problems, read_player

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


WHEELS = Path(__file__).parents[2] / "build" / "wheel"
Change = Callable[[str, bytes], tuple[str, bytes] | None]


def changed(folder: Path, change: Change) -> list[str]:
    """What is said of the wheel whose files were changed, or left out."""
    (wheel,) = WHEELS.glob("*.whl")
    path = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if (kept := change(name, old.read(name))) is not None:
                new.writestr(*kept)
    return problems(path)


def test_the_wheel_is_what_its_name_says(tmp_path: Path) -> None:
    (wheel,) = WHEELS.glob("*.whl")
    assert problems(wheel) == []
    other = tmp_path / wheel.name.replace("linux_", "musllinux_1_2_")
    other.write_bytes(wheel.read_bytes())
    assert any("libc.so.6" in line for line in problems(other)) and any("its WHEEL" in line for line in problems(other))
    other = tmp_path / wheel.name.replace("py3-none", "cp311-cp311")
    other.write_bytes(wheel.read_bytes())
    assert "py3-none" in problems(other)[0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda name, data: None if name.endswith("/pool.py") else (name, data), "lapilli/runtime/pool.py is missing"),
        (lambda name, data: (name, data + b"#" * name.endswith("/pool.py")), "lapilli/runtime/pool.py has another hash"),
        (lambda name, data: (name.replace("/pool.py", "/pond.py"), data), "lapilli/runtime/pond.py does not belong there"),
        (lambda name, data: (name, data.replace(b"lapilli_submit_sized", b"lapilli_submit_eased")), "not export lapilli_submit_s"),
        (lambda name, data: (name, b"\x7fELF" if name.endswith(".so") else data), "liblapilli.so cannot be read"),
    ],
    ids=["left out", "changed", "renamed", "a function less", "no library"],
)  # fmt: skip
def test_a_wheel_that_is_not_whole(tmp_path: Path, change: Change, found: str) -> None:
    assert any(found in line for line in changed(tmp_path, change))


def test_a_player_of_no_known_system() -> None:
    with pytest.raises(ValueError, match="neither ELF"):
        read_player(b"#!/bin/sh\n")
