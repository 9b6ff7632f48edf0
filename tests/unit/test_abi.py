"""The C interface of today stays: functions, values, sizes and places of members, as tests/kept/abi.txt has them.

What is new is added to the file by LAPILLI_ACCEPT=1; what is there is changed by hand, with a new major version
(docs/versions.md)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lapilli.abi import ffi
from lapilli.player import _library_file

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "kept" / "abi.txt"
HEADER = (ROOT / "native" / "include" / "lapilli.h").read_text(encoding="utf-8")


def today() -> list[str]:
    """The interface in lines, of which each stands by itself."""
    lines = []
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    for declared in re.findall(r"^[a-z][\w \t*]*?\blapilli_\w+\([^;{]*\);", text, re.M):
        lines.append("function " + re.sub(r"\s+", " ", declared).replace("( ", "("))
    typedefs, _, _ = ffi.list_types()
    for name in sorted(typedefs):
        kind = ffi.typeof(name)
        if kind.kind == "enum":
            lines += [f"value {name}.{label} = {value}" for value, label in sorted(kind.elements.items())]
            continue
        if f"typedef struct {name} {{" not in HEADER:  # no members to see
            continue
        members = dict(kind.fields)
        lines += [f"member {name}.{m}: {f.type.cname} at {f.offset}" for m, f in members.items()]
        if "struct_size" not in members:  # the others may grow at their end: the caller says how large its own is
            lines.append(f"size {name} = {ffi.sizeof(name)}")
    return lines


@pytest.mark.skipif(ffi.sizeof("void *") != 8, reason="the file is that of 64-bit machines")
def test_the_interface_stays() -> None:
    now = today()
    assert len(now) > 150 and len(set(now)) == len(now)
    kept = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    gone = [line for line in kept if line not in now]
    assert not gone, "programs that were linked with an earlier player break: docs/versions.md"
    new = [line for line in now if line not in kept]
    if new and os.environ.get("LAPILLI_ACCEPT"):
        KEPT.write_text("\n".join([*kept, *new, ""]), encoding="utf-8")
        new = []
    assert not new, "LAPILLI_ACCEPT=1 adds them to tests/kept/abi.txt: then they are promised"


def test_the_library_has_every_function() -> None:
    library = ffi.dlopen(str(_library_file()))
    names = [re.search(r"(lapilli_\w+)\(", line).group(1) for line in today() if line.startswith("function")]
    assert len(names) > 50
    missing = []
    for name in names:
        try:
            getattr(library, name)
        except AttributeError:
            missing.append(name)
    assert not missing
