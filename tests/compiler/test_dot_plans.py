"""Files for any device have plans with dot products of words, and with matrix units for bytes, if their programs have codes, for
devices that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decision_cases import QUANTIZED

from lapilli.compiler import compile_to_bytes
from lapilli.ir.dtype import DType
from lapilli.runtime.description import Description
from lapilli.target import BYTES, DOT, KNOWN, of_device, plans_for, taken_by

LINEAR = QUANTIZED["int8 linear, 128 rows"]


def plans_of(data: bytes) -> list[str]:
    return [p.name for p in Description.of(data).methods[0].plans]


def test_only_programs_with_codes_have_them() -> None:
    floats = plans_of(compile_to_bytes(*LINEAR))
    assert floats == ["gpu-fp32-int8", "gpu-fp32-dot", "gpu-fp32", "cpu-fp32", "any-fp32", "any-fp32-few"]
    assert plans_of(compile_to_bytes(torch.nn.Linear(8, 8), (torch.zeros(3, 8),))) == [
        "gpu-fp32",
        "cpu-fp32",
        "any-fp32",
    ]
    halves = plans_of(compile_to_bytes(*LINEAR, precision="fp16"))
    units = ["gpu-fp16-matrix-int8", "gpu-fp16-matrix"]
    assert halves == [*units, "gpu-fp16-dot", "gpu-fp16", "cpu-fp16", "gpu-fp32", "any-fp32", "any-fp32-few"]


def test_the_plan_requires_what_its_kernels_use() -> None:
    plans = {p.name: p for p in Description.of(compile_to_bytes(*LINEAR)).methods[0].plans}
    asked = {"integer_dot_product", "packed_dot_product"}
    assert asked <= set(plans["gpu-fp32-dot"].requirements["features"])
    assert asked | {"int8_matrix"} <= set(plans["gpu-fp32-int8"].requirements["features"])
    assert "int8_matrix" not in plans["gpu-fp32-dot"].requirements["features"]
    assert not asked & set(plans["gpu-fp32"].requirements["features"])


@pytest.mark.parametrize("name", KNOWN)
def test_who_takes_them(name: str) -> None:
    """The same that compiling for the device itself decides."""
    device = KNOWN[name]
    slow = replace(device, features={**device.features, "packed_dot_product": False})
    other = replace(device, features={**device.features, "int8_matrix": False})
    for stored in ((), (DType.float16,)):
        targets = plans_for(stored)
        for d in (device, slow, other):
            taken, own = taken_by(d, targets), of_device(d, half=bool(stored), matrix=True)
            assert taken is not None
            assert taken.name.endswith(BYTES) is own.int8_matrix
            assert taken.name.endswith(DOT) is (own.dot and not own.cooperative_matrix and not own.int8_matrix)
            assert taken.without_codes == own.name
