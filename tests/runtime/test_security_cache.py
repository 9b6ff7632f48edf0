"""Caches and files on disk: whose they are, what is taken from them, what is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import lapilli
from lapilli.runtime import cache as caches
from lapilli.runtime import files
from lapilli.runtime.cache import Cache

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "base"))
    return Cache("things", 1000)


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_folders_and_files_are_this_users_alone(cache: Cache, umask: int) -> None:
    cache.write("entry", b"content")
    assert cache.read("entry") == b"content" and cache.keep("plain", b"whole") == cache.folder / "plain"
    assert mode(cache.folder) == mode(cache.folder.parent) == 0o700
    assert {mode(file) for file in cache.folder.iterdir()} == {0o600}


def test_an_open_folder_of_ours_is_closed_and_what_others_may_have_written_is_not_taken(cache: Cache) -> None:
    cache.write("mine", b"1")
    os.chmod(cache.folder, 0o777)
    assert cache.read("mine") is None and cache.file("mine") is None
    cache.write("other", b"2")
    assert mode(cache.folder) == 0o700 and cache.read("mine") == b"1"
    os.chmod(cache.folder / "mine", 0o666)
    assert cache.read("mine") is None and cache.file("mine") is None and cache.read("other") == b"2"


@pytest.mark.parametrize("owner", ["file", "folder"])
def test_what_belongs_to_another_user_is_not_taken(cache: Cache, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the test is not root it is another user itself."""
    cache.write("entry", b"content")
    if os.geteuid() == 0:
        os.chown(cache.folder / "entry" if owner == "file" else cache.folder, 65534, 65534)
    else:
        monkeypatch.setattr(caches.os, "geteuid", lambda: 0)  # type: ignore[attr-defined]
    assert cache.read("entry") is None and cache.file("entry") is None
    if owner == "folder":
        cache.write("more", b"content")
        assert not (cache.folder / "more").exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "folder that is a link"])
def test_only_plain_files_are_read_and_nothing_is_followed(cache: Cache, tmp_path: Path, kind: str) -> None:
    cache.write("entry", b"content")
    path, victim = cache.folder / "entry", tmp_path / "victim"
    content = path.read_bytes()
    victim.write_bytes(content)
    os.chmod(victim, 0o600)
    if kind == "folder that is a link":
        cache.folder.rename(tmp_path / "elsewhere")
        cache.folder.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        {"link": lambda: path.symlink_to(victim), "dangling": lambda: path.symlink_to(tmp_path / "none"),
         "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()  # fmt: skip
    start = time.monotonic()
    assert cache.read("entry") is None and cache.file("entry") is None
    cache.write("entry", b"new")
    assert time.monotonic() - start < 5 and victim.read_bytes() == content
    if kind in ("link", "dangling", "fifo"):
        assert cache.read("entry") == b"new" and not path.is_symlink()


def test_an_entry_is_taken_under_its_own_name_only(cache: Cache) -> None:
    cache.write("a", b"of a")
    os.link(cache.folder / "a", cache.folder / "b")
    assert cache.read("a") == b"of a" and cache.read("b") is None
    for damage in (b"", b"x", (cache.folder / "a").read_bytes()[:-1], (cache.folder / "a").read_bytes() + b"x"):
        (cache.folder / "a").write_bytes(damage)
        assert cache.read("a") is None


def test_what_was_not_used_for_longest_goes(cache: Cache) -> None:
    cache.most = 1 << 20
    for age, name in enumerate("abcd"):
        cache.keep(name, bytes(400))
        os.utime(cache.folder / name, (1000 + age, 1000 + age))
    (cache.folder / ".b.tmp").write_bytes(b"left by a writer that was killed")
    os.utime(cache.folder / ".b.tmp", (1000, 1000))
    (cache.folder / ".c.tmp").write_bytes(b"of a writer at work")
    assert cache.file("a") is not None  # used now
    cache.most = 1000
    cache.trim()
    assert sorted(file.name for file in cache.folder.iterdir()) == [".c.tmp", "a", "d"]


def test_a_cache_stays_below_its_size(cache: Cache) -> None:
    for k in range(60):
        cache.keep(f"{k}", bytes(100))
        assert sum(file.stat().st_size for file in cache.folder.iterdir()) <= cache.most + 200


FAILING = ["fdopen", "fsync", "chmod", "replace"]


@pytest.mark.parametrize("call", FAILING)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    target = tmp_path / "model.lap"
    target.write_bytes(b"old")
    monkeypatch.setattr(files.os, call, fail)  # type: ignore[attr-defined]
    with pytest.raises(type(error)), files.replace(target) as file:
        file.write(b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A process whose files may have 4 kB: the system itself refuses the write, after a part of it."""
    code = """
    import os, resource, signal, sys, warnings
    from pathlib import Path
    from lapilli.runtime import files
    from lapilli.runtime.cache import Cache
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    cache = Cache("things", 1000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in ("entry", "another"):
            cache.write(name, bytes(100_000))
            assert cache.read(name) is None and list(cache.folder.iterdir()) == []
    (warning,) = said
    assert str(cache.folder) in str(warning.message) and "File too large" in str(warning.message)
    try:
        with files.replace("model.lap") as file:
            file.write(bytes(100_000))
    except OSError:
        print(sorted(os.listdir()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"LAPILLI_CACHE_DIR": str(tmp_path / "base"), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['base']"


def test_without_a_folder_that_can_be_written_everything_works_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").write_bytes(b"no folder")
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(caches, "_warned", False)
    first, second = Cache("one", 1000), Cache("two", 1000)
    with pytest.warns(RuntimeWarning, match="LAPILLI_CACHE_DIR") as said:
        for cache in (first, second):
            cache.write("entry", b"content")
            assert cache.keep("file", b"content") is None
            assert cache.read("entry") is None and cache.file("file") is None
            cache.trim()
    assert len(said) == 1


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    """They write, read and remove the same entries at once: what is read is whole, and the folder stays small."""
    code = """
    import random, sys, warnings
    from lapilli.runtime.cache import Cache
    warnings.simplefilter("error")
    cache, choice, found = Cache("things", 20_000), random.Random(int(sys.argv[1])), 0
    for step in range(600):
        key = str(choice.randrange(40))
        if step % 3 == 0:
            cache.write(key, key.encode() * 500)
        elif step % 50 == 1:
            cache.trim()
        else:
            content = cache.read(key)
            found += content is not None
            assert content in (None, key.encode() * 500)
    assert found > 20
    """
    environment = os.environ | {"LAPILLI_CACHE_DIR": str(tmp_path / "base"), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(k)], env=environment, stderr=subprocess.PIPE)
        for k in range(4)
    ]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    left = list((tmp_path / "base" / "things").iterdir())
    assert not [file for file in left if file.name.startswith(".")]
    assert sum(file.stat().st_size for file in left) <= 20_000 + 4 * (20_000 // 32 + 2 * 1032)


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.lap"
    program = tiny.scales(np.ones(3, np.float32))
    path.write_bytes(program)
    code = (
        "import os, sys\nfrom lapilli.runtime import files\n"
        "with files.replace(sys.argv[1]) as file:\n    file.write(b'half')\n    file.flush()\n    os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=environment).returncode == -9
    assert path.read_bytes() == program
    lapilli.load(path).close()
