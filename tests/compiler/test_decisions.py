"""Which kernel, tile and layout a device gets, for devices that need not be there: `decisions.txt` holds what was decided when it
was last accepted. After a change that is meant, run LAPILLI_ACCEPT=1 pytest tests/compiler/test_decisions.py and check its diff."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decision_cases import CASES, QUANTIZED, prepared

import lapilli
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.errors import CompileError
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.target import KNOWN, TARGETS, Target, of_device, portable
from lapilli.target.records import Records

ACCEPTED = Path(__file__).with_name("decisions.txt")


def without_records(target: Target) -> Target:
    """As cost models decide: what ships changes when devices are measured."""
    return replace(target, records=Records())


def planned(name: str, target: Target) -> Schedule:
    graph = lower(prepared(name, target.half), "fp16" if target.half else "fp32", target.half)
    return schedule_of(graph, target)


def decisions(target: Target) -> Iterator[str]:
    for name in (*CASES, *QUANTIZED):
        yield from decided(name, planned(name, target))


def decided(name: str, s: Schedule) -> Iterator[str]:
    kernels = write_all(s)
    for task in s.order.run:
        w = kernels[task.out.id]
        call = re.search(r"(\w+)<([^;]*)>\(P", w.source)
        numbers = " ".join(re.findall(r"\b\d+\b", call[2])) if call is not None else ""
        kernel = f"{call[1]}<{numbers}>" if call is not None else w.name
        groups = "x".join(map(str, w.groups))
        order = "".join(map(str, s.layouts[task.out.id].order))
        units = f", subgroups of {w.needs.subgroup_size}" if w.needs.subgroup_size else ""
        shared = f", {w.shared} B shared" if w.shared else ""
        yield f"    {name}: {kernel}, {groups} groups of {'x'.join(map(str, w.local))}{shared}{units}, layout {order}"


def all_decisions() -> str:
    lines: list[str] = []
    seen: dict[str, str] = {}
    for name, device in KNOWN.items():
        for precision in ("fp32", "fp16"):
            target = without_records(of_device(device, half=precision == "fp16", matrix=True))
            text = "\n".join(decisions(target))
            lines.append(f"{name}, {precision}: {target.name}, {target.compute_units} compute units")
            lines.append(text if text not in seen else f"    as {seen[text]}")
            seen.setdefault(text, f"{name}, {precision}")
    return "\n".join(lines) + "\n"


def test_decisions_are_those_that_were_accepted() -> None:
    found = all_decisions()
    if os.environ.get("LAPILLI_ACCEPT"):
        ACCEPTED.write_text(found)
    accepted = ACCEPTED.read_text()
    changed = [f"{a}\n  now:{b}" for a, b in zip(accepted.splitlines(), found.splitlines(), strict=False) if a != b]
    assert found == accepted, "\n".join(changed[:20])


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_gets_the_kernels_of_halves(name: str) -> None:
    """On every device whose units multiply both, or neither."""

    def found(dtype: torch.dtype, target: Target) -> list[str]:
        model, inputs = CASES[name]
        module = prepare(capture(model.to(dtype).eval(), tuple(x.to(dtype) for x in inputs)))
        return list(decided(name, schedule_of(lower(module, "fp32", target.half), target)))

    targets = {without_records(of_device(device, half=True, matrix=True)) for device in KNOWN.values()}
    for target in targets:
        if target.half and target.bfloat16_matrix == target.cooperative_matrix:
            assert found(torch.bfloat16, target) == found(torch.float16, target)


def test_every_kernel_fits_its_device() -> None:
    for name, device in KNOWN.items():
        for half in (False, True):
            target = of_device(device, half=half, matrix=True)
            for case in (*CASES, *QUANTIZED):
                for w in write_all(planned(case, target)).values():
                    assert w.requirements(half).are_met_by(device), (name, w.name)


def test_portable_targets_are_those_of_files() -> None:
    assert {portable(name).name for name in TARGETS} == set(TARGETS)


@pytest.mark.parametrize(
    "features, limits, units",
    [
        ({}, {}, True),
        ({"cooperative_matrix": False}, {}, False),
        ({"memory_model": False}, {}, False),
        ({}, {"max_subgroup_size": 16}, False),
        ({}, {"min_subgroup_size": 64, "max_subgroup_size": 64}, False),
        ({}, {"min_subgroup_size": 16}, True),
        ({"subgroup_size_control": False}, {"min_subgroup_size": 16}, False),
        ({}, {"shared_memory": 32 << 10}, True),
        ({}, {"shared_memory": 16 << 10}, False),
    ],
)
def test_matrix_units_need_all_that_their_kernels_need(
    features: dict[str, bool], limits: dict[str, int], units: bool
) -> None:
    h100 = KNOWN["h100"]
    device = replace(h100, features={**h100.features, **features}, limits={**h100.limits, **limits})
    assert of_device(device, half=True, matrix=True).cooperative_matrix is units
    assert of_device(device, half=True, matrix=True).bfloat16_matrix is units
    without = replace(device, features={**device.features, "bfloat16_matrix": False})
    assert not of_device(without, half=True, matrix=True).bfloat16_matrix


def test_a_driver_that_does_not_say_its_compute_units() -> None:
    arc = KNOWN["arc"]
    silent = replace(arc, name="Intel(R) Arc(TM) A770 Graphics (DG2)", limits={**arc.limits, "compute_units": 0})
    assert of_device(silent, half=False, matrix=False).compute_units == 32
    stranger = replace(silent, name="a new one")
    assert of_device(stranger, half=False, matrix=False).compute_units == 64


def test_a_target_that_is_not_known() -> None:
    with pytest.raises(CompileError, match="one of the devices h100"):
        lapilli.compile(torch.nn.ReLU(), (torch.zeros(3),), target="voodoo2")
