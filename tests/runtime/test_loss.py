"""A device that is lost: what was on it says so, and what is made afterwards works, in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "package" / "tests" / "fault"

SCRIPT = """
import ctypes
import numpy as np, tiny, torch
from lapilli import errors
from lapilli.player import NativeProgram

CALL = ctypes.CFUNCTYPE
class Control(ctypes.Structure):  # FaultControl of native/tests/fault_loader.h
    _fields_ = [("arm", CALL(None, ctypes.c_long, ctypes.c_int, ctypes.c_long)), ("fired", CALL(ctypes.c_char_p))]

control = Control.in_dll(ctypes.CDLL("libvulkan.so.1"), "fault_control")

def lost(use):
    try:
        use()
    except errors.DeviceLostError as error:
        return "lost" in str(error) or "stopped working" in str(error)
    return False

CODE = tiny.scales(np.array([1, 2], np.float32), high=4096)
twice = torch.compile(lambda a: torch.sin(a) * 2, backend="vulkan", dynamic=False)
values = torch.linspace(0, 1, 6).reshape(2, 3)

def good(x):
    assert torch.equal((x + 1).cpu(), values + 1) and torch.equal(x.t().contiguous().cpu(), values.t())
    assert torch.allclose(twice(x).cpu(), torch.sin(values) * 2, atol=1e-6)
    assert float((x @ x.t()).sum()) > 0

old = values.to("vulkan")
good(old)
program = NativeProgram.load(CODE, cache_dir="")
for round in range(3):
    control.arm(1, 1, 1)
    assert lost(lambda: (old + 1).cpu())
    control.arm(0, 0, 0)
    assert control.fired() is not None or round
    for use in (old.cpu, lambda: old + 1, lambda: old[1].sum(), lambda: twice(old), old.tolist):
        assert lost(use), use
    new = values.to("vulkan")
    good(new)
    for use in (old.cpu, lambda: old + new, lambda: new.add_(old), lambda: new.copy_(old), lambda: twice(old)):
        assert lost(use), use
    good(new)
    assert lost(lambda: program.run([np.ones((1, 2), np.float32)]))
    program = NativeProgram.load(CODE, cache_dir="")
    assert program.run([np.ones((1, 2), np.float32)])[0].tolist() == [[1, 4]]
    old = new
print("good")
"""


@pytest.mark.skipif(not FOLDER.exists(), reason="make native builds the loader that lets calls fail")
def test_lost_devices_come_back() -> None:
    # Without the validation layer, which the loader of the test does not know.
    environment = {name: value for name, value in os.environ.items() if name != "LAPILLI_VALIDATION"}
    environment["LD_LIBRARY_PATH"] = str(FOLDER)
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "good\n"), result.stdout + result.stderr
