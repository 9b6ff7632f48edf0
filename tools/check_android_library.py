"""Whether Android 8 (API 26) can load a library: what it needs of others, and how its segments lie.

    python check_android_library.py ABI LIBRARY [SYMBOLS]

SYMBOLS (android/api26.txt) lists names that Android's C library has in API 26; what the library imports must be among them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MACHINES = {"arm64-v8a": 183, "x86_64": 62}
NEEDED = {"libc.so", "libm.so", "libdl.so"}
PAGE = 16384  # of the newest devices
PT_LOAD, PT_DYNAMIC, PT_TLS = 1, 2, 7
DT_NEEDED, DT_SONAME, DT_TEXTREL, DT_VERNEED = 1, 14, 22, 0x6FFFFFFE


class Library:
    """A shared library of 64 bits, little-endian."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no ELF file of 64 bits, little-endian")
        self.data = data
        self.machine = struct.unpack_from("<H", data, 18)[0]
        (programs, sections), (n_programs, _, n_sections) = (
            struct.unpack_from("<QQ", data, 32),
            struct.unpack_from("<HHH", data, 56),
        )
        self.segments = [struct.unpack_from("<IIQQQQQQ", data, programs + 56 * i) for i in range(n_programs)]
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections + 64 * i) for i in range(n_sections)]

    def text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def dynamic(self) -> Iterator[tuple[int, int]]:
        for kind, _, offset, _, _, size, *_ in self.segments:
            if kind == PT_DYNAMIC:
                yield from struct.iter_unpack("<qQ", self.data[offset : offset + size])

    def symbols(self) -> Iterator[tuple[str, int, int]]:
        """Name, binding and section (0: imported) of the dynamic symbols."""
        for section in self.sections:
            if section[1] == 11:  # SHT_DYNSYM
                strings = self.sections[section[6]][4]
                for at in range(section[4] + 24, section[4] + section[5], 24):
                    name, info, _, index = struct.unpack_from("<IBBH", self.data, at)
                    yield self.text(strings + name), info >> 4, index

    def strings(self) -> int:
        return next(s[4] for s in (self.sections[s[6]] for s in self.sections if s[1] == 11))


def problems(abi: str, library: Library, known: set[str]) -> list[str]:
    """What is wrong, a line for each."""
    found = []
    if library.machine != MACHINES[abi]:
        found.append(f"it is for machine {library.machine}, and {abi} is {MACHINES[abi]}")
    tags = list(library.dynamic())
    needed = {library.text(library.strings() + value) for tag, value in tags if tag == DT_NEEDED}
    if needed != NEEDED:
        found.append(f"it needs {sorted(needed)}, and should need {sorted(NEEDED)}")
    if any(tag == DT_TEXTREL for tag, _ in tags):
        found.append("it has relocations in its code")
    if any(tag == DT_VERNEED for tag, _ in tags):
        found.append("it wants versions of symbols, which Android's libraries do not have")
    for kind, _, offset, address, _, _, _, align in library.segments:
        if kind == PT_TLS:
            found.append("it has thread-local variables of ELF, which Android has since API 29 only")
        if kind == PT_LOAD and (align < PAGE or (offset - address) % PAGE != 0):
            found.append(f"a segment is aligned to {align} bytes, and pages may have {PAGE}")
    imports = sorted(name for name, _, index in library.symbols() if index == 0)
    found += [f"it imports {name}, which is not in the list of API 26" for name in imports if name not in known]
    exports = [name for name, _, index in library.symbols() if index != 0]
    found += [f"it exports {name}" for name in exports if name != "JNI_OnLoad" and not name.startswith("lapilli_")]
    if "JNI_OnLoad" not in exports or "lapilli_load" not in exports:
        found.append("it does not export JNI_OnLoad and lapilli_load")
    return found


def main(arguments: list[str]) -> int:
    abi, path = arguments[:2]
    names = Path(arguments[2] if len(arguments) > 2 else Path(__file__).parents[1] / "android" / "api26.txt")
    known = {line for line in names.read_text().splitlines() if line and not line.startswith("#")}
    library = Library(Path(path).read_bytes())
    found = problems(abi, library, known)
    imports = sum(1 for _, _, index in library.symbols() if index == 0)
    print(
        "\n".join(f"{path}: {text}" for text in found)
        or f"{abi}: {len(library.data):,} bytes, {imports} imports, all in API 26"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
