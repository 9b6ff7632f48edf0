"""Whether a library is what a Mac with arm64 loads: its load commands, what it needs of others, what it exports.

    python check_apple_library.py LIBRARY [ABI]

ABI (tests/kept/abi.txt) has the functions that are promised: the library exports each of them, and nothing else but C++'s operators
new and delete, and two names of the linker, which zig hides by none of its options. (They call malloc and free, as anybody's do.)
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC, ARM64, DYLIB, TWO_LEVELS = 0xFEEDFACF, 0x0100000C, 6, 0x80
DYLD_INFO, EXPORTS = 0x22, 0x33
SEGMENT, SYMBOLS, LOAD_DYLIB, ID_DYLIB, BUILD_VERSION, CODE_SIGNATURE = 0x19, 0x2, 0xC, 0xD, 0x32, 0x1D
MACOS = 1
NAME = "@rpath/liblapilli.dylib"
NEEDED = {"/usr/lib/libSystem.B.dylib"}
LEAST = (11, 0)
PAGE = 16384
OF_ZIG = re.compile(r"_Z(n[wa]m|d[la]Pvm?)(St11align_val_t)?|__dso_handle|_mh_dylib_header")
EXTERNAL, DEFINED, STAB = 0x01, 0x0E, 0xE0


class Library:
    """A Mach-O file of 64 bits, little-endian, with one architecture."""

    def __init__(self, data: bytes) -> None:
        magic, self.processor, _, self.type, count, _, self.flags, _ = struct.unpack_from("<8I", data)
        if magic != MAGIC:
            raise ValueError("no Mach-O file of 64 bits, little-endian")
        self.data = data
        self.commands: list[tuple[int, int]] = []  # kind and place
        at = 32
        for _ in range(count):
            kind, size = struct.unpack_from("<2I", data, at)
            self.commands.append((kind & 0x7FFFFFFF, at))
            at += size

    def of(self, kind: int) -> Iterator[int]:
        return (at for k, at in self.commands if k == kind)

    def text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def libraries(self, kind: int) -> list[str]:
        return [self.text(at + struct.unpack_from("<I", self.data, at + 8)[0]) for at in self.of(kind)]

    def versions(self, kind: int) -> list[tuple[str, str]]:
        """The current and the compatible version of libraries."""
        packed = (struct.unpack_from("<2I", self.data, at + 16) for at in self.of(kind))
        return [(_version(current), _version(compatible)) for current, compatible in packed]

    def exported(self) -> set[str]:
        """What dyld finds in it: the names in its trie of exports."""
        tables = [(at, 40) for at in self.of(DYLD_INFO)] + [(at, 8) for at in self.of(EXPORTS)]
        found: set[str] = set()
        for command, place in tables:
            start, size = struct.unpack_from("<2I", self.data, command + place)
            left = [(start, b"")] if size else []
            while left:
                at, prefix = left.pop()
                length, at = self._number(at)
                if length:
                    found.add(prefix.decode())
                at += length
                count = self.data[at]
                at += 1
                for _ in range(count):
                    end = self.data.index(b"\0", at)
                    node, next_at = self._number(end + 1)
                    left.append((start + node, prefix + self.data[at:end]))
                    at = next_at
        return found

    def own_exports(self) -> set[str]:
        """The names in C, without those of zig."""
        names = {name.removeprefix("_") for name in self.exported()}
        return {name for name in names if not OF_ZIG.fullmatch(name)}

    def _number(self, at: int) -> tuple[int, int]:
        """A number of 7 bits a byte, and where it ends."""
        value = shift = 0
        while True:
            byte = self.data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    def symbols(self) -> Iterator[tuple[str, bool]]:
        """The external ones: names, and whether they are defined here."""
        for at in self.of(SYMBOLS):
            table, count, strings, _ = struct.unpack_from("<4I", self.data, at + 8)
            for i in range(count):
                name, kind, _, _, _ = struct.unpack_from("<IBBHQ", self.data, table + 16 * i)
                if kind & EXTERNAL and not kind & STAB:
                    yield self.text(strings + name), bool(kind & DEFINED)

    def segments(self) -> Iterator[tuple[str, int, int]]:
        """Name, address and size in memory."""
        for at in self.of(SEGMENT):
            name, address, size = struct.unpack_from("<16s2Q", self.data, at + 8)
            yield name.rstrip(b"\0").decode(), address, size


def _version(packed: int) -> str:
    return f"{packed >> 16}.{packed >> 8 & 255}.{packed & 255}"


def promised(abi: str) -> set[str]:
    """The functions of tests/kept/abi.txt."""
    return {m.group(1) for m in re.finditer(r"^function .*?\b(lapilli_\w+)\(", abi, re.M)}


def problems(library: Library, functions: set[str]) -> list[str]:
    """What is wrong, a line for each."""
    found = []
    if (library.processor, library.type) != (ARM64, DYLIB):
        found.append(f"it is type {library.type} for processor {library.processor:#x}, and no library for arm64")
    if not library.flags & TWO_LEVELS:
        found.append("its imports do not say of which library they are")
    if library.libraries(ID_DYLIB) != [NAME]:
        found.append(f"its name is {library.libraries(ID_DYLIB)}, and should be {NAME}")
    if set(library.libraries(LOAD_DYLIB)) != NEEDED:
        found.append(f"it needs {library.libraries(LOAD_DYLIB)}, and should need {sorted(NEEDED)}")
    builds = [struct.unpack_from("<2I", library.data, at + 8) for at in library.of(BUILD_VERSION)]
    if [(platform, (least >> 16, least >> 8 & 255)) for platform, least in builds] != [(MACOS, LEAST)]:
        found.append(f"it is built for {builds}, and should be for macOS {LEAST}")
    if not list(library.of(CODE_SIGNATURE)):
        found.append("it has no signature, without which arm64 loads nothing")
    found += [f"segment {name} begins at {at:#x}, within a page" for name, at, _ in library.segments() if at % PAGE]
    exported = library.own_exports()
    found += [f"it does not export {name}, which is promised" for name in sorted(functions - exported)]
    found += [f"it exports {name}, which is not promised" for name in sorted(exported - functions)]
    return found


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    abi = Path(arguments[1] if len(arguments) > 1 else Path(__file__).parents[1] / "tests" / "kept" / "abi.txt")
    library, functions = Library(path.read_bytes()), promised(abi.read_text())
    found = problems(library, functions)
    imports = sum(1 for _, defined in library.symbols() if not defined)
    (current, compatible), *_ = [*library.versions(ID_DYLIB), ("?", "?")]
    print(
        "\n".join(f"{path}: {text}" for text in found)
        or f"{path}: {len(library.data):,} bytes, version {current} (compatible with {compatible}), "
        f"macOS {LEAST[0]}.{LEAST[1]} and newer, {len(functions)} functions, {imports} imports of libSystem"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
