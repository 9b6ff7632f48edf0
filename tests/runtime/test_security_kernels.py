"""Kernels of strangers: hostile ones are refused with a sentence, our own are taken, and no index leaves its array."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import hostile_kernels
import numpy as np
import pytest
import torch
from hostile_kernels import ACCEPTED, REFUSED
from torch import nn

import lapilli
from lapilli import player
from lapilli.errors import InvalidFileError
from lapilli.runtime import validator

A = np.arange(64, dtype=np.int32) * 3


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_kernel_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(InvalidFileError, match=words):
        player.describe(hostile_kernels.program(make()))


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_honest_kernel_is_taken(name: str) -> None:
    file = hostile_kernels.program(ACCEPTED[name]())
    player.describe(file)
    with player.NativeProgram.load(file) as native:
        native.run([A, A])


def test_every_word_may_be_damaged() -> None:
    """Whatever one word of a kernel is changed into: a sentence, or a kernel that lavapipe compiles."""
    code = ACCEPTED["a loop"]().code()
    random = np.random.default_rng(7)
    taken = 0
    for at in range(5, len(code) // 4):
        for value in (
            0,
            int(random.integers(1 << 32)),
            int(np.frombuffer(code, "<u4")[at]) ^ (1 << int(random.integers(32))),
        ):
            kernel = hostile_kernels.plain()
            damaged = code[: 4 * at] + (value & 0xFFFFFFFF).to_bytes(4, "little") + code[4 * at + 4 :]
            kernel.code = lambda damaged=damaged: damaged  # type: ignore[method-assign]
            try:
                player.describe(hostile_kernels.program(kernel))
            except InvalidFileError:
                continue
            taken += 1
    assert taken < len(code) // 4  # of three times as many: names of members, constants, unused decorations


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("storage", [4, 7], ids=["work group", "invocation"])
def test_an_index_stays_in_its_array(storage: int, write: bool) -> None:
    """Robust buffer access does not cover these arrays; on lavapipe they lie among the memory of the process."""
    kernel = hostile_kernels._indexed(storage, 4, write)
    with player.NativeProgram.load(hostile_kernels.program(kernel, shared=16)) as native:
        for index in (4, 1 << 20, 0x08000000, 0x7FFFFFFF, -1, -(1 << 31)):
            a = np.full(64, index, np.int32)
            (y,) = native.run([a, A])
            if write:  # what was written at the last place is what is read there
                assert set(y) <= set(A)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class _Integers(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        order = x.argsort(-1)
        return (
            order,
            x.gather(-1, order),
            (n * 3 + 1) % 7,
            n.to(torch.uint8),
            x.cumsum(0),
            x.topk(3).values,
            n.bool().any(),
        )


_CONV = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, 1, 1, groups=16),
                      nn.Conv2d(16, 24, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))  # fmt: skip
_MODELS: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "convolutions": (_CONV, (torch.randn(2, 3, 32, 32),)),
    "wide convolutions": (nn.Conv2d(64, 64, 3, 1, 1), (torch.randn(1, 64, 16, 16),)),
    "attention": (_Attention(), (torch.randn(2, 2, 48, 32),)),
    "integers": (_Integers(), (torch.randn(8, 16), torch.arange(20).reshape(4, 5))),
    "products": (nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 7), nn.Softmax(-1)), (torch.randn(33, 48),)),
    "one row": (nn.Linear(512, 256), (torch.randn(1, 512),)),
    "a large product": (nn.Linear(1024, 2048), (torch.randn(1024, 1024),)),
}
_TARGETS = ("gpu-fp16-matrix", "gpu-fp16", "gpu-fp32", "cpu-fp16", "cpu-fp32", "any-fp32")


@pytest.mark.part(3)
@pytest.mark.parametrize("name", _MODELS)
def test_our_own_kernels_are_taken(name: str) -> None:
    """Of every family and plan, whatever device is there: the reader verifies them."""
    from lapilli.compiler import compile_to_bytes

    model, inputs = _MODELS[name]
    for target in _TARGETS:
        precision = "fp16" if "fp16" in target else "fp32"
        file = compile_to_bytes(model.eval(), inputs, precision=precision, target=target)
        assert player.describe(file)["kernels"]
    for target in ("gpu-bf16-matrix", "gpu-fp16"):
        given = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
        assert player.describe(compile_to_bytes(copy.deepcopy(model).eval().bfloat16(), given, target=target))[
            "kernels"
        ]


def test_a_driver_never_sees_what_was_refused(tmp_path: Path) -> None:
    """All of them in one process that must live: no refusal depends on the driver."""
    for n, (make, _) in enumerate(REFUSED.values()):
        (tmp_path / f"{n}.lap").write_bytes(hostile_kernels.program(make()))
    code = f"""
from pathlib import Path
import lapilli
refused = 0
for path in Path({str(tmp_path)!r}).iterdir():
    try: lapilli.load(path)
    except lapilli.InvalidFileError: refused += 1
print(refused)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ.copy()
    )
    assert out.returncode == 0 and int(out.stdout) == len(REFUSED), out.stderr


def test_the_validator_looks_at_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(validator, "distribution", _no_distribution)
    path = tmp_path / "plain.lap"
    path.write_bytes(hostile_kernels.program(ACCEPTED["a loop"]()))
    with pytest.raises(lapilli.UnsupportedOperatorError, match=r"lapilli\[validate\]"):
        lapilli.load(path, verify="full")
    with pytest.raises(lapilli.InvalidInputError, match='"structure", "full" or "first-run"'):
        lapilli.load(path, verify="most")


def _no_distribution(name: str) -> None:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize("verdict", ["valid", "refused", "late"])
def test_the_validators_word_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    """With one that is not SPIRV-Tools', which reads the kernel and says what it is told."""
    script = tmp_path / "spirv-val"
    ends = {"valid": "", "refused": "echo error: 9: not so; exit 1", "late": "sleep 30"}[verdict]
    script.write_text(f"#!/bin/sh\ncat >{tmp_path}/kernel\n{ends}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(validator, "_SECONDS", 10 if verdict != "late" else 0.5)
    file = hostile_kernels.program(hostile_kernels.plain())
    if verdict == "valid":
        validator.validate(file)
    else:
        with pytest.raises(InvalidFileError, match="not so" if verdict == "refused" else "not finished"):
            validator.validate(file)
    assert (tmp_path / "kernel").read_bytes() == hostile_kernels.plain().code()


def test_spirv_tools_agrees() -> None:
    """Our verification takes nothing of these that the validator refuses."""
    try:
        validator.program()
    except lapilli.UnsupportedOperatorError as error:
        pytest.skip(str(error))
    for make in ACCEPTED.values():
        validator.validate(hostile_kernels.program(make()))
