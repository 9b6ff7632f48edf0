"""Caches on disk: kernels, eager programs, optimized modules. Their content is executed without further checks, so that
only files of this user are trusted.

A folder is private (0700, files 0600). A file is not read if it is another user's, writable by others, or a link. An entry
begins with a digest of its name and content, which detects damage. Entries are written atomically, so that several
processes may share a folder. A cache that cannot be written is not an error: a warning says so once, and everything is
compiled again. If a cache exceeds its size, the least recently used entries are removed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

from lapilli.runtime.files import replace

_DIGEST = hashlib.sha256().digest_size
_DAY = 86400.0


def base() -> Path:
    """$LAPILLI_CACHE_DIR, or by default the user's cache folder."""
    given = os.environ.get("LAPILLI_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lapilli"


def files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files in a folder, without symbolic links; none if it cannot be read."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process was faster
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found.append((Path(entry.path), info))
    return found


class Cache:
    """One folder of the cache. most: the number of bytes that it may hold."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self._unseen: int | None = None  # bytes written since the folder was last scanned; None: never
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        return base() / self.name

    def read(self, key: str) -> bytes | None:
        """The content passed to `write`; None if it is missing, damaged, or not this user's."""
        try:
            if not _is_private(self.folder):
                return None
            entry = _read(self.folder / key)
        except OSError:
            return None
        content = entry[_DIGEST:]
        return content if _digest(key, content) == entry[:_DIGEST] else None

    def write(self, key: str, content: bytes) -> None:
        """Writes an entry atomically."""
        self._store(key, (_digest(key, content), content))

    def file(self, key: str) -> Path | None:
        """The path of a file written by `keep`, for files with a checksum of their own; None as for `read`."""
        path = self.folder / key
        try:
            if not _is_private(self.folder):
                return None
            os.close(_open(path))
        except OSError:
            return None
        return path

    def keep(self, key: str, content: bytes) -> Path | None:
        """Writes a file as it is. Returns its path, or None if that fails."""
        self._store(key, (content,))
        return self.file(key)

    def trim(self) -> None:
        """Removes the least recently used files until the others fit, and temporary files of writers that were killed."""
        found = []
        for path, info in files(self.folder):
            if path.name.startswith("."):  # a temporary file of `replace`
                if time.time() - info.st_mtime > _DAY:
                    _remove(path)
            else:
                found.append((info.st_mtime, info.st_size, path))
        excess = sum(size for _, size, _ in found) - self.most
        for _, size, path in sorted(found)[:-1]:
            if excess <= 0:
                return
            _remove(path)
            excess -= size

    def _store(self, key: str, parts: tuple[bytes, ...]) -> None:
        try:
            _make_private(self.folder)
            with replace(self.folder / key, private=True) as file:
                for part in parts:
                    file.write(part)
        except OSError as error:
            _warn(self.folder, error)
            return
        with self._lock:
            due = self._unseen is None or self._unseen > self.most // 32
            self._unseen = 0 if due or self._unseen is None else self._unseen + sum(map(len, parts))
        if due:
            self.trim()


_warned = False


def _warn(folder: Path, error: OSError) -> None:
    """Warns, once per process, that nothing is cached."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"Lapilli cannot cache compiled code in {folder} ({error.strerror or error}), and compiles it again every time. "
        "Set LAPILLI_CACHE_DIR to use another folder.",
        RuntimeWarning,
        stacklevel=4,
    )


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _is_ours(info: os.stat_result) -> bool:
    """Whether nobody else can have written it. (Windows separates the users' folders itself.)"""
    return not hasattr(os, "geteuid") or (info.st_uid == os.geteuid() and not info.st_mode & 0o022)


def _is_private(folder: Path) -> bool:
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and _is_ours(info)


def _make_private(folder: Path) -> None:
    """Raises OSError if the folder is not private and cannot be made so."""
    if not folder.parent.exists():
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = os.lstat(folder)
    if hasattr(os, "geteuid") and stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and info.st_mode & 0o077:
        os.chmod(folder, 0o700)  # created by an earlier version, or with a permissive umask
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")


def _open(path: Path) -> int:
    """Opens a file. Raises OSError unless it is a regular file of this user."""
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, os.O_RDONLY | extra)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or not _is_ours(info):
            raise PermissionError(f"{path} is not a file of this user's alone")
        if time.time() - info.st_mtime > _DAY:
            with suppress(OSError):
                os.utime(handle if os.utime in os.supports_fd else path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _read(path: Path) -> bytes:
    with os.fdopen(_open(path), "rb") as file:
        return file.read()


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
