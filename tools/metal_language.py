"""Kernels in Metal's shading language: what MoltenVK makes of SPIR-V, and whether a text is in the language.

    python tools/metal_language.py FOLDER   the files .spv and .metal that `lapilli compile --msl FOLDER` wrote

MoltenVK translates SPIR-V by SPIRV-Cross when a program is loaded, and Metal compiles the text. The translation is done here, by
Debian's spirv-cross and with MoltenVK's options for compute kernels. Apple's compiler runs on Apple's machines alone; in its
place Clang (pip install ziglang) reads the text as C++ beside declarations of Metal's library (tools/metal), which finds what is no
syntax, names that are not declared, and types that do not agree. It knows no address spaces, and nothing of Metal's own limits.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = Path(__file__).with_name("metal")

_COMMON = ["--msl", "--msl-fixed-subgroup-size", "32", "--msl-texture-buffer-native"]
VARIANTS = {
    "macOS": [*_COMMON, "--msl-version", "20300", "--msl-argument-buffers", "--msl-argument-buffer-tier", "1"],
    "iOS": [*_COMMON, "--msl-version", "20300", "--msl-ios", "--msl-ios-use-simdgroup-functions"],
}
"""What MoltenVK asks of SPIRV-Cross: with argument buffers, as its default is where there are, and without."""

# Its overloads differ by their address spaces alone, which are nothing here.
_ARRAY = re.compile(r"template<typename T, size_t Num>\s*struct spvUnsafeArray\s*\{.*?\n\};\n", re.S)
_CLANG = [
    sys.executable, "-m", "ziglang", "clang", "-target", "aarch64-linux-gnu", "-x", "c++", "-std=c++17", "-fsyntax-only",
    "-Xclang", "-cl-single-precision-constant", "-Wno-everything", "-ferror-limit=3", f"-I{LIBRARY}", "-",
]  # fmt: skip


class RefusedError(Exception):
    """A tool refuses a kernel: with its message."""


def from_spirv(spirv: bytes, variant: str) -> str:
    """The text that MoltenVK gives to Metal for a kernel. Raises RefusedError for what SPIRV-Cross does not translate."""
    with tempfile.NamedTemporaryFile(suffix=".spv") as file:
        file.write(spirv)
        file.flush()
        return _output(["spirv-cross", file.name, *VARIANTS[variant]], "")


def check(text: str) -> None:
    """Raises RefusedError for a text in which Clang finds an error."""
    _output(_CLANG, _ARRAY.sub("template <class T, size_t N> using spvUnsafeArray = metal::array<T, N>;\n", text))


def _output(command: list[str], given: str) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RefusedError((done.stdout + done.stderr).strip())
    return done.stdout


def problems(kernels: Iterable[tuple[str, str, bytes]]) -> list[str]:
    """What is wrong with kernels: their names, texts by Slang, and SPIR-V."""

    def of_one(kernel: tuple[str, str, bytes]) -> list[str]:
        name, text, spirv = kernel
        found = []
        for way in ("Slang", *VARIANTS):
            try:
                check(text if way == "Slang" else from_spirv(spirv, way))
            except RefusedError as error:
                found.append(f"{name}, by {way}: {error}")
        return found

    with ThreadPoolExecutor(2) as pool:
        return [line for lines in pool.map(of_one, kernels) for line in lines]


def main(folder: Path) -> int:
    spirv = sorted(folder.glob("*.spv"))
    if not spirv:
        print(
            f"{folder} has no kernels: lapilli compile MODEL --target metal --msl {folder} writes them", file=sys.stderr
        )
        return 1
    found = problems((f.stem, f.with_suffix(".metal").read_text(), f.read_bytes()) for f in spirv)
    print("\n".join(found) or f"{folder}: {len(spirv)} kernels, each by Slang and for {' and '.join(VARIANTS)}: right")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
