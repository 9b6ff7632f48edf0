"""Actors for tests of `lapilli.ray`, which say where they are, and to which something happens once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import several_devices

from lapilli.ray import Predictor
from lapilli.ray.language_models import Replica


class Telling(Predictor):
    """Adds the columns "device" and "process", and whether the file lies in memory that processes share."""

    def __call__(self, batch: Any) -> Any:
        made = super().__call__(batch)
        n = len(next(iter(made.values())))
        return made | {
            "device": np.array([self.device] * n),
            "process": np.full(n, os.getpid()),
            "shared": np.full(n, self._in_shared_memory()),
        }

    def _in_shared_memory(self) -> bool:
        assert isinstance(self._source, memoryview)
        address = np.frombuffer(self._source, np.uint8).ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            if begin <= address < end:
                return "plasma" in line or "/dev/shm" in line
        return False


def _first_time(flag: str) -> bool:
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Checked(Predictor):
    """Loses its device when it is told to."""

    def lose(self) -> None:
        """Its next run fails, and all after it."""
        several_devices.lose(self._program, np.ones((1, 3), np.float32))


class Dying(Telling):
    """Its process is killed in the batch with row `at`, after the device has computed it, once."""

    def __init__(self, model: Any, flag: str, at: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._flag, self._at = flag, at

    def __call__(self, batch: Any) -> Any:
        made = super().__call__(batch)
        if self._at in batch["id"] and _first_time(self._flag):
            os.kill(os.getpid(), signal.SIGKILL)
        return made


class Losing(Dying):
    """Its device is lost before the batch with row `at`, once."""

    def __call__(self, batch: Any) -> Any:
        if self._at in batch["id"] and _first_time(self._flag):
            several_devices.lose(self._program, np.ones((1, 3), np.float32))
        return Telling.__call__(self, batch)


class Slow(Predictor):
    """A batch takes 0.2 s at least."""

    def run(self, arrays: Any) -> Any:
        time.sleep(0.2)
        return super().run(arrays)


class Served(Predictor):
    """Something happens after a batch with the row that begins with -1, once. Notes its process in the file `started`."""

    def __init__(self, *arguments: Any, flag: str, happens: str, started: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._flag, self._happens = flag, happens
        note(started)

    def run(self, arrays: Any) -> Any:
        made = super().run(arrays)
        if (arrays[0][:, 0] == -1).any() and _first_time(self._flag):
            if self._happens == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            several_devices.lose(self._program, np.ones((1, 3), np.float32))
        return made


class Writer(Replica):
    """A language model that loses its device between two health checks, where the file `LAPILLI_TEST_FLAG` names is there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wanted = os.environ["LAPILLI_TEST_FLAG"]
        note(f"{self._wanted}.started")

    async def check_health(self) -> None:
        if Path(self._wanted).exists():
            Path(self._wanted).unlink()
            likely = self.model.program.methods["likely"]
            several_devices.lose(likely, *(np.zeros(s.least_shape(), s.dtype) for s in likely.inputs))
        await super().check_health()


def note(path: str) -> None:
    """Adds this process to a file."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
