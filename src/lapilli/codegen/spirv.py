"""Post-processes SPIR-V: removes debug instructions and unused capabilities, keeps sums exact, and makes it SPIR-V
1.3, which every device takes: Slang writes 1.5 without a profile, and Vulkan 1.1 refuses that."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_DEBUG = {2, 3, 4, 5, 6, 8, 317, 330}  # OpSource*, OpName, OpMemberName, OpLine, OpNoLine, OpModuleProcessed
_STRING = 7
_CAPABILITY = 17
_UNIFORM_AND_STORAGE_16BIT = 4434
_STORAGE_16BIT = 4433
_FLOAT, _VECTOR = 22, 23  # types
_SUM, _DIFFERENCE, _PRODUCT, _SCALED = 129, 131, 133, 142  # of floats; a vector by a number
_DECORATE, _NO_CONTRACTION = 71, 42
_ENTRY_POINT, _VARIABLE, _COPY_LOGICAL = 15, 59, 400
_CONSTANT, _TYPE_ARRAY, _TYPE_STRUCT = 43, 28, 30
_ANNOTATIONS = {71, 72}  # OpDecorate, OpMemberDecorate
_SHUFFLE, _CONSTRUCT, _EXTRACT = 79, 80, 81
_COOPERATIVE_MATRIX = 6022
_INPUT_OR_OUTPUT = {1, 3}
_VERSION_1_3 = 0x00010300
_BEFORE_DECORATIONS = {_CAPABILITY, 10, 11, 14, 15, 16, 331}  # extensions, memory model, entry points and their modes


def strip(code: bytes) -> bytes:
    """Removes names and source lines, which older validation layers do not all know (Slang's OpSource), and makes modules
    smaller.

    Subtractions are not contracted to multiply-add: x - m must be 0 where m is x rounded, as in a row of equal numbers minus
    its mean. (The kernels of products only add.) Nor are sums that are no multiply-add anyway: NVIDIA's compiler takes the sum
    of x over a row plus that of -x for 0, also where x is infinite or NaN, if it knows the length of the row. Nor are products
    of these: where it knows both numbers it multiplies out, and (x - 2^23) * 0.1 is another number then.
    """
    words = struct.unpack(f"<{len(code) // 4}I", code)
    kept = list(words[:5])
    at = 5
    decorations = 0  # where they may begin
    exact: list[int] = []
    floats: set[int] = set()  # types
    products: set[int] = set()
    kept_apart: set[int] = set()  # sums and differences
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        instruction = list(words[at : at + length])
        if op == _CAPABILITY and instruction[1] == _UNIFORM_AND_STORAGE_16BIT:
            instruction[1] = _STORAGE_16BIT
        if op not in _DEBUG and op != _STRING:
            kept += instruction
        if op in _BEFORE_DECORATIONS:
            decorations = len(kept)
        elif op == _FLOAT or (op == _VECTOR and instruction[2] in floats):
            floats.add(instruction[1])
        elif op in (_PRODUCT, _SCALED):
            products.add(instruction[2])
            if not kept_apart.isdisjoint(instruction[3:]):
                exact += [3 << 16 | _DECORATE, instruction[2], _NO_CONTRACTION]
        elif op == _DIFFERENCE or (op == _SUM and instruction[1] in floats and products.isdisjoint(instruction[3:])):
            exact += [3 << 16 | _DECORATE, instruction[2], _NO_CONTRACTION]
            kept_apart.add(instruction[2])
        elif op in (_SHUFFLE, _CONSTRUCT, _EXTRACT) and not kept_apart.isdisjoint(instruction[3:4]):
            kept_apart.add(instruction[2])
        at += length
    kept[decorations:decorations] = exact
    kept = _as_1_3(kept)
    return struct.pack(f"<{len(kept)}I", *kept)


def instructions(words: list[int]) -> Iterator[list[int]]:
    """Those of a module, each with its first word: its length and what it is."""
    at = 5
    while at < len(words):
        length = words[at] >> 16
        yield words[at : at + length]
        at += length


def _as_1_3(words: list[int]) -> list[int]:
    """The module as SPIR-V 1.3. Of what came later Slang uses two things: an entry point lists all variables (before, only
    inputs and outputs), and OpCopyLogical, for which each member is copied. Modules with cooperative matrices stay as they are:
    only devices of Vulkan 1.3 have those."""
    types: dict[int, list[int]] = {}  # of arrays and structures: their instructions
    type_of: dict[int, int] = {}  # of values of those types
    classes: dict[int, int] = {}  # storage classes of variables
    lengths: dict[int, int] = {}
    for i in instructions(words):
        op = i[0] & 0xFFFF
        if op == _CAPABILITY and i[1] == _COOPERATIVE_MATRIX:
            return words
        if op == _VARIABLE:
            classes[i[2]] = i[3]
        elif op in (_TYPE_ARRAY, _TYPE_STRUCT):
            types[i[1]] = i
        elif op == _CONSTANT:
            lengths[i[2]] = i[3]
        if len(i) > 2 and i[1] in types and op not in _ANNOTATIONS:
            type_of[i[2]] = i[1]

    def members(type: int) -> list[int]:
        i = types[type]
        return i[2:] if i[0] & 0xFFFF == _TYPE_STRUCT else [i[2]] * lengths[i[3]]

    result = [words[0], _VERSION_1_3, *words[2:5]]

    def copy(target: int, source: int, value: int) -> int:
        """The identifier of a value of the type `source` as the type `target`, which has the same members."""
        if target == source:
            return value
        parts = []
        for n, (to, of) in enumerate(zip(members(target), members(source), strict=True)):
            part, result[3] = result[3], result[3] + 1
            result.extend((5 << 16 | _EXTRACT, of, part, value, n))
            parts.append(copy(to, of, part))
        made, result[3] = result[3], result[3] + 1
        result.extend(((3 + len(parts)) << 16 | _CONSTRUCT, target, made, *parts))
        return made

    for i in instructions(words):
        op = i[0] & 0xFFFF
        if op == _ENTRY_POINT:
            name = next(n for n in range(3, len(i)) if not i[n] >> 24) + 1  # the word after the name
            i = [*i[:name], *(v for v in i[name:] if classes[v] in _INPUT_OR_OUTPUT)]
            i[0] = len(i) << 16 | op
        elif op == _COPY_LOGICAL:
            copied = copy(i[1], type_of[i[3]], i[3])
            # The last instruction is the construction of the whole: it gets the identifier of the copy.
            at = len(result) - 3 - len(members(i[1]))
            assert result[at + 2] == copied
            result[at + 2] = i[2]
            continue
        result += i
    return result
