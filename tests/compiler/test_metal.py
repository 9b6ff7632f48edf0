"""Programs for Apple's GPUs: their plans, and their kernels in Metal's language, by Slang and as MoltenVK translates them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import metal_language
import pytest
import torch
from click.testing import CliRunner
from decision_cases import CASES, prepared
from torch import nn

from lapilli.cli import main
from lapilli.codegen import slang
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError
from lapilli.lower import lower
from lapilli.runtime.description import Description
from lapilli.target import GPU_MATRIX, KNOWN, METAL, Target, of_device, usual_precision

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Softmax(-1)).eval()
IMAGE = (torch.zeros(1, 3, 8, 8),)
BUFFERS = 31  # of a kernel of Metal


def written(name: str, target: Target) -> list[KernelSource]:
    return list(write_all(schedule_of(lower(prepared(name, True), "fp16", True), target)).values())


@cache
def kernels() -> list[KernelSource]:
    target = of_device(KNOWN[METAL], half=True, matrix=True)
    return list({w.source: w for name in CASES for w in written(name, target)}.values())


def test_the_usual_precision_is_half() -> None:
    assert [usual_precision(name) for name in (METAL, "apple-m", None)] == ["fp16", "fp32", "fp32"]


@pytest.mark.parametrize("precision, plans", [("fp16", ["gpu-fp16", "any-fp32"]), ("fp32", ["gpu-fp32", "any-fp32"])])
def test_the_plans_of_a_program_for_metal(precision: str, plans: list[str]) -> None:
    made = Description.of(compile_to_bytes(MODEL, IMAGE, target="metal", precision=precision))
    assert [plan.name for plan in made.methods[0].plans] == plans


def test_every_kernel_is_written_in_metals_language() -> None:
    assert len(kernels()) > 15
    for w in kernels():
        text = slang.to_metal(w.source)
        (entry,) = re.findall(r"\[\[kernel\]\] void \w+\((.*)\)\n", text)
        assert entry.count("[[buffer(") == len(w.bindings) + bool(w.params) <= BUFFERS, w.name
        assert "#line" not in text
        assert w.needs.subgroup_size == 0, "nobody may ask MoltenVK for one"
        assert "globallycoherent" not in w.source, "Metal orders no writes for other work groups"


def test_moltenvk_translates_every_kernel() -> None:
    for w in kernels():
        spirv = slang.compile(w.source)
        for variant in metal_language.VARIANTS:
            text = metal_language.from_spirv(spirv, variant)
            (entry,) = re.findall(r"^kernel void main0\((.*)\)$", text, re.M)
            argument_buffers = "[[id(" in text
            assert argument_buffers == (variant == "macOS"), w.name
            assert argument_buffers or entry.count("[[buffer(") == len(w.bindings) + bool(w.params), w.name


def test_what_metal_has_not_is_refused() -> None:
    (product,) = (w for w in written("product of 2048", GPU_MATRIX) if "coopmat" in w.source)
    with pytest.raises(CompileError, match="does not compile"):
        slang.to_metal(product.source)
    with pytest.raises(metal_language.RefusedError):
        metal_language.from_spirv(slang.compile(product.source), "macOS")


def test_kernels_are_told_in_the_order_of_the_file() -> None:
    told: list[tuple[str, str, bytes]] = []
    data = compile_to_bytes(MODEL, IMAGE, target="metal", each_kernel=lambda *kernel: told.append(kernel))
    assert [(name, len(code)) for name, _, code in told] == [
        (k.name, k.code_size) for k in Description.of(data).kernels
    ]
    assert all(code == slang.compile(source) for _, source, code in told[:2])


def test_the_command_line_writes_kernels_beside_the_program(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(MODEL, IMAGE), tmp_path / "m.pt2")
    given = ["compile", str(tmp_path / "m.pt2"), "--msl", str(tmp_path / "msl")]
    refused = CliRunner().invoke(main, given)
    assert refused.exit_code == 2 and "add --target metal or apple-m" in refused.output
    done = CliRunner().invoke(main, [*given, "--target", "metal"])
    assert done.exit_code == 0 and "plans gpu-fp16, any-fp32" in done.output, done.output
    made = Description.of(tmp_path / "m.lap")
    names = sorted(path.name for path in (tmp_path / "msl").iterdir())
    assert len(names) == 2 * len(made.kernels)
    assert names[0].startswith("000-") and {Path(name).suffix for name in names} == {".metal", ".spv"}
    assert [(tmp_path / "msl" / name).stat().st_size for name in names[1::2]] == [k.code_size for k in made.kernels]
