"""Which kernel, tile and layout a device gets, for devices that need not be there: `decisions.txt` holds what was decided when it
was last accepted. After a change that is meant, run LAPILLI_ACCEPT=1 pytest tests/compiler/test_decisions.py and check its diff."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from agreement import Function

import lapilli
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.errors import CompileError
from lapilli.graph.module import Module
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.target import KNOWN, TARGETS, Target, of_device, portable

ACCEPTED = Path(__file__).with_name("decisions.txt")


def weight(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01)


def image(channels: int, size: int) -> torch.Tensor:
    return torch.zeros(1, channels, size, size)


class Layer(torch.nn.Module):
    """A layer of a language model, for one token: norms, rotations, grouped queries, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(512) for _ in range(2))
        shapes = {
            "q": (512, 512), "k": (128, 512), "v": (128, 512), "o": (512, 512), "gate": (1024, 512), "up": (1024, 512),
            "down": (512, 1024),
        }  # fmt: skip
        made = {n: torch.nn.Parameter(weight(*s), requires_grad=False) for n, s in shapes.items()}
        self.weights = torch.nn.ParameterDict(made)
        self.keys, self.values = (torch.nn.Buffer(torch.zeros(1, 2, 1024, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, 64)).transpose(1, 2)

        def turned(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        y, w, place = self.norms[0](x), self.weights, torch.zeros(1, dtype=torch.int64)
        q, k, v = (heads(F.linear(y, w[name])) for name in "qkv")
        k, v = self.keys.index_copy_(2, place, turned(k)), self.values.index_copy_(2, place, v)
        attended = F.scaled_dot_product_attention(turned(q), k, v, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), w["o"])
        y = self.norms[1](x)
        return x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])


CASES: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {
    "linear, one row": (Function(F.linear, weight(1024, 1024)), (torch.zeros(1, 1024),)),
    "linear, one row of 4 bits": (
        Function(
            lambda x, q, s: F.linear(x, ((q.to(s.dtype).reshape(1024, 32, 32) - 8) * s[..., None]).reshape(1024, 1024)),
            torch.arange(1 << 20).reshape(1024, 1024).remainder(16).to(torch.uint8), weight(1024, 32),
        ),
        (torch.zeros(1, 1024),),
    ),
    "linear, 128 rows": (Function(F.linear, weight(1024, 512)), (torch.zeros(128, 512),)),
    "product of 2048": (Function(torch.matmul, weight(2048, 2048)), (torch.zeros(2048, 2048),)),
    "gradient of a weight": (Function(lambda x, y: x.t() @ y), (torch.zeros(4096, 384), torch.zeros(4096, 1536))),
    "batch of products": (Function(torch.matmul), (torch.zeros(12, 64, 64), torch.zeros(12, 64, 64))),
    "first convolution": (Function(lambda x, w: F.conv2d(x, w, stride=2, padding=1), weight(32, 3, 3, 3)), (image(3, 64),)),
    "convolution": (Function(lambda x, w: F.conv2d(x, w, padding=1), weight(64, 64, 3, 3)), (image(64, 28),)),
    "pointwise convolution": (Function(F.conv2d, weight(96, 64, 1, 1)), (image(64, 28),)),
    "depthwise convolution": (Function(lambda x, w: F.conv2d(x, w, padding=1, groups=64), weight(64, 1, 3, 3)), (image(64, 28),)),
    "attention, one query": (
        Function(F.scaled_dot_product_attention),
        (torch.zeros(1, 8, 1, 64), *(torch.zeros(1, 8, 2048, 64) for _ in range(2))),
    ),
    "attention": (Function(F.scaled_dot_product_attention), tuple(torch.zeros(1, 8, 197, 64) for _ in range(3))),
    "a token's attention and gate": (Layer(), (torch.zeros(1, 1, 512), torch.zeros(1, 32), torch.zeros(1, 32))),
    "softmax": (Function(lambda x: x.softmax(-1)), (torch.zeros(64, 512),)),
    "layer norm": (Function(lambda x, w: F.layer_norm(x, (512,), w), weight(512)), (torch.zeros(64, 512),)),
    "sum": (Function(lambda x: x.sum()), (torch.zeros(100_000),)),
    "map": (Function(lambda x: x.relu() * 2), (torch.zeros(7, 1000),)),
}  # fmt: skip


@cache
def prepared(name: str, half: bool) -> Module:
    model, inputs = CASES[name]
    dtype = torch.float16 if half else torch.float32
    return prepare(capture(model.to(dtype).eval(), tuple(x.to(dtype) for x in inputs)))


def planned(name: str, target: Target) -> Schedule:
    graph = lower(prepared(name, target.half), "fp16" if target.half else "fp32", target.half)
    return schedule_of(graph, target)


def decisions(target: Target) -> Iterator[str]:
    for name in CASES:
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
            target = of_device(device, half=precision == "fp16", matrix=True)
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

    targets = {of_device(device, half=True, matrix=True) for device in KNOWN.values()}
    for target in targets:
        if target.half and target.bfloat16_matrix == target.cooperative_matrix:
            assert found(torch.bfloat16, target) == found(torch.float16, target)


def test_every_kernel_fits_its_device() -> None:
    for name, device in KNOWN.items():
        for half in (False, True):
            target = of_device(device, half=half, matrix=True)
            for case in CASES:
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
