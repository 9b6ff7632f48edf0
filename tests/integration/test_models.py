"""Whole image classifiers: torchvision's architectures with random weights, against torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from image_models import SIDES, image, model_of

import lapilli
from lapilli.target import FEW

POOR = ("mobilenet_v2", "shufflenet_v2_x0_5", "regnet_y_400mf")  # on SwiftShader too


def check(name: str, target: str | None = None, runs: int = 3) -> None:
    """The error bound, and several runs with the same bits."""
    model, x = model_of(name), image(name)
    with torch.no_grad():
        want = model(x)
    with lapilli.compile(model, (x,), target=target) as program:
        got = program(x)
        assert relative_error(got, want) <= FLOAT_BOUND
        assert all(torch.equal(program(x), got) for _ in range(runs - 1))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.poor_device] if n in POOR else []) for n in SIDES])
@pytest.mark.part(8)
def test_agrees_with_torch(name: str) -> None:
    check(name, runs=10 if name == "mobilenet_v2" else 3)


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["mobilenet_v2", "regnet_y_400mf"])
def test_kernels_for_gpus_agree_with_torch(name: str, gpu_plans: None) -> None:
    check(name, "gpu-fp32", runs=2)  # their barriers are slow on a software driver


def test_mobilenet_at_its_own_size() -> None:
    """224 pixels: at most 60 dispatches a run, and copies where few buffers are bound; the shipped file takes the same road as a
    program in memory."""
    model = model_of("mobilenet_v2")
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(22))
    with torch.no_grad():
        want = model(x)
    with lapilli.compile(model, (x,)) as program:
        assert relative_error(program(x), want) <= FLOAT_BOUND
        for plan in program.description.methods[0].plans:
            assert len(plan.run) <= (66 if plan.name == FEW.name else 60), plan.name


@pytest.mark.part(2)
@pytest.mark.parametrize("batch", [2, 7])
def test_batches(batch: int) -> None:
    """Every image of a batch gets what torch gives it."""
    model, x = model_of("mobilenet_v2"), image("mobilenet_v2", batch)
    with torch.no_grad():
        want = model(x)
    with lapilli.compile(model, (x,)) as program:
        got = program(x)
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) <= FLOAT_BOUND


def test_image_that_is_not_square() -> None:
    model = model_of("resnet18")
    x = torch.randn(1, 3, 61, 83, generator=torch.Generator().manual_seed(23))
    with torch.no_grad():
        want = model(x)
    with lapilli.compile(model, (x,)) as program:
        assert relative_error(program(x), want) <= FLOAT_BOUND
