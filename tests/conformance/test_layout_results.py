"""Whatever layouts are chosen, results are right."""

from __future__ import annotations

import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from layout_cases import MODELS

import lapilli


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_results_agree(target: str, gpu_plans: None) -> None:
    for name, (f, x, _) in MODELS.items():
        with torch.no_grad(), lapilli.compile(Function(f), (x,), target=target) as program:
            assert relative_error(program(x), f(x)) <= FLOAT_BOUND, name
