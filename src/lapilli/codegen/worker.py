"""A compiler process: reads pickled macros and a list of sources, and writes pickled SPIR-V (or a message) one by one."""

from __future__ import annotations

import pickle
import sys

from lapilli.codegen import slang
from lapilli.errors import CompileError


def main() -> None:
    slang.DEFINES, sources = pickle.load(sys.stdin.buffer)
    for source in sources:
        try:
            result: bytes | str = slang.compile(source)
        except CompileError as error:
            result = str(error)
        sys.stdout.buffer.write(pickle.dumps(result))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
