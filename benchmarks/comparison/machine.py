"""How busy the machine is, and with whose work."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def watch() -> Callable[[], float]:
    """Call what it returns: cores that others used on average since then. What ended child processes used is ours."""
    start, busy, own = time.perf_counter(), _busy(), _own()
    return lambda: max(0.0, (_busy() - busy - (_own() - own)) / (time.perf_counter() - start))


def _busy() -> float:
    """Seconds that cores have worked, or were taken away by the host of a virtual machine."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + mine.ru_utime + mine.ru_stime
