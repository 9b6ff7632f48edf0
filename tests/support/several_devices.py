"""lavapipe and SwiftShader in one process, with a loader in front that loses a device when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SWIFTSHADER = ROOT / ".cache" / "swiftshader" / "icd.json"
LOADER = ROOT / "build" / "package" / "tests" / "fault"


def drivers() -> list[str]:
    """The files of the drivers: lavapipe's first, and SwiftShader's where it is there."""
    folders = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
    found = [str(file) for folder in folders for file in Path(folder).glob("lvp_icd*.json")][:1]
    return found + [str(SWIFTSHADER)] * SWIFTSHADER.exists()


def environment(*, faults: bool = False) -> dict[str, str]:
    """The variables of a process that has them; faults: with the loader of native/tests/fault_loader.cpp."""
    given = {
        **os.environ,
        "VK_DRIVER_FILES": os.pathsep.join(drivers()),
        "VK_ICD_FILENAMES": os.pathsep.join(drivers()),
    }
    given["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    given.pop("LAPILLI_DEVICE", None)
    if faults:
        given["LD_LIBRARY_PATH"] = str(LOADER)
        given.pop("LAPILLI_VALIDATION", None)  # the layer does not know the loader
    return given


def run(script: str, *arguments: str, faults: bool = False) -> str:
    """Runs a script there; what it printed. Fails where it does."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=environment(faults=faults), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lose(program: Callable[..., object], *arguments: object) -> None:
    """Loses the device of a `lapilli.Program`, in a process with the loader: its next run fails, and all after it."""
    import ctypes

    from lapilli.errors import DeviceLostError

    class Control(ctypes.Structure):  # FaultControl of native/tests/fault_loader.h
        _fields_ = [("arm", ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_int, ctypes.c_long))]

    control = Control.in_dll(ctypes.CDLL("libvulkan.so.1"), "fault_control")
    control.arm(1, 2, 1)  # in this thread: others run programs of other devices
    try:
        program(*arguments)
    except DeviceLostError:
        return
    finally:
        control.arm(0, 0, 0)
    raise AssertionError("the device is not lost")
