"""`lapilli.verify`: a wrong number is located to a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lapilli
from lapilli.ir.scalar import OPS


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.Hardswish(),
        nn.Conv2d(32, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5), nn.Softmax(-1),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_kernel_of_a_model_is_right(precision: str) -> None:
    """Half precision rounds once a kernel: 2^-11."""
    checks = lapilli.verify(network(), (torch.randn(2, 3, 11, 9),), precision=precision)  # type: ignore[arg-type]
    assert any(c.label.startswith("conv2d") for c in checks)
    assert all(c.kernel for c in checks)
    assert max(c.error for c in checks) <= (1e-6 if precision == "fp32" else 2**-11)


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_plans(target: str, gpu_plans: None) -> None:
    checks = lapilli.verify(network(), (torch.randn(1, 3, 8, 8),), target=target)
    assert max(c.error for c in checks) <= 1e-6


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp16", "gpu-fp16"])
def test_bfloat16(target: str, gpu_plans: None) -> None:
    """Inputs, weights and results are bits; a kernel's result is rounded once, where the device stores 16 bits: 2^-8."""
    checks = lapilli.verify(network().bfloat16(), (torch.randn(1, 3, 8, 8).bfloat16(),), target=target)
    assert max(c.error for c in checks) <= (1e-6 if target == "any-fp32" else 2**-8)


def test_dynamic_sizes() -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    checks = lapilli.verify(
        network(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},), target="any-fp32",
        inputs=[torch.randn(5, 3, 8, 8)],
    )  # fmt: skip
    assert max(c.error for c in checks) <= 1e-6


def test_the_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose exponential is wrong: only the kernels that use it stand out."""
    monkeypatch.setitem(OPS, "exp", replace(OPS["exp"], slang=OPS["exp2"].slang))
    checks = lapilli.verify(network(), (torch.randn(1, 3, 8, 8),), target="any-fp32")
    wrong = [c for c in checks if c.error > 1e-5]
    assert wrong
    assert all("softmax" in c.label for c in wrong)


def test_unknown_target() -> None:
    with pytest.raises(lapilli.CompileError, match="choose one of"):
        lapilli.verify(network(), (torch.randn(1, 3, 8, 8),), target="gpu")
