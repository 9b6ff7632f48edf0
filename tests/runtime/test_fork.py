"""Processes that fork after they have used a device: every use in the child is refused, at once, and the child ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
import os, signal, sys, time
import numpy as np, tiny, torch
from lapilli import errors
from lapilli.compiler import compile_to_bytes
from lapilli.player import NativeProgram, describe, devices
from lapilli.stream import Stream

CODE = tiny.scales(np.array([1, 2], np.float32), high=4096)
X = np.ones((3, 2), np.float32)

def child(work):
    '''The exit code of a fork that does this and then ends as scripts do.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # what waits is ended
        sys.exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1]

def refuses(call):
    try:
        call()
    except (errors.DeviceLostError, RuntimeError) as error:
        return "fork" in str(error)
    return False
"""


def run(script: str, environment: dict[str, str]) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *filter(None, [environment.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
def test_programs_and_streams(tmp_path: Path) -> None:
    """As a script that compiles, and whose workers run what it made; and a server that loads its model and then forks them."""
    run(
        """
        made = compile_to_bytes(torch.nn.Linear(2, 2), (torch.ones(3, 2),))  # which leaves the device to children
        assert child(lambda: NativeProgram.load(made, cache_dir="").run([X])[0].shape == (3, 2)) == 0
        before = child(lambda: NativeProgram.load(CODE, cache_dir="").run([X])[0][0, 1] == 4)  # not yet used: free to
        assert before == 0, before
        program = NativeProgram.load(CODE, cache_dir="")
        stream = Stream()
        buffer = stream.allocate(24)
        buffer.write(0, X)
        flight = program.submit([X])

        def work():
            new = lambda: NativeProgram.load(CODE, cache_dir="")
            calls = [lambda: program.run([X]), new, flight.outputs, lambda: flight.wait(0), program.info, devices, Stream]
            calls += [lambda: buffer.read(0, 24), lambda: buffer.write(0, X), stream.flush, stream.synchronize]
            calls += [lambda: stream.allocate(8), lambda: stream.enqueue(program, 0, [3], [(buffer, 0)], [(buffer, 0)])]
            good = all([refuses(call) for call in calls]) and describe(CODE)["methods"]
            flight.release()
            program.close()
            return good

        for _ in range(2):
            status = child(work)
            assert status == 0, status
        assert child(lambda: True) == 0  # one that only ends
        assert flight.outputs()[0][0, 1] == 4 and program.run([X])[0][0, 1] == 4
        assert np.array_equal(np.frombuffer(buffer.read(0, 24), np.float32), X.ravel())
        """,
        {**os.environ, "LAPILLI_CACHE_DIR": str(tmp_path)},
    )


def test_workers_of_a_data_loader() -> None:
    """They never touch the device, and end."""
    run(
        """
        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.full((2,), float(i))

        if __name__ == "__main__":
            y = torch.ones(2, device="vulkan") + 1
            program = NativeProgram.load(CODE, cache_dir="")
            for workers in (1, 2):
                loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=workers, multiprocessing_context="fork")
                total = sum(float((batch.to("vulkan") + y[0]).sum()) for batch in loader)
                assert total == 2 * 28 + 16 * 2, total
            start = time.monotonic()
            assert child(lambda: refuses(lambda: torch.ones(2, device="vulkan")) and refuses(y.cpu)) == 0
            assert time.monotonic() - start < 8  # PyTorch waits ten seconds for threads that a child does not have
            assert program.run([X])[0][0, 1] == 4
        """,
        dict(os.environ),
    )
