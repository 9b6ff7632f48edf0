"""Texel buffers of bytes: kernels that read them as other numbers, and others as them, are refused."""

from __future__ import annotations

import pytest
from decision_cases import CASES, QUANTIZED
from hostile_files import file_from, parts_of

from lapilli.compiler import compile_to_bytes
from lapilli.errors import LapilliError
from lapilli.program import schema as s
from lapilli.runtime.program import Program

BYTES, FLOATS, HALVES = s.BindingType.texel_uint8, s.BindingType.texel_float32, s.BindingType.texel_float16


def with_types(case: str, seen: dict[int, int]) -> bytes:
    """The program of a layer, whose kernels see bindings of some types as others."""
    cases = {**CASES, **QUANTIZED}
    program, data = parts_of(compile_to_bytes(*cases[case], target="cpu-fp32"))
    there = [list(k.texel) if k.texel is not None else [] for k in program.kernels]
    assert any(next(iter(seen), BYTES) in types for types in there)
    for k, types in zip(program.kernels, there, strict=True):
        k.texel = [seen.get(t, t) for t in types]
    return file_from(program, data)


def test_as_they_are() -> None:
    Program(with_types("int8 linear, 128 rows", {}), None).close()


@pytest.mark.parametrize("wrong", [FLOATS, HALVES, 4, 255])
def test_bytes_are_nothing_else(wrong: int) -> None:
    with pytest.raises(LapilliError, match="texels have|unknown type"):
        Program(with_types("int8 linear, 128 rows", {BYTES: wrong}), None)


def test_floats_are_no_bytes() -> None:
    with pytest.raises(LapilliError, match="texels have"):
        Program(with_types("linear, 128 rows", {FLOATS: BYTES}), None)
