"""Post-processes SPIR-V: removes debug instructions and unused capabilities, and keeps subtractions exact."""

from __future__ import annotations

import struct

_DEBUG = {2, 3, 4, 5, 6, 8, 317, 330}  # OpSource*, OpName, OpMemberName, OpLine, OpNoLine, OpModuleProcessed
_STRING = 7
_CAPABILITY = 17
_UNIFORM_AND_STORAGE_16BIT = 4434
_STORAGE_16BIT = 4433
_FLOAT_DIFFERENCE = 131  # OpFSub
_DECORATE, _NO_CONTRACTION = 71, 42
_BEFORE_DECORATIONS = {_CAPABILITY, 10, 11, 14, 15, 16, 331}  # extensions, memory model, entry points and their modes


def strip(code: bytes) -> bytes:
    """Removes names and source lines, which older validation layers do not all know (Slang's OpSource), and makes modules
    smaller.

    Subtractions are not contracted to multiply-add: x - m must be 0 where m is x rounded, as in a row of equal numbers minus
    its mean. (The kernels of products only add.)
    """
    words = struct.unpack(f"<{len(code) // 4}I", code)
    kept = list(words[:5])
    at = 5
    decorations = 0  # where they may begin
    exact: list[int] = []
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        instruction = list(words[at : at + length])
        if op == _CAPABILITY and instruction[1] == _UNIFORM_AND_STORAGE_16BIT:
            instruction[1] = _STORAGE_16BIT
        if op not in _DEBUG and op != _STRING:
            kept += instruction
        if op in _BEFORE_DECORATIONS:
            decorations = len(kept)
        elif op == _FLOAT_DIFFERENCE:
            exact += [3 << 16 | _DECORATE, instruction[2], _NO_CONTRACTION]
        at += length
    kept[decorations:decorations] = exact
    return struct.pack(f"<{len(kept)}I", *kept)
