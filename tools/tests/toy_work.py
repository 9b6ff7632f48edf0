"""Work for workers that crash and hang; apart from the tests because a worker imports the module of its work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any


def toy(task: str, start: int) -> Iterator[dict[str, Any]]:
    """Three steps; the second one ends as the task says."""
    for step in range(start, 3):
        if step == 1 and task == "killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        if step == 1 and task == "exits":
            os._exit(3)
        if step == 1 and task == "hangs":
            time.sleep(600)
        yield {"step": step}
