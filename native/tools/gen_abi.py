"""Write the Python module through which cffi calls the player: its header, parsed once, at build time.

python gen_abi.py lapilli.h abi.py
"""

import sys
from pathlib import Path

import cffi


def main(header: str, target: str) -> None:
    text = Path(header).read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(text.split("/* BEGIN CDEF", 1)[1].split("*/", 1)[1].split("/* END CDEF", 1)[0])
    ffi.set_source("lapilli.abi", None)
    ffi.emit_python_code(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
