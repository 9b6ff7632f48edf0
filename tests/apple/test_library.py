"""The library for macOS that zig linked (tools/apple_library.sh): it cannot be run here, so it is read."""

from __future__ import annotations

import struct
from pathlib import Path

import check_apple_library as checked
import pytest

ROOT = Path(__file__).parents[2]
DATA = (ROOT / "build" / "apple" / "liblapilli.dylib").read_bytes()
FUNCTIONS = checked.promised((ROOT / "tests" / "kept" / "abi.txt").read_text())


def problems(data: bytes) -> list[str]:
    return checked.problems(checked.Library(data), FUNCTIONS)


def test_it_is_what_a_mac_loads() -> None:
    assert problems(DATA) == []
    assert len(FUNCTIONS) > 50 and len(DATA) < 2_000_000
    imports = {name for name, defined in checked.Library(DATA).symbols() if not defined}
    assert {"_dlopen", "_dlsym"} <= imports and not any("vk" in name.lower()[:3] for name in imports)


@pytest.mark.parametrize(
    "command, offset, value, said",
    [
        (checked.BUILD_VERSION, 12, 12 << 16, "should be for macOS"),
        (checked.BUILD_VERSION, 8, 2, "should be for macOS"),
        (checked.LOAD_DYLIB, 0, 0x99, "it needs"),
        (checked.ID_DYLIB, 0, 0x99, "its name is"),
        (checked.CODE_SIGNATURE, 0, 0x99, "no signature"),
        (None, 12, 2, "no library for arm64"),
        (None, 24, 0, "its imports do not say"),
    ],
)
def test_another_one_is_refused(command: int | None, offset: int, value: int, said: str) -> None:
    at = 0 if command is None else next(checked.Library(DATA).of(command))
    changed = bytearray(DATA)
    struct.pack_into("<I", changed, at + offset, value)
    assert any(said in line for line in problems(bytes(changed)))


def test_functions_are_those_that_are_promised() -> None:
    library = checked.Library(DATA)
    assert checked.problems(library, FUNCTIONS | {"lapilli_new"}) == [
        "it does not export lapilli_new, which is promised"
    ]
    assert checked.problems(library, FUNCTIONS - {"lapilli_load"}) == ["it exports lapilli_load, which is not promised"]
    with pytest.raises(ValueError, match="no Mach-O file"):
        problems((ROOT / "README.md").read_bytes())
