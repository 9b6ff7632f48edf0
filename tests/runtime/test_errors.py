"""Files that are no program, drivers that are not there: a clear exception, no crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import lapilli
from lapilli import InvalidFileError, Program
from lapilli.runtime.description import Description

pytestmark = pytest.mark.poor_device


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"L",
        b"PK\x03\x04 a zip file, as .pt2 is",
        bytes(4096),
        b"LAPILLI\0" + bytes(56),
        b"LAPILLI\0" + b"\xff" * 200,
    ],
)
def test_not_a_program(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.lap"
    path.write_bytes(data)
    for call in (lambda: lapilli.load(path), lambda: Program(data), lambda: Description.of(path)):
        with pytest.raises(InvalidFileError):
            call()


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(lapilli.ReadError, match=r"nothing\.lap"):
        lapilli.load(tmp_path / "nothing.lap")
    with pytest.raises(lapilli.ReadError):
        lapilli.load(tmp_path)


def test_another_version_says_so() -> None:
    data = bytearray(tiny.copies("float32"))
    data[8] = 99
    with pytest.raises(InvalidFileError, match="99"):
        Program(bytes(data))


def test_every_truncation_and_every_changed_byte_is_noticed() -> None:
    data = tiny.scales(np.ones(3, np.float32))
    rng = np.random.default_rng(0)
    for n in sorted({0, 1, 63, 64, 65, len(data) - 1, *rng.integers(0, len(data), 60).tolist()}):
        with pytest.raises(InvalidFileError):
            Description.of(data[:n])
    for i in rng.integers(0, len(data), 200).tolist():
        changed = bytearray(data)
        changed[i] ^= int(rng.integers(1, 256))
        with pytest.raises(InvalidFileError):
            Description.of(bytes(changed))
    assert Description.of(data).methods[0].name == "forward"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process with another environment; validation is off, because its layer needs a driver."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LAPILLI_VALIDATION")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120)


def test_no_driver(scaled: Path, tmp_path: Path) -> None:
    code = f"""
import lapilli
print(lapilli.is_available())
try:
    lapilli.load({str(scaled)!r})
except (lapilli.NoDriverError, lapilli.NoDeviceError) as error:
    print(error)
"""
    nothing = str(tmp_path / "no-driver.json")
    done = run(code, VK_DRIVER_FILES=nothing, VK_ICD_FILENAMES=nothing)
    assert done.returncode == 0, done.stderr
    answer, message = done.stdout.split("\n", 1)
    assert answer == "False" and "driver" in message.lower()


def test_no_plan_for_the_device() -> None:
    greedy = tiny.Tiny()
    x, y = greedy.input("x", "int32", (4,)), greedy.output("y", "int32", (4,))
    greedy.dispatch("copy", (x, y), greedy.number(4))
    greedy.plan.requirements.sharedMemory = 1 << 30
    with pytest.raises(lapilli.NoDeviceError, match="memory"):
        Program(greedy.bytes())


def test_out_of_device_memory() -> None:
    huge = tiny.Tiny()
    huge.symbol("N", 1, -1, 0, 0)
    x, y = huge.input("x", "uint8", ("N", 4)), huge.output("y", "uint8", ("N", 4))
    arena = huge.buffer(tiny.fb.BufferKind.arena, "large", huge.product(("N",), 1 << 36), first=0, last=0)  # type: ignore[attr-defined]
    huge.dispatch("copy", (x, arena), huge.number(1))
    huge.dispatch("copy", (x, y), huge.product(("N",), 1))
    with Program(huge.bytes()) as program:
        small = np.ones((1, 4), np.uint8)
        for n in (1, 4, 10_000):
            with pytest.raises((lapilli.OutOfMemoryError, lapilli.InvalidInputError)) as error:
                program(np.repeat(small, n, 0))
            assert len(str(error.value)) > 20


def test_no_compiler_model_is_refused_clearly(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.pt2").write_bytes(b"not a model")
    with pytest.raises(lapilli.LapilliError):
        lapilli.compile(tmp_path / "model.pt2")


def test_a_program_too_large_for_any_plan_says_so_once() -> None:
    """Not once for each plan, nor that it should be compiled for the device that it is compiled for."""
    with pytest.raises(lapilli.NoDeviceError) as error:
        lapilli.compile(lambda x: torch.cat([x] * 40), (torch.zeros(2000, 20000),))
    text = str(error.value)
    assert "a value takes 6.0 GiB" in text and "Compile the model for smaller inputs" in text, text
    assert len(text) < 320 and "Plan" not in text and "for this one" not in text, text
