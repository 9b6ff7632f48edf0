"""Compiles Slang sources to SPIR-V, with a cache on disk; several compiler processes work on those not cached."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from queue import Queue

from lapilli.codegen import slang
from lapilli.errors import CompileError
from lapilli.runtime.cache import Cache
from lapilli.runtime.notice import count_kernels

Progress = Callable[[int, int], None]
CACHE = Cache("kernels", 1 << 30)
_PARALLEL = 12
"""Kernels for which a process pays its start: 0.4 s, while a kernel takes 40 ms on average."""


@lru_cache(maxsize=1)
def _environment() -> bytes:
    """Everything but the source that the code depends on: the compiler and our modules."""
    h = hashlib.sha256()
    library = Path(slang.library())
    h.update(f"{library.name} {library.stat().st_size}".encode())
    for module in sorted(slang.KERNELS.glob("*.slang")):
        h.update(module.read_bytes())
    for part in ("slang.py", "spirv.py"):
        h.update((Path(slang.__file__).parent / part).read_bytes())
    return h.digest()


def _key(source: str) -> str:
    return hashlib.sha256(_environment() + repr(slang.DEFINES).encode() + source.encode()).hexdigest()


def build(sources: Iterable[str], progress: Progress | None = None) -> dict[str, bytes]:
    """SPIR-V by source. progress(done, all) is called as kernels finish."""
    with Builder() as builder:
        builder.add(sources)
        return builder.finish(progress)


class Builder:
    """Compiles kernels while their caller goes on: `add` what is known, and `finish` when there is no more. Processes are started
    once there is enough for two of them; a few kernels are compiled here. A context, at whose end no process is left.
    """

    def __init__(self) -> None:
        self._done: dict[str, bytes | None] = {}  # by source, in order; None: not yet
        self._todo: Queue[str | None] = Queue()
        self._made: Queue[tuple[str, bytes | CompileError]] = Queue()
        self._missing = 0  # that are not made
        self._workers: list[_Worker] = []

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            self._todo.put(None)
        for worker in self._workers:
            worker.join()

    def add(self, sources: Iterable[str]) -> None:
        """Those that are in the cache are read; the others will be compiled."""
        for source in sources:
            if source not in self._done:
                self._done[source] = code = CACHE.read(_key(source))
                if code is None:
                    self._missing += 1
                    self._todo.put(source)
        while len(self._workers) < (workers := min(_processors(), self._missing // _PARALLEL)) and workers > 1:
            self._workers.append(_Worker(self._todo, self._made))

    def finish(self, progress: Progress | None = None) -> dict[str, bytes]:
        """As `build`. Raises CompileError for what does not compile."""
        if progress:
            progress(len(self._done) - self._missing, len(self._done))
        for _ in self._workers:
            self._todo.put(None)
        for source, code in self._made_by_workers() if self._workers else self._made_here():
            self._done[source] = code
            self._missing -= 1
            count_kernels(1)
            CACHE.write(_key(source), code)
            if progress:
                progress(len(self._done) - self._missing, len(self._done))
        return {source: code for source, code in self._done.items() if code is not None}

    def _made_by_workers(self) -> Iterator[tuple[str, bytes]]:
        for _ in range(self._missing):
            source, code = self._made.get()
            if isinstance(code, CompileError):
                raise code
            yield source, code

    def _made_here(self) -> Iterator[tuple[str, bytes]]:
        while not self._todo.empty():
            source = self._todo.get()
            assert source is not None
            yield source, slang.compile(source)


class _Worker:
    """A process that compiles, and the thread that talks to it. (Not multiprocessing, which would run the user's script again.)"""

    def __init__(self, todo: Queue[str | None], made: Queue[tuple[str, bytes | CompileError]]) -> None:
        """todo: sources; None: no more. made: takes what comes of each."""
        parents = [str(Path(p).parent) for p in sys.modules["lapilli"].__path__]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*parents, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lapilli.codegen.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self.todo, self.made = todo, made
        self.thread = threading.Thread(target=self._talk, name="lapilli-slang", daemon=True)
        self.thread.start()

    def _talk(self) -> None:
        given, taken = self.process.stdin, self.process.stdout
        assert given is not None
        assert taken is not None
        with suppress(OSError):
            pickle.dump(slang.DEFINES, given)
        while (source := self.todo.get()) is not None:
            try:
                pickle.dump(source, given)
                given.flush()
                code = pickle.load(taken)
            except (EOFError, OSError, pickle.UnpicklingError):
                code = "a process of the Slang compiler ended early; its message is above"
            self.made.put((source, CompileError(code) if isinstance(code, str) else code))

    def join(self) -> None:
        """Waits for the thread and for the process, which was killed."""
        self.thread.join()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _processors() -> int:
    """The number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def compiler_digest() -> str:
    """A digest of this package's own source, on which compiled programs depend."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".slang"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
