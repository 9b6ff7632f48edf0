"""Concatenations that are written in place give what torch gives."""

from __future__ import annotations

import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from concatenate_cases import MODELS, X

import lapilli


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_results_agree(target: str, gpu_plans: None) -> None:
    for name, (model, _) in MODELS.items():
        with torch.no_grad(), lapilli.compile(model, (X,), target=target) as program:
            assert relative_error(program(X), model(X)) <= FLOAT_BOUND, name


def test_half_precision(gpu_plans: None) -> None:
    model, _ = MODELS["two parts"]
    for target in ("gpu-fp16", "cpu-fp16", "any-fp32"):
        with torch.no_grad(), lapilli.compile(model, (X,), precision="fp16", target=target) as program:
            assert relative_error(program(X), model(X)) <= 1e-2


def test_dynamic_sizes() -> None:
    model, _ = MODELS["two parts"]
    shapes = ({2: torch.export.Dim("h", min=2, max=64), 3: torch.export.Dim("w", min=2, max=64)},)
    with torch.no_grad(), lapilli.compile(model, (X,), dynamic_shapes=shapes) as program:
        for x in (X, torch.randn(1, 8, 9, 13)):
            assert relative_error(program(x), model(x)) <= FLOAT_BOUND


@pytest.mark.parametrize("name", ["two parts", "ten parts", "skip", "along rows"])
def test_every_part_is_verified(name: str) -> None:
    checks = lapilli.verify(MODELS[name][0], (X,), target="any-fp32")
    assert checks and all(c.error < 1e-6 for c in checks)
