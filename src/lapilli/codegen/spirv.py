"""What is done to a SPIR-V module after the compiler: debug instructions out, and capabilities cut to what is used."""

from __future__ import annotations

import struct

_DEBUG = {2, 3, 4, 5, 6, 8, 317, 330}  # OpSource*, OpName, OpMemberName, OpLine, OpNoLine, OpModuleProcessed
_STRING = 7
_CAPABILITY = 17
_UNIFORM_AND_STORAGE_16BIT = 4434
_STORAGE_16BIT = 4433


def strip(code: bytes) -> bytes:
    """Without names and source lines: smaller, and older validation layers do not know Slang's OpSource."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    kept = list(words[:5])
    at = 5
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        instruction = list(words[at : at + length])
        if op == _CAPABILITY and instruction[1] == _UNIFORM_AND_STORAGE_16BIT:
            instruction[1] = _STORAGE_16BIT
        if op not in _DEBUG and op != _STRING:
            kept += instruction
        at += length
    return struct.pack(f"<{len(kept)}I", *kept)
