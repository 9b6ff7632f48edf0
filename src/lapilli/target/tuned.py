"""Which records there are for a device: those that ship with the package (`measured/`), and above them the user's, in the cache."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path

from lapilli.errors import InvalidFileError
from lapilli.runtime.cache import Cache
from lapilli.runtime.devices import Device
from lapilli.target.records import KernelRecord, Measured, Records

CACHE = Cache("tuned", 1 << 26)
SHIPPED = Path(__file__).with_name("measured")

_State = tuple[tuple[str, int, int], ...]


def records_of(device: Device) -> Records:
    """The records that count for a device: those of its name and its driver. Of a device that is known but not there (`KNOWN`),
    which has no driver, those that ship, whatever the driver."""
    if not device.driver:
        return _known(device.name)
    return _of_driver(device.name, device.driver, _state())


def own(device: Device) -> Records:
    """The user's alone."""
    return Records(r for found in _read_all(_own_files()) if _is_for(found, device) for r in found.records)


def has_own() -> bool:
    """Whether the user has records of any device."""
    return bool(_own_files())


def save(device: Device, records: Iterable[KernelRecord]) -> None:
    """Adds to the user's records; of equal questions the new ones stay. Writes the file at once, and whole."""
    joined = own(device).joined(records)
    CACHE.keep(
        _name(device.name, device.driver), Measured(device.name, device.driver, tuple(joined)).to_text().encode()
    )


def bring(path: Path) -> Measured:
    """Adds records from a file, which may be another device's, to the user's. Raises InvalidFileError."""
    found = read(path)
    name = _name(found.device, found.driver)
    kept = [
        r for m in _read_all(_own_files()) if (m.device, m.driver) == (found.device, found.driver) for r in m.records
    ]
    CACHE.keep(
        name, Measured(found.device, found.driver, tuple(Records(kept).joined(found.records))).to_text().encode()
    )
    return found


def read(path: Path) -> Measured:
    """A file of records. Raises InvalidFileError if it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidFileError(f"{path} is not text, so that it has no records.") from None
    return Measured.of_text(text, str(path))


def _is_for(found: Measured, device: Device) -> bool:
    return (found.device, found.driver) == (device.name, device.driver)


def _name(device: str, driver: str) -> str:
    """Of a file: readable, and different for different devices and drivers."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{device} {driver}".lower()).strip("-")[:60]
    return f"{words}-{hashlib.sha256(repr((device, driver)).encode()).hexdigest()[:8]}.jsonl"


def _own_files() -> list[Path]:
    names = sorted(p.name for p in CACHE.folder.glob("*.jsonl")) if CACHE.folder.is_dir() else []
    return [path for name in names if (path := CACHE.file(name)) is not None]


def _state() -> _State:
    """What the user's files are now, so that they are read again only when they have changed."""
    found = [(str(path), path.stat()) for path in _own_files()]
    return tuple((name, info.st_mtime_ns, info.st_size) for name, info in found)


@lru_cache(maxsize=8)
def _of_driver(device: str, driver: str, state: _State) -> Records:
    files = [*sorted(SHIPPED.glob("*.jsonl")), *(Path(name) for name, _, _ in state)]
    return Records(r for m in _read_all(files) if (m.device, m.driver) == (device, driver) for r in m.records)


@lru_cache(maxsize=32)
def _known(device: str) -> Records:
    files = sorted(SHIPPED.glob("*.jsonl"))
    return Records(r for m in _read_all(files) if device.lower() in m.device.lower() for r in m.records)


def _read_all(paths: Iterable[Path]) -> Iterator[Measured]:
    """What files hold. A damaged one is left out, with a warning."""
    for path in paths:
        try:
            yield read(path)
        except (InvalidFileError, OSError) as error:
            _warn(str(error))


@cache
def _warn(message: str) -> None:
    warnings.warn(
        f"Records of measured kernels are not used: {message} Remove the file, or run `lapilli tune` again.",
        RuntimeWarning,
        stacklevel=2,
    )
