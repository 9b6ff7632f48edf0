"""Files of strangers: those that cost much, those that change while they are read, those that are no files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import hostile_files
import numpy as np
import pytest
import torch

import lapilli
from lapilli import player
from lapilli.errors import InvalidFileError, InvalidInputError, OutOfMemoryError, ReadError, RunTimeoutError
from lapilli.program import schema as s

SIZE = 64 << 20

# In a process of its own: time and memory of reading a file, beyond those of the process before it and of the file.
MEASURE = """
import resource, sys, time
from lapilli import player
player.version()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for path in sys.argv[1:]:
    before, start = peak(), time.process_time()
    try:
        player.describe(path)
        result = "ok"
    except Exception as error:
        result = type(error).__name__
    print(result, time.process_time() - start, peak() - before)
"""


def test_the_worst_tables_cost_little(tmp_path: Path) -> None:
    for name, make in hostile_files.BOMBS.items():
        path = tmp_path / "bomb.lap"
        path.write_bytes(make(SIZE))
        out = subprocess.run(
            [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, timeout=60, check=True
        )
        result, seconds, memory = out.stdout.split()
        assert result in ("ok", "InvalidFileError"), name
        assert float(seconds) < 1, f"{name}: {seconds} s"
        assert int(memory) < 4 * SIZE, f"{name}: {int(memory) >> 20} MiB"
        path.unlink()


class _Sum(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class _Counter(torch.nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("plain") / "sum.lap"
    with lapilli.compile(_Sum(), (torch.ones(64), torch.ones(64))) as program:
        program.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("counting") / "count.lap"
    with lapilli.compile(_Counter(), (torch.ones(4),)) as program:
        program.save(path)
    return path.read_bytes()


def _number(method: s.MethodT, value: int) -> int:
    e = s.ExprT()
    e.value, e.a, e.b, e.op = value, 0, 0, 0
    method.exprs.append(e)
    return len(method.exprs) - 1


def test_states_are_counted_together(counting: bytes) -> None:
    program, data = hostile_files.parts_of(counting)
    for n in range(4000):  # of 1 GiB each: more than any machine has
        state = s.StateT()
        state.name, state.dtype, state.shape, state.constant = f"s{n}", 8, [1 << 28], -1
        program.states.append(state)
    with pytest.raises(OutOfMemoryError, match="may take|not enough memory|of memory, and state"):
        player.NativeProgram.load(hostile_files.file_from(program, data))


@pytest.mark.parametrize("kind", [0, 3, 4, 6], ids=["constant", "input", "output", "state"])
def test_a_buffer_is_no_larger_than_its_tensor(plain: bytes, counting: bytes, kind: int) -> None:
    program, data = hostile_files.parts_of(counting if kind == 6 else plain)
    if kind == 0:
        with lapilli.compile(torch.nn.Linear(8, 8), (torch.ones(2, 8),)) as linear:
            assert isinstance(linear._loaded.file.source, bytes)
            program, data = hostile_files.parts_of(linear._loaded.file.source)
    for method in program.methods:
        large = _number(method, 1 << 30)
        for plan in method.plans:
            for buffer in plan.buffers:
                if buffer.kind == kind or (kind == 0 and buffer.kind == 5):
                    buffer.size = large
    with pytest.raises(InvalidFileError, match="much larger than what it is for"):
        file = hostile_files.file_from(program, data)
        inputs = player.describe(file)["methods"][0]["inputs"]
        player.NativeProgram.load(file).run([np.zeros(i["shape"], np.float32) for i in inputs])


@pytest.mark.parametrize("number", [1, 255])
def test_a_format_of_kernels_that_nobody_knows_is_refused(plain: bytes, number: int) -> None:
    tables, data = hostile_files.parts_of(plain)
    assert {kernel.format for kernel in tables.kernels} == {s.KernelFormat.spirv}
    tables.kernels[-1].format = number
    with pytest.raises(
        InvalidFileError, match=rf"is in format {number}, and this player knows 0 \(spirv\)\. Update Lapilli"
    ):
        player.describe(hostile_files.file_from(tables, data))


def test_requirements_are_named(plain: bytes) -> None:
    tables, data = hostile_files.parts_of(plain)
    requirements = tables.methods[0].plans[0].requirements
    requirements.subgroupOperations = s.SubgroupOperation.basic | s.SubgroupOperation.quad
    requirements.features = s.Feature.float16 | s.Feature.memory_model
    node = player.describe(hostile_files.file_from(tables, data))["methods"][0]["plans"][0]["requirements"]
    assert node["subgroup_operations"] == ["basic", "quad"] and node["features"] == ["float16", "memory_model"]


def test_work_groups_are_limited(plain: bytes) -> None:
    program, data = hostile_files.parts_of(plain)
    for method in program.methods:
        most = _number(method, 65535)
        for plan in method.plans:
            for command in plan.run:
                command.groupsX = command.groupsY = command.groupsZ = most
    native = player.NativeProgram.load(hostile_files.file_from(program, data))
    with pytest.raises(InvalidFileError, match="65535 x 65535 x 65535 work groups, and the limit is"):
        native.run([np.zeros(64, np.float32)] * 2)


def test_limits_of_the_caller(plain: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sum.lap"
    path.write_bytes(plain)
    x = np.ones(64, np.float32)
    generous = lapilli.Limits(structure_bytes=1 << 30, device_bytes=1 << 34, seconds=60)
    with lapilli.load(path, limits=generous) as program:
        assert np.array_equal(program(x, x), x + x)
    for name in ("structure_bytes", "code_bytes", "entries", "expressions", "description_bytes"):
        with pytest.raises(InvalidFileError, match=f"\\({name}\\)|damaged"):
            lapilli.load(path, limits=lapilli.Limits(**{name: 1}))
    with pytest.raises(OutOfMemoryError, match="device_bytes"):
        lapilli.load(path, limits=lapilli.Limits(device_bytes=1))(x, x)
    with pytest.raises(InvalidInputError, match="groups is -1"):
        lapilli.load(path, limits=lapilli.Limits(groups=-1))
    with pytest.raises(InvalidInputError, match="seconds is 0"):
        lapilli.load(path, limits=lapilli.Limits(seconds=0))


def test_a_run_that_takes_too_long_is_left(tmp_path: Path) -> None:
    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = (x @ x).tanh()
            return x

    x = torch.ones(1024, 1024) / 1024
    path = tmp_path / "long.lap"
    with lapilli.compile(Long(), (x,)) as program:
        program.save(path)
    with (
        lapilli.load(path, limits=lapilli.Limits(seconds=1e-4)) as late,
        pytest.raises(RunTimeoutError, match="not finished"),
    ):
        late(x)


def test_a_file_that_becomes_shorter_is_refused(plain: bytes, tmp_path: Path) -> None:
    """Whatever is missing, at whatever moment; a mapped file would end the process."""
    path = tmp_path / "large.lap"
    program, data = hostile_files.parts_of(plain)
    path.write_bytes(hostile_files.file_from(program, bytes(data) + bytes(200 << 20)))
    code = f"""
from lapilli import player
from lapilli.errors import InvalidFileError
print("start", flush=True)
try:
    for _ in range(100): player.describe({str(path)!r})
except InvalidFileError as error:
    print(error)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.03)
    os.truncate(path, 100_000)
    out = child.stdout.read()
    assert child.wait(60) == 0
    assert "became shorter" in out or "truncated" in out, out


def test_a_file_that_changes_is_never_trusted(plain: bytes, tmp_path: Path) -> None:
    """What is verified is what is used: another process changes offsets in place meanwhile."""
    path = tmp_path / "sum.lap"
    path.write_bytes(plain)
    code = f"""
import time
from lapilli import player
end = time.time() + 3
while time.time() < end:
    try: player.describe({str(path)!r}, verify=False)
    except Exception: pass
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    random = np.random.default_rng(1)
    with open(path, "r+b") as file:
        while child.poll() is None:
            at = int(random.integers(64, len(plain) // 2)) // 4 * 4
            for value in (b"\xff\xff\xff\x7f", plain[at : at + 4]):
                file.seek(at)
                file.write(value)
                file.flush()
    assert child.returncode == 0


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ReadError, match="not a regular file"):
        player.describe(path)
    with pytest.raises(ReadError):
        lapilli.load(path)
