"""Compiles Slang sources to SPIR-V, with a cache on disk; several compiler processes work on those not cached."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path

from lapilli.codegen import slang
from lapilli.errors import CompileError
from lapilli.runtime.cache import Cache
from lapilli.runtime.notice import count_kernels

Progress = Callable[[int, int], None]
CACHE = Cache("kernels", 1 << 30)
_PARALLEL = 6  # kernels from which a second process pays its start


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
    todo = list(dict.fromkeys(sources))
    done: dict[str, bytes] = {}
    for source in todo:
        code = CACHE.read(_key(source))
        if code is not None:
            done[source] = code
    missing = [s for s in todo if s not in done]
    if progress:
        progress(len(done), len(todo))
    workers = min(_processors(), len(missing) // _PARALLEL)
    fresh = _in_processes(missing, workers) if workers > 1 else _here(missing)
    for source, code in fresh:
        done[source] = code
        count_kernels(1)
        CACHE.write(_key(source), code)
        if progress:
            progress(len(done), len(todo))
    return done


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


def _here(sources: list[str]) -> Iterable[tuple[str, bytes]]:
    for s in sources:
        yield s, slang.compile(s)


def _in_processes(sources: list[str], workers: int) -> Iterable[tuple[str, bytes]]:
    """Each of n processes compiles every n-th source. (Not multiprocessing, which would run the user's script again.)"""
    parents = [str(Path(p).parent) for p in sys.modules["lapilli"].__path__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*parents, *sys.path])}
    running = []
    for n in range(workers):
        share = sources[n::workers]
        p = subprocess.Popen(
            [sys.executable, "-m", "lapilli.codegen.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        assert p.stdin is not None
        p.stdin.write(pickle.dumps((slang.DEFINES, share)))
        p.stdin.close()
        running.append((p, share))
    try:
        for p, share in running:
            assert p.stdout is not None
            for s in share:
                try:
                    code = pickle.load(p.stdout)
                except EOFError as error:
                    raise CompileError("a process of the Slang compiler ended early; its message is above") from error
                if isinstance(code, str):
                    raise CompileError(code)
                yield s, code
    finally:
        for p, _ in running:
            p.kill()
            p.wait()
            if p.stdout is not None:
                p.stdout.close()
