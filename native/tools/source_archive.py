"""Write the source archive: the player, its tools and examples, and what is generated, for CMake and a C++20 compiler alone; it
is a Swift package and a pod, too.

    python source_archive.py --version 0.1.0 --generated BUILD/generated --flatbuffers FOLDER --output BUILD

The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import tarfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1]
FOLDERS = ("apps", "cmake", "examples", "include", "jni", "schema", "src")
GENERATED = ("program_generated.h", "vulkan_api.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*"(flatbuffers/[^"]+)"', re.MULTILINE)


def flatbuffers_headers(folder: Path) -> dict[str, bytes]:
    """The headers of FlatBuffers that the generated one includes, and those that they include."""
    found: dict[str, bytes] = {}
    left = ["flatbuffers/flatbuffers.h"]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = (folder / name).read_bytes()
            left += INCLUDE.findall(found[name].decode())
    return found


def contents(generated: Path, flatbuffers: Path) -> dict[str, bytes]:
    """What the archive holds, by the path in it."""
    files = {name: (NATIVE / name).read_bytes() for name in ("CMakeLists.txt", "CMakePresets.json")}
    for folder in FOLDERS:
        for path in sorted((NATIVE / folder).rglob("*")):
            name = path.relative_to(NATIVE).as_posix()
            if path.is_file() and not name.startswith("src/hal/null/"):
                files[name] = path.read_bytes()
    for name in GENERATED:
        files[f"generated/{name}"] = (generated / name).read_bytes()
    for name, text in flatbuffers_headers(flatbuffers).items():
        files[f"generated/{name}"] = text
    apple = NATIVE.parent / "apple"
    files |= {name: (apple / name).read_bytes() for name in ("Package.swift", "Lapilli.podspec")}
    for name in ("LapilliModule.mm", "include/LapilliModule.h"):
        files[f"apple/{name}"] = (apple / name).read_bytes()
    files["LICENSE"] = (NATIVE.parent / "LICENSE").read_bytes()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True)
    parser.add_argument("--generated", type=Path, required=True)
    parser.add_argument("--flatbuffers", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    root = f"lapilli-{arguments.version}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(contents(arguments.generated, arguments.flatbuffers).items()):
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    target = arguments.output / f"{root}.tar.gz"
    target.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    print(target)


if __name__ == "__main__":
    main()
