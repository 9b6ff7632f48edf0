"""Training on the device "vulkan" gives the losses of the CPU."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch
import training

from lapilli import autoload

autoload.register()


@pytest.mark.parametrize(
    ("model", "optimizer", "steps"),
    [pytest.param("cnn", "sgd", 6, marks=pytest.mark.poor_device), ("transformer", "adamw", 5)],
)
def test_losses_are_those_of_the_cpu(model: str, optimizer: str, steps: int) -> None:
    before = torch.vulkan.fallbacks()
    ours = training.train(model, optimizer, steps, "vulkan")
    assert torch.vulkan.fallbacks() == before  # all of it ran on the device
    torch.testing.assert_close(ours, training.train(model, optimizer, steps, "cpu"), rtol=2e-4, atol=0)
    assert ours[-1] < ours[0]


def test_mixed_precision() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs on the CPU")  # what GradScaler does
        ours = training.train("cnn", "adamw", 4, "vulkan", autocast=True)
    torch.testing.assert_close(ours, training.train("cnn", "adamw", 4, "cpu"), rtol=2e-2, atol=0)


@pytest.mark.poor_device
def test_the_eager_example() -> None:
    example = runpy.run_path(str(Path(training.__file__).with_name("eager.py")))
    ours, theirs = (example["mandelbrot"](24, 8, 12, device) for device in ("vulkan", "cpu"))
    assert torch.equal(ours.cpu(), theirs)
    assert example["draw"](ours, 12) == example["draw"](theirs, 12)
