"""Says whether an installed wheel is whole, where there is no Vulkan: its player reads the program files of tests/kept.

    python tools/check_wheel.py

Needs what the wheel asks for and nothing else; `tool.cibuildwheel` runs it in an environment of each wheel.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import lapilli
from lapilli import player
from lapilli.runtime.description import Description

KEPT = Path(__file__).parents[1] / "tests" / "kept"


def main() -> None:
    """Raises where something is wrong."""
    assert player.version() == lapilli.__version__, (player.version(), lapilli.__version__)
    files = sorted(KEPT.glob("*.zip"))
    assert files, KEPT
    for file in files:
        with zipfile.ZipFile(file) as archive:
            program = Description.of(archive.read("program.lap"))
        assert program.methods and program.kernels, file
    assert isinstance(lapilli.is_available(), bool)
    print(f"lapilli {lapilli.__version__} reads {len(files)} programs; devices: {lapilli.is_available()}")


if __name__ == "__main__":
    main()
