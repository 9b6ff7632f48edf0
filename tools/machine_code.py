"""What NVIDIA's driver made of the kernels in a pipeline cache: instructions, registers, and the order of
what goes to memory.

    pip install zstandard nvidia-cuda-nvdisasm
    XDG_CACHE_HOME=/tmp/one python ...         # the program, on the GPU, with a cache of its own
    python tools/machine_code.py /tmp/one/lapilli/pipelines-*.bin [--chip SM90] [--out FOLDER]

Loads that should be under way together stand side by side (`LDG x4`); one that follows what waits for another is late. How the file
is made up was found by looking at it (docs/notes/h100-kernels.md), so another driver may need another way.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

MISSING = "a package is missing: pip install zstandard nvidia-cuda-nvdisasm"
FRAME = b"\x28\xb5\x2f\xfd"  # how what is compressed by zstd begins
MARK = b"NVDANVVM"
START = 8  # of the block that has sizes and places
MEMORY = ("LDG", "STG", "LDS", "STS", "ATOM", "BAR", "MEMBAR", "HMMA", "IMMA", "SHFL", "BRA", "EXIT")


def kernels(data: bytes) -> Iterator[bytes]:
    """The instructions of every kernel in a cache."""
    if importlib.util.find_spec("zstandard") is None:
        sys.exit(MISSING)
    zstandard = importlib.import_module("zstandard")
    at = data.find(FRAME)
    while at >= 0:
        try:
            block = zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
        except zstandard.ZstdError:  # the four bytes were something else
            block = b""
        if MARK in block[:32]:
            size, place = struct.unpack_from("<II", block, START + 0x44)
            yield block[START + place : START + place + size]
        at = data.find(FRAME, at + len(FRAME))


def disassembler() -> Path:
    """nvdisasm of the package. Exits if it is not there."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for found in Path(folder).rglob("bin/nvdisasm"):
            found.chmod(0o755)
            return found
    sys.exit(MISSING)


def text_of(code: bytes, chip: str) -> list[str]:
    """The instructions of a kernel, one to a line."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [str(disassembler()), "-b", chip, "-c", file.name]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (re.sub(r"/\*[0-9a-fx]*\*/", "", line).strip() for line in made.splitlines())
    return [line for line in lines if line and not line.startswith(".")]


def accesses(lines: list[str]) -> str:
    """The order of what touches memory or waits, with the number of the first line and how often in a row."""
    runs: list[tuple[int, str, int]] = []
    for number, line in enumerate(lines):
        name = re.sub(r"^@!?U?P\d+ ", "", line).split(" ")[0].rstrip(";")
        if not name.startswith(MEMORY):
            continue
        if runs and runs[-1][1] == name:
            runs[-1] = (runs[-1][0], name, runs[-1][2] + 1)
        else:
            runs.append((number, name, 1))
    return "  ".join(f"{first}: {name}{f' x{count}' if count > 1 else ''}" for first, name, count in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", type=Path)
    parser.add_argument("--chip", default="SM90", help="of the GPU: SM90 is Hopper")
    parser.add_argument("--out", type=Path, help="takes the instructions, a file for each kernel")
    options = parser.parse_args()
    for cache in options.caches:
        for number, code in enumerate(kernels(cache.read_bytes())):
            lines = text_of(code, options.chip)
            registers = max((int(n) for line in lines for n in re.findall(r"\bR(\d+)\b", line)), default=-1) + 1
            print(
                f"{cache.name}, kernel {number}: {len(lines)} instructions, {registers} registers\n    {accesses(lines)}"
            )
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"{cache.stem}-{number}.sass").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
