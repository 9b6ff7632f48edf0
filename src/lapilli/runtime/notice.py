"""A notice on stderr for work that takes longer than two seconds: first uses compile, and large files load. Neither should look
like a hang.

Work that follows within half a second counts as the same: the first run of a model on the eager device compiles a hundred
small programs. A terminal shows one line that changes; other outputs get a line at the start and every half minute.
LAPILLI_QUIET=1 turns it off, and so does `silenced`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lapilli.runtime.cache import base

PATIENCE = 2.0
"""Seconds of work after which there is a notice."""
_PAUSE = 0.5
"""Seconds without work after which further work counts as new."""
_LOG_INTERVAL = 30.0


@dataclass(frozen=True)
class Work:
    """What a notice says that goes on, and what was done."""

    present: str
    past: str
    kept: bool = False
    """Whether a later process finds its result in the cache."""


COMPILING = Work("compiling for the GPU", "compiled for the GPU", kept=True)


class Notice:
    """Watches stretches of work. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0
        self._since = self._last = 0.0
        self._kernels = 0
        self._work = COMPILING
        self._silent = 0
        self._watcher: threading.Thread | None = None

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """A context without notices, in all threads."""
        with self._lock:
            self._silent += 1
        try:
            yield
        finally:
            with self._lock:
                self._silent -= 1

    @contextmanager
    def working(self, work: Work = COMPILING) -> Iterator[None]:
        """A context for work. What a stretch began with names it."""
        self._enter(work)
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
                self._last = time.monotonic()

    def count_kernels(self, number: int) -> None:
        """Adds to the number of compiled kernels."""
        with self._lock:
            self._kernels += number

    def _enter(self, work: Work) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._working and now - self._last > _PAUSE:
                self._since, self._kernels, self._work = now, 0, work
            self._working += 1
            # After a fork, the thread does not exist in the child.
            silent = self._silent or os.environ.get("LAPILLI_QUIET")
            if (self._watcher is None or not self._watcher.is_alive()) and not silent:
                self._watcher = threading.Thread(target=self._watch, name="lapilli-notice", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        said, shown = 0.0, False
        terminal = sys.stderr is not None and sys.stderr.isatty()
        while True:
            time.sleep(0.1)
            with self._lock:
                now = time.monotonic()
                idle = not self._working and now - self._last > _PAUSE
                spent, kernels, work = (self._last if idle else now) - self._since, self._kernels, self._work
                silent = self._silent > 0
                if idle:
                    self._watcher = None
            if idle:
                if shown and terminal:
                    _write(f"\r\033[K{_sentence(work.past, spent, kernels)}\n")
                return
            due = _PAUSE if terminal else _LOG_INTERVAL
            if not silent and spent > PATIENCE and (not shown or now - said > due):
                said, shown = now, True
                sentence, kept = (
                    _sentence(work.present, spent, kernels),
                    f"; the result is kept in {base()}" * work.kept,
                )
                _write(f"\r\033[K{sentence}" if terminal else f"{sentence}{kept}\n")


def _sentence(what: str, seconds: float, kernels: int) -> str:
    made = f", {kernels} kernel{'s' * (kernels != 1)}" if kernels else ""
    return f"lapilli: {what} ({seconds:.0f} s{made})"


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # closed, or absent
        return


_notice = Notice()
working, silenced, count_kernels = _notice.working, _notice.silenced, _notice.count_kernels
