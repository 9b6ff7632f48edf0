"""Values that are larger than what a device binds at once. Most tests lower that limit, so that small values are large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from large_process import RANGE, TAKEN, TAKEN_OF_GPUS

import lapilli
import lapilli.target.record as targets
from lapilli.codegen.select import schedule_of, write_all
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import load
from lapilli.ir.integer import Int, as_int, symbol
from lapilli.ir.node import Graph, Input, Map
from lapilli.target import CPU, GPU, Target, bound_in_parts, for_values, kernels_for, on_device

SUPPORT = Path(__file__).parents[1] / "support"


def in_process(*command: str, **environment: str) -> str:
    """What a process prints whose device binds RANGE bytes."""
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *sys.path])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600,
        env={**os.environ, "LAPILLI_STORAGE_RANGE": str(RANGE), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_operators_agree() -> None:
    """Operators of the eager device, programs and torch.compile: none runs on the CPU instead, and all results are right."""
    found = [json.loads(line) for line in in_process(str(SUPPORT / "large_process.py")).splitlines()]
    assert {name for name, _ in found} > TAKEN
    assert {name: wrong for name, wrong in found if wrong} == {}


@pytest.mark.long
def test_operators_agree_with_kernels_of_gpus(tmp_path: Path) -> None:
    """They bind in parts what those of software drivers read through texel buffers."""
    printed = in_process(str(SUPPORT / "large_process.py"), "--gpu-plans", LAPILLI_CACHE_DIR=str(tmp_path))
    found = dict(json.loads(line) for line in printed.splitlines())
    assert found.keys() == TAKEN_OF_GPUS
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.part(2)
@pytest.mark.parametrize("kernels", ["the device's", "gpu"])
def test_refusals_say_what_to_do(kernels: str, tmp_path: Path) -> None:
    """Of programs whose sizes have no bound, and of values with more parts than a kernel has bindings."""
    script = """
        import torch, lapilli, warnings
        class Double(torch.nn.Module):
            def forward(self, x): return torch.cat([x, x]) * 2
        rows = torch.export.Dim("rows", min=2)
        program = lapilli.compile(Double(), (torch.ones(4, 64),), dynamic_shapes={"x": {0: rows}})
        print(program.plan, program(torch.ones(16, 64)).shape)
        try: program(torch.ones(50, 64))
        except lapilli.NoDeviceError as error: print(error)
        x = torch.ones(100_000).to("vulkan")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert (x + x).sum().item() == 200_000
        print(seen[0].message)
    """
    forced = "import as_gpu; as_gpu.on_any_device()" if kernels == "gpu" else ""
    lines = [forced, *(line[8:] for line in script.splitlines())]
    printed = in_process("-c", "\n".join(lines), LAPILLI_CACHE_DIR=str(tmp_path))
    plan = printed.split()[0]
    assert "[32, 64]" in printed and (kernels != "gpu" or plan == "gpu-fp32")
    # The first binding that is too large: what is read, 50 rows of 256 bytes, unless it is seen through a texel buffer, which has
    # another limit; then what is written, twice as much.
    refused = "25.0 KiB" if plan == "cpu-fp32" else "12.5 KiB"
    assert f"cannot use {refused} of a buffer at once" in printed and "its limit is 8.0 KiB" in printed
    assert "torch.export.Dim(name, max=...)" in printed
    assert "its tensors are larger than what the kernels of the device reach at once" in printed


def doubled(count: Int, dtype: DType = DType.float32) -> Graph:
    known = {next(iter(count.atoms())).name: count} if count.value is None else {}  # type: ignore[attr-defined]
    x = Input((count,), dtype, "x", "input", index=0)
    axes, at = fresh_axes((count,))
    return Graph([x], [Map((count,), dtype, "y", "y", axes=axes, body=load(x, at))], known)


def parts(graph: Graph, target: Target) -> list[tuple[bool, int]]:
    """Of every binding whether it is written, and its number among the parts of its value."""
    (written,) = write_all(schedule_of(graph, target)).values()
    assert all(b.parts == max(c.part for c in written.bindings if c.node is b.node) + 1 for b in written.bindings)
    return [(b.written, b.part) for b in written.bindings]


def test_values_have_as_many_parts_as_they_must() -> None:
    small = bound_in_parts(GPU)
    assert small.storage == 1 << 27 and small.name == "gpu-fp32-parts"
    most = small.storage // 4
    whole = [(False, 0), (True, 0)]
    assert parts(doubled(as_int(most)), small) == whole
    assert parts(doubled(as_int(most + 1)), small) == [(False, 0), (False, 1), (True, 0), (True, 1)]
    assert parts(doubled(as_int(most + 1)), GPU) == whole
    assert len(parts(doubled(as_int(15 * most + 1)), small)) == 32
    assert len(parts(doubled(as_int(40 * most)), small)) == 32, "a kernel has no more bindings"
    assert parts(doubled(as_int(2 * most)), bound_in_parts(CPU)) == [(False, 0), (True, 0), (True, 1)], (
        "texel buffers are whole"
    )
    assert parts(doubled(symbol("n", 1)), small) == whole
    assert len(parts(doubled(symbol("n", 1)), for_values(small, 3 * small.storage))) == 8


def test_nothing_has_more_elements_than_kernels_count() -> None:
    """Parts of bytes end before 2^31."""
    found = parts(doubled(as_int((1 << 31) + 4), DType.int8), bound_in_parts(GPU))
    assert len(found) == 2 * 15
    model = torch.nn.Flatten(0)
    with pytest.raises(lapilli.CompileError, match="2147483648 elements, and kernels count up to 2147483647"):
        lapilli.compile(model, (torch.empty(1, dtype=torch.bool).expand(1 << 16, 1 << 15),))


def test_the_target_of_a_device_binds_what_it_can() -> None:
    assert on_device(CPU, {"storage_buffer_range": (1 << 32) - 1, "storage_buffers": 31}).storage == (1 << 32) - 256
    assert for_values(CPU, 1 << 40) == CPU, "whatever the device binds is not known"


def test_programs_have_a_plan_in_parts_only_for_large_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other programs stay as they are, and devices that bind more at once take the plan without parts."""
    monkeypatch.setattr(targets, "STORAGE", RANGE)
    rows = torch.export.Dim("rows", min=1, max=1000)

    def plans(n: int, dynamic: Any = None) -> list[str]:
        program = lapilli.compile(torch.nn.ReLU(), (torch.ones(n, 64),), dynamic_shapes=dynamic)
        assert program.plan == f"{kernels_for(program.device.type, program.device.limits)}-fp32"
        return [p.name for p in program.description.methods[0].plans]

    assert plans(32) == ["gpu-fp32", "cpu-fp32", "any-fp32"]
    both = ["gpu-fp32", "gpu-fp32-parts", "cpu-fp32", "cpu-fp32-parts", "any-fp32", "any-fp32-parts"]
    assert plans(33) == both
    assert plans(4, {"input": {0: rows}}) == both


BIG = 50 << 20  # numbers of 32 bits: 200 MiB, where lavapipe binds 128 at once


@pytest.mark.parametrize(
    "f", [lambda x: x + x, lambda x: x.view(-1, 1 << 10).t()[3:5].contiguous()], ids=["x + x", "view"]
)
def test_more_than_128_mebibytes(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A value that is really larger than what lavapipe and many phones bind at once."""
    x = torch.arange(BIG, dtype=torch.float32)
    assert torch.equal(f(x.to("vulkan")).cpu(), f(x))


def test_a_program_with_more_than_128_mebibytes() -> None:
    model = torch.nn.Threshold(BIG - 10.0, -1.0)
    x = np.arange(BIG, dtype=np.float32)
    program = lapilli.compile(model, (torch.from_numpy(x),), target="cpu-fp32")
    assert np.array_equal(program(x), np.where(x > BIG - 10, x, -1))
