"""A compiler process: reads pickled macros, then sources until its input ends, and writes SPIR-V (or a message) for each."""

from __future__ import annotations

import pickle
import sys

from lapilli.codegen import slang
from lapilli.errors import CompileError


def main() -> None:
    slang.DEFINES = pickle.load(sys.stdin.buffer)
    while True:
        try:
            source = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: bytes | str = slang.compile(source)
        except CompileError as error:
            result = str(error)
        sys.stdout.buffer.write(pickle.dumps(result))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
