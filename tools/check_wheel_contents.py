"""Whether a wheel is what its name says: tags, files, and what its player needs of a system; for wheels of any system.

python tools/check_wheel_contents.py WHEEL...
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import check_apple_library
from check_android_library import DT_NEEDED, Library

ROOT = Path(__file__).parents[1]
MADE = {"lapilli/abi.py", "lapilli/program/schema.py", "lapilli/lapilli.h"}  # by the build, beside the player
LOADER = r"ld-(linux|musl)-[\w-]+\.so\.\d"


@dataclass(frozen=True)
class System:
    """A kind of platform tag: the name of the player there, and the libraries that every such system has."""

    tag: str
    library: str
    needs: str


SYSTEMS = (
    System(r"(many)?linux(_\d+_\d+)?_(x86_64|aarch64)", "liblapilli.so", rf"lib(c|m|dl|rt|pthread)\.so\.\d|{LOADER}"),
    System(r"musllinux_\d+_\d+_(x86_64|aarch64)", "liblapilli.so", rf"libc\.so|libc\.musl-\w+\.so\.1|{LOADER}"),
    System(r"win_amd64", "lapilli.dll", r"(?i)(kernel32|ntdll|advapi32|shell32|ole32|api-ms-win-[\w-]+)\.dll"),
    System(r"macosx_11_0_arm64", "liblapilli.dylib", r"/usr/lib/(libSystem\.B|libc\+\+\.1)\.dylib"),
)
MACHINES = {62: "x86_64", 183: "aarch64", 0x8664: "amd64", 0x100000C: "arm64"}  # of ELF, PE and Mach-O


@dataclass(frozen=True)
class Player:
    """What a shared library says of itself."""

    machine: str
    needs: frozenset[str]
    exports: frozenset[str]


def elf(data: bytes) -> Player:
    library = Library(data)
    needs = {library.text(library.strings() + value) for tag, value in library.dynamic() if tag == DT_NEEDED}
    exports = {name for name, _, section in library.symbols() if section != 0}
    return Player(MACHINES.get(library.machine, "?"), frozenset(needs), frozenset(exports))


def text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def pe(data: bytes) -> Player:
    """A DLL of 64 bits: its tables are found by addresses, which sections map to places in the file."""
    head = struct.unpack_from("<I", data, 0x3C)[0] + 4
    machine, n_sections, size = struct.unpack_from("<HH12xH", data, head)
    optional = head + 20
    if struct.unpack_from("<H", data, optional)[0] != 0x20B:
        raise ValueError("no PE file of 64 bits")
    sections = [struct.unpack_from("<8xIIII", data, optional + size + 40 * i) for i in range(n_sections)]

    def place(address: int) -> int:
        start, offset = next((s[1], s[3]) for s in sections if s[1] <= address < s[1] + max(s[0], s[2]))
        return offset + address - start

    exported, imported = (struct.unpack_from("<I", data, optional + 112 + 8 * i)[0] for i in range(2))
    needs, at = set(), place(imported)
    while name := struct.unpack_from("<12xI", data, at)[0]:
        needs.add(text(data, place(name)))
        at += 20
    n_names, names = struct.unpack_from("<24xI4xI", data, place(exported))
    exports = {
        text(data, place(a)) for (a,) in struct.iter_unpack("<I", data[place(names) : place(names) + 4 * n_names])
    }
    return Player(MACHINES.get(machine, "?"), frozenset(needs), frozenset(exports))


def mach_o(data: bytes) -> Player:
    """A dylib of 64 bits. Without a code signature arm64 would not load it."""
    library = check_apple_library.Library(data)
    if not list(library.of(check_apple_library.CODE_SIGNATURE)):
        raise ValueError("no code signature")
    needs = library.libraries(check_apple_library.LOAD_DYLIB)
    return Player(MACHINES.get(library.processor, "?"), frozenset(needs), frozenset(library.own_exports()))


def read_player(data: bytes) -> Player:
    """By the first bytes of the file."""
    for magic, reader in ((b"\x7fELF", elf), (b"MZ", pe), (b"\xcf\xfa\xed\xfe", mach_o)):
        if data.startswith(magic):
            return reader(data)
    raise ValueError("neither ELF, PE nor Mach-O")


def functions() -> set[str]:
    """Those that docs/versions.md promises of the C interface."""
    return check_apple_library.promised((ROOT / "tests" / "kept" / "abi.txt").read_text(encoding="utf-8"))


def player_problems(data: bytes, platform: str, system: System) -> list[str]:
    try:
        player = read_player(data)
    except (ValueError, struct.error, StopIteration) as error:
        return [f"{system.library} cannot be read: {error}"]
    found = []
    if not platform.endswith(f"_{player.machine}"):
        found.append(f"{system.library} is for {player.machine}")
    found += [f"{system.library} needs {n}" for n in sorted(player.needs) if not re.fullmatch(system.needs, n)]
    found += [f"{system.library} does not export {name}" for name in sorted(functions() - player.exports)]
    found += [f"{system.library} exports {n}" for n in sorted(player.exports) if not n.startswith("lapilli_")]
    return found


def record_problems(archive: zipfile.ZipFile, info: str) -> list[str]:
    """Every file is listed with its hash, and nothing else is."""
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode()))}
    found = [
        f"RECORD differs about {n}" for n in sorted(set(archive.namelist()) ^ listed.keys()) if not n.endswith("/")
    ]
    for name, known in listed.items():
        if known and name in archive.namelist():
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            if known != f"sha256={digest}":
                found.append(f"{name} has another hash than RECORD says")
    return found


def problems(path: Path) -> list[str]:
    """What is wrong with a wheel, a line for each."""
    *_, python, abi, platform = path.stem.split("-")
    system = next((s for s in SYSTEMS if re.fullmatch(s.tag, platform)), None)
    if system is None or (python, abi) != ("py3", "none"):
        return [f"its name ends in {python}-{abi}-{platform}; py3-none and a platform of tools/wheels.sh are accepted"]
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(n.partition("/")[0] for n in sorted(names) if n.endswith(".dist-info/WHEEL"))
        found = record_problems(archive, info)
        tags = re.findall(r"^Tag: (.*?)\r?$", archive.read(f"{info}/WHEEL").decode(), re.M)
        if tags != [f"py3-none-{platform}"]:
            found.append(f"its name says {platform}, its WHEEL {tags}")
        sources = {f"lapilli/{file.relative_to(ROOT / 'src' / 'lapilli').as_posix()}" for file in source_files()}
        wanted = sources | MADE | {f"lapilli/{system.library}"}
        found += [f"{name} is missing" for name in sorted(wanted - names)]
        found += [f"{n} does not belong there" for n in sorted(names - wanted) if not n.startswith(f"{info}/")]
        needed = re.findall(
            r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", archive.read(f"{info}/METADATA").decode(), re.M
        )
        if sorted(needed) != ["cffi", "numpy"]:
            found.append(f"it needs {needed}, and cffi and numpy are enough for the player")
        found += [
            f"{info} has no {what}"
            for what in ("LICENSE", "entry_points.txt")
            if not any(n.startswith(f"{info}/") and n.endswith(what) for n in names)
        ]
        if f"lapilli/{system.library}" in names:
            found += player_problems(archive.read(f"lapilli/{system.library}"), platform, system)
    return found


def source_files() -> list[Path]:
    """Of the package, without what Python leaves beside them."""
    return [f for f in (ROOT / "src" / "lapilli").rglob("*") if f.is_file() and "__pycache__" not in f.parts]


def main(wheels: list[str]) -> int:
    """How many of them are wrong."""
    wrong = 0
    for name in wheels:
        found = problems(Path(name))
        wrong += bool(found)
        print(
            "\n".join(f"{name}: {line}" for line in found)
            or f"{Path(name).name}: {Path(name).stat().st_size:,} bytes, as it should be"
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
