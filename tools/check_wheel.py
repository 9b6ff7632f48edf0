"""Says whether an installed wheel is whole: its player reads the program files of tests/kept and refuses a damaged one. Where there
is a Vulkan device, it runs them, too, and gives what PyTorch gave.

    python tools/check_wheel.py

Needs what the wheel asks for and nothing else; `tool.cibuildwheel` and tools/test_wheel.sh run it in an environment of each wheel.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np

import lapilli
from lapilli import player
from lapilli.runtime.description import Description

KEPT = Path(__file__).parents[1] / "tests" / "kept"


def check_refusal(data: bytes) -> None:
    """Also whether an exception of C++ gets through the library's own C++ library."""
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    try:
        Description.of(bytes(damaged))
    except lapilli.InvalidFileError:
        return
    raise AssertionError("A damaged file was read")


def check_results(archive: zipfile.ZipFile, half: bool) -> None:
    """Of the first call that was kept."""

    def arrays(kind: str) -> list[np.ndarray]:
        names = [n for n in archive.namelist() if n.startswith(f"0/{kind}")]
        return [np.load(io.BytesIO(archive.read(f"0/{kind}{i}.npy"))) for i in range(len(names))]

    with lapilli.Program(archive.read("program.lap")) as program:
        for y, wanted in zip(program.run_flat(arrays("in")), arrays("out"), strict=True):
            bound = 2e-2 if half else 1e-5
            np.testing.assert_allclose(y, wanted, rtol=bound, atol=bound)


def main() -> None:
    """Raises where something is wrong."""
    assert player.version() == lapilli.__version__, (player.version(), lapilli.__version__)
    files = sorted(KEPT.glob("*.zip"))
    assert files, KEPT
    ran = 0
    for file in files:
        with zipfile.ZipFile(file) as archive:
            data = archive.read("program.lap")
            program = Description.of(data)
            assert program.methods and program.kernels, file
            check_refusal(data)
            if lapilli.is_available():
                try:
                    check_results(archive, half="half" in file.stem)
                    ran += 1
                except (
                    lapilli.NoDeviceError
                ) as error:  # none of its plans is for this device: halves on an old lavapipe
                    print(f"{file.stem}: {error}", file=sys.stderr)
    assert ran or not lapilli.is_available()
    print(f"lapilli {lapilli.__version__} reads {len(files)} programs, and ran {ran} of them")


if __name__ == "__main__":
    main()
