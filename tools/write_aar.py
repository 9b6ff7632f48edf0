"""Write lapilli.aar and lapilli-pytorch.jar from compiled classes and libraries. The same inputs give the same bytes.

    python write_aar.py CLASSES OUTPUT ABI=LIBRARY...

CLASSES has the folders lapilli and pytorch of java_classes.sh. The package has classes.jar, a manifest, rules for ProGuard, the
libraries, and, as a prefab package, the headers of C and C++.
"""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1_500_000  # bytes of the package


def packed(files: Mapping[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return memory.getvalue()


def jar(folder: Path) -> bytes:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.class")}
    if not files:
        raise SystemExit(f"There are no classes in {folder}: run tools/java_classes.sh first.")
    return packed(files)


def version() -> str:
    match = re.search(r"project\(lapilli VERSION ([\d.]+)", (ROOT / "native" / "CMakeLists.txt").read_text())
    assert match
    return match[1]


def aar(classes: Path, libraries: Mapping[str, bytes]) -> bytes:
    android, include = ROOT / "android" / "lapilli", ROOT / "native" / "include"
    module = "prefab/modules/lapilli"
    files = {
        "AndroidManifest.xml": (android / "src" / "main" / "AndroidManifest.xml").read_bytes(),
        "classes.jar": jar(classes / "lapilli"),
        "proguard.txt": (android / "proguard.txt").read_bytes(),
        "R.txt": b"",
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "prefab/prefab.json": json.dumps(
            {"schema_version": 2, "name": "lapilli", "version": version(), "dependencies": []}
        ).encode(),
        f"{module}/module.json": json.dumps({"export_libraries": [], "library_name": "liblapilli"}).encode(),
        f"{module}/include/lapilli.h": (include / "lapilli.h").read_bytes(),
        f"{module}/include/lapilli.hpp": (include / "lapilli.hpp").read_bytes(),
    }
    for abi, data in libraries.items():
        files[f"jni/{abi}/liblapilli.so"] = data
    made = packed(files)
    if len(made) > LIMIT:
        raise SystemExit(
            f"The package has {len(made):,} bytes, and the limit is {LIMIT:,}: see what has grown, or raise it."
        )
    return made


def main(arguments: list[str]) -> int:
    classes, output = Path(arguments[0]), Path(arguments[1])
    libraries = {abi: Path(path).read_bytes() for abi, path in (item.split("=", 1) for item in arguments[2:])}
    output.mkdir(parents=True, exist_ok=True)
    for name, data in {"lapilli.aar": aar(classes, libraries), "lapilli-pytorch.jar": jar(classes / "pytorch")}.items():
        (output / name).write_bytes(data)
        print(f"{output / name}: {len(data):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
