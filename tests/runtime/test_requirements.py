"""What a plan requires is one record: the player and the compiler judge it alike."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decision_cases import QUANTIZED
from hostile_files import file_from, parts_of

import lapilli
from lapilli import player
from lapilli.compiler import compile_to_bytes
from lapilli.errors import LapilliError
from lapilli.program import schema as s
from lapilli.program.writer import _FEATURE, _OPERATION
from lapilli.target import HALF, MATRIX_UNITS, NOTHING, QUADS, SUBGROUP_SUMS, Requirements, joined


def some(r: random.Random, device: lapilli.Device) -> Requirements:
    """Requirements by chance, near what the device has."""
    limits = device.limits
    quads = QUADS if QUADS.subgroup_operations <= set(limits["subgroup_operations"]) else NOTHING

    def near(limit: int) -> int:
        return r.choice((0, 1, limit // 2, limit, limit, min(limit + 1, 2**32 - 1)))

    return replace(
        joined(r.sample((NOTHING, HALF, quads), 2)),
        features=frozenset(r.sample(sorted(device.features), r.randint(0, 2))) if r.random() < 0.5 else frozenset(),
        invocations=near(limits["max_workgroup_invocations"]),
        shared_memory=near(limits["shared_memory"]),
        texel_elements=near(limits["texel_elements"]),
        storage_range=near(limits["storage_buffer_range"]),
        subgroup_size=r.choice((0, 0, 4, 8, 16, 32, 64)),
    )


def stated(made: Requirements) -> Any:
    table = s.RequirementsT()
    table.device = s.DeviceKind.any
    table.features = sum(_FEATURE[name] for name in made.features)
    table.subgroupOperations = sum(_OPERATION[name] for name in made.subgroup_operations)
    table.maxWorkgroupInvocations, table.sharedMemory = made.invocations, made.shared_memory
    table.maxTexelElements, table.storageRange = made.texel_elements, made.storage_range
    table.subgroupSize = made.subgroup_size
    return table


@pytest.fixture(scope="module")
def file() -> bytes:
    return compile_to_bytes(torch.nn.ReLU(), (torch.zeros(4),), target="any-fp32")


@pytest.mark.poor_device
def test_the_player_and_the_compiler_judge_alike(file: bytes) -> None:
    device, r = lapilli.devices()[0], random.Random(7)
    seen = set()
    for _ in range(120):
        wanted = some(r, device)
        tables, data = parts_of(file)
        plan = tables.methods[0].plans[0]
        plan.requirements = stated(wanted)
        try:
            with player.NativeProgram.load(file_from(tables, data)) as program:
                np.testing.assert_array_equal(program.run([np.array([-1, 0, 2, 3], np.float32)])[0], [0, 0, 2, 3])
            accepted = True
        except LapilliError as error:
            assert "device" in str(error) or "needs" in str(error), error
            accepted = False
        # Subgroup operations are not among what the compiler knows of a device; `some` asks for those of QUADS where they are.
        assert accepted == wanted.are_met_by(device), wanted
        seen.add(accepted)
    assert seen == {True, False}


def test_matrices_of_bytes_are_found_in_the_kernels() -> None:
    """No capability of SPIR-V says that a kernel has them, and a plan may not."""
    tables, data = parts_of(compile_to_bytes(*QUANTIZED["int8 linear, 128 rows"], target="gpu-fp32-int8"))
    tables.methods[0].plans[0].requirements = stated(NOTHING)
    with pytest.raises(LapilliError, match="the device lacks cooperative matrices of int8 16x16x32"):
        player.NativeProgram.load(file_from(tables, data))


def test_together_they_need_what_each_needs() -> None:
    a = Requirements(frozenset({"float16"}), invocations=64, workgroup=(64, 1, 1), shared_memory=100)
    b = Requirements(frozenset({"int8"}), frozenset({"vote"}), 32, (4, 8, 1), 200, 8, 3, 5, 7)
    both = Requirements(frozenset({"float16", "int8"}), frozenset({"vote"}), 64, (64, 8, 1), 200, 8, 3, 5, 7)
    assert a | b == b | a == joined([a, b, a]) == both
    assert MATRIX_UNITS | NOTHING == MATRIX_UNITS
    assert Requirements(subgroup_operations=frozenset({"basic", "arithmetic", "quad"})) == replace(
        SUBGROUP_SUMS | QUADS, subgroup_size=0
    )
