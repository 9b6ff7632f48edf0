"""Whole image classifiers: torchvision's architectures with random weights, against torch on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torchvision_without_ops
from agreement import FLOAT_BOUND, relative_error

import lapilli

torchvision_without_ops.allow()
from torchvision import models  # noqa: E402

# The side of the image is odd and small, as far as the architecture allows.
SIDES = {
    "mobilenet_v2": 97, "mobilenet_v3_small": 97, "resnet18": 97, "resnet50": 65, "squeezenet1_1": 97,
    "shufflenet_v2_x0_5": 97, "mnasnet0_5": 97, "efficientnet_b0": 97, "vgg11": 33, "densenet121": 65, "googlenet": 97,
    "regnet_y_400mf": 97, "convnext_tiny": 65,
}  # fmt: skip
POOR = ("mobilenet_v2", "shufflenet_v2_x0_5", "regnet_y_400mf")  # on SwiftShader too


@cache
def model_of(name: str) -> torch.nn.Module:
    """Random weights of our own seed, with batch norm statistics of one batch, so that activations keep their scale.

    The affine parts of the norms (0.5 and 1, about) make the network as well-conditioned as a trained one: with 1 and 0, each
    of 50 layers doubles a rounding error, and torch itself is off by 2e-5 from float64."""
    torch.manual_seed(20)
    options: dict[str, Any] = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    model: torch.nn.Module = getattr(models, name)(weights=None, **options)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
        torch.nn.init.uniform_(norm.weight, 0.4, 0.6)
        torch.nn.init.normal_(norm.bias, 1.0, 0.2)
    with torch.no_grad():
        model(torch.randn(4, 3, SIDES[name], SIDES[name]))
    return model.eval()


def image(name: str, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(21)
    return torch.randn(batch, 3, SIDES[name], SIDES[name])


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
def test_agrees_with_torch(name: str) -> None:
    check(name, runs=10 if name == "mobilenet_v2" else 3)


@pytest.mark.parametrize("name", ["mobilenet_v2", "regnet_y_400mf"])
def test_kernels_for_gpus_agree_with_torch(name: str, gpu_plans: None) -> None:
    check(name, "gpu-fp32", runs=2)  # their barriers are slow on a software driver


def test_mobilenet_at_its_own_size() -> None:
    """224 pixels: at most 60 dispatches a run, in every plan; the shipped file takes the same road as a program in memory."""
    model = model_of("mobilenet_v2")
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(22))
    with torch.no_grad():
        want = model(x)
    with lapilli.compile(model, (x,)) as program:
        assert relative_error(program(x), want) <= FLOAT_BOUND
        for plan in program.description.methods[0].plans:
            assert len(plan.run) <= 60, plan.name


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
