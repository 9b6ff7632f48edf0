"""Drops plans, and what only they use, from a program file."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import flatbuffers

import lapilli.program.schema as fb
from lapilli.errors import InvalidInputError
from lapilli.format.container import HEADER_SIZE, aligned, read_header, to_bytes
from lapilli.runtime.description import INTERNAL, SCHEDULE_KEY
from lapilli.runtime.interface import METADATA_KEY


def strip(data: bytes, plans: Collection[str] | None = None, keep_metadata: Collection[str] | None = None) -> bytes:
    """A program file without the plans that are not named, the kernels and constants that only they use, and a signature.

    Args:
        data: the bytes of a valid program file.
        plans: names of the plans to keep, for all methods; None: all. A method without any of them keeps those that it has.
        keep_metadata: names of metadata to keep; None: all but the compiler's reasons (``lapilli inspect``). What programs
            with operators on the host need to run stays.

    Raises:
        InvalidInputError: no plan, or no metadata, has a name that is given.
        InvalidFileError: the header is not that of a program.
    """
    header = read_header(data)
    program = fb.ProgramT.InitFromPackedBuf(data, HEADER_SIZE)
    _keep_plans(program, plans)
    scripted = bool(program.hostOperators) or _has_scripts(program)
    _keep_metadata(program, keep_metadata, scripted)
    _keep_kernels(program)
    if not scripted:  # scripts name constants by their numbers
        _keep_constants(program)
    section = memoryview(data)[header.data_offset :]
    chunks = _move(program, section)
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(program.Pack(builder), b"LAPI")
    return to_bytes(bytes(builder.Output()), chunks)


def _text(value: bytes | str | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _unknown(what: str, given: Collection[str], there: Sequence[str]) -> None:
    if missing := sorted(set(given) - set(there)):
        raise InvalidInputError(
            f"The program has no {what} {', '.join(missing)}; it has {', '.join(dict.fromkeys(there)) or 'none'}."
        )


def _keep_plans(program: Any, wanted: Collection[str] | None) -> None:
    if wanted is None:
        return
    _unknown("plan", wanted, [_text(plan.name) for method in program.methods for plan in method.plans])
    for method in program.methods:
        method.plans = [plan for plan in method.plans if _text(plan.name) in wanted] or method.plans


def _has_scripts(program: Any) -> bool:
    for entry in program.metadata or ():
        if _text(entry.key) == METADATA_KEY:
            return '"script"' in json.dumps(json.loads(_text(entry.value)))
    return False


def _keep_metadata(program: Any, wanted: Collection[str] | None, scripted: bool) -> None:
    names = [_text(entry.key) for entry in program.metadata or ()]
    if wanted is None:
        kept = set(names) - {SCHEDULE_KEY}
    else:
        _unknown("metadata", [name for name in wanted if not name.startswith(INTERNAL)], names)
        kept = set(wanted) | ({METADATA_KEY} if scripted else set())
    program.metadata = [entry for entry in program.metadata or () if _text(entry.key) in kept]


def _dispatches(program: Any) -> list[Any]:
    return [
        dispatch
        for method in program.methods
        for plan in method.plans
        for dispatch in (*(plan.load or ()), *(plan.run or ()))
    ]


def _keep_kernels(program: Any) -> None:
    used = sorted({dispatch.kernel for dispatch in _dispatches(program)})
    number = {old: new for new, old in enumerate(used)}
    program.kernels = [program.kernels[old] for old in used]
    for dispatch in _dispatches(program):
        dispatch.kernel = number[dispatch.kernel]


def _keep_constants(program: Any) -> None:
    kinds = (fb.BufferKind.constant, fb.BufferKind.load_constant)
    buffers = [
        buffer
        for method in program.methods
        for plan in method.plans
        for buffer in plan.buffers or ()
        if buffer.kind in kinds
    ]
    states = [state for state in program.states or () if state.constant >= 0]
    used = sorted({buffer.index for buffer in buffers} | {state.constant for state in states})
    number = {old: new for new, old in enumerate(used)}
    program.constants = [program.constants[old] for old in used]
    for buffer in buffers:
        buffer.index = number[buffer.index]
    for state in states:
        state.constant = number[state.constant]


def _move(program: Any, section: memoryview) -> list[memoryview]:
    """Gives what is left of the data section new places, and returns it. What overlaps, stays together."""
    parts: list[tuple[int, int, Any]] = [(c.offset, c.size, c) for c in program.constants or ()]
    parts += [(k.codeOffset, k.codeSize, k) for k in program.kernels or ()]
    chunks: list[memoryview] = []
    begin = end = target = 0
    for offset, size, table in sorted(parts, key=lambda part: part[:2]):
        if offset >= end or not chunks:
            target = aligned(target + (end - begin if chunks else 0))
            begin, end = offset, offset + size
            chunks.append(section[begin:end])
        elif offset + size > end:
            end = offset + size
            chunks[-1] = section[begin:end]
        if isinstance(table, fb.ConstantT):
            table.offset = target + offset - begin
        else:
            table.codeOffset = target + offset - begin
    return chunks
