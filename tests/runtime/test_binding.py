"""The performance recipe at run time: memory that is bound once, and images that stay channels-last."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from torch import nn
from torch.export import Dim

import lapilli

TARGET = "cpu-fp32"
LAST = torch.channels_last


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(50)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
    return nn.Sequential(*layers).eval().to(memory_format=LAST)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 20, generator=torch.Generator().manual_seed(51)).to(memory_format=LAST)


@pytest.fixture(scope="module")
def program(model: nn.Module, image: torch.Tensor) -> Any:
    with lapilli.compile(model, (image,), target=TARGET) as compiled:
        yield compiled


def test_channels_last_stays_so(model: nn.Module, image: torch.Tensor, program: lapilli.Program) -> None:
    """The program's own input is what lies in memory; the shapes that people see are torch's."""
    with torch.no_grad():
        want = model(image)
    got = program(image)
    assert got.is_contiguous(memory_format=LAST) and want.is_contiguous(memory_format=LAST)
    assert relative_error(got, want) <= FLOAT_BOUND
    assert program.inputs[0].shape == (2, 3, 16, 20) and program.outputs[0].shape == (2, 8, 16, 20)
    assert program.description.methods[0].inputs[0].shape == (2, 16, 20, 3)
    assert relative_error(program(image.contiguous()), want) <= FLOAT_BOUND  # another format is copied
    (array,) = program.run_flat([image.numpy()])
    assert array.shape == (2, 8, 16, 20) and relative_error(torch.from_numpy(array), want) <= FLOAT_BOUND


def test_channels_last_is_not_copied(image: torch.Tensor, program: lapilli.Program) -> None:
    (value,), _ = program.methods["forward"].convention.values([image])
    assert value.ctypes.data == image.data_ptr()
    assert program(image).permute(0, 2, 3, 1).is_contiguous()


def test_channels_last_with_dynamic_sizes(model: nn.Module, image: torch.Tensor, tmp_path: Any) -> None:
    dims = {0: Dim("n", min=1, max=8), 2: Dim("h", min=4, max=64), 3: Dim("w", min=4, max=64)}
    with lapilli.compile(model, (image,), target=TARGET, dynamic_shapes=(dims,)) as program:
        program.save(tmp_path / "model.lap")
    with lapilli.load(tmp_path / "model.lap") as program, torch.no_grad():
        for shape in ((3, 3, 10, 12), (1, 3, 8, 5)):
            x = torch.randn(shape).to(memory_format=LAST)
            assert relative_error(program(x), model(x)) <= FLOAT_BOUND


def test_wrong_shapes_are_named_as_people_see_them(program: lapilli.Program) -> None:
    with pytest.raises(
        lapilli.InvalidInputError, match=r"float32\[2, 3, 16, 20\] was given as torch.float32\[2, 16, 20, 3\]"
    ):
        program(torch.randn(2, 16, 20, 3))
    with pytest.raises(lapilli.InvalidInputError, match=r"was given as torch.float32\[3, 16, 20\]"):
        program(torch.randn(3, 16, 20))


def test_bound_runs_allocate_nothing(model: nn.Module, image: torch.Tensor, program: lapilli.Program) -> None:
    """Python's memory by tracemalloc, the device's by the player's counters: a hundred runs leave both as they were, and in
    between there is never more than a few numbers; an output alone has 20 kB."""
    x, y = image.clone(memory_format=torch.preserve_format), torch.empty(2, 8, 16, 20).to(memory_format=LAST)
    run = program.bind(x, outputs=y)
    assert run() is y
    device = program.memory()

    def growth() -> tuple[int, int]:
        """Of what is allocated, and of its most."""
        tracemalloc.start()
        run()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            run()
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return after - before, peak - before

    # Other threads of the process (the test runner's) only add: the least of three counts.
    kept, most = (min(of) for of in zip(*(growth() for _ in range(3)), strict=True))
    assert kept < 200 and most < 1000 < y.nbytes
    assert program.memory() == device
    x.mul_(2)
    run()
    with torch.no_grad():
        assert relative_error(y, model(x)) <= FLOAT_BOUND


def test_bound_outputs_are_made_where_none_are_given(image: torch.Tensor, program: lapilli.Program) -> None:
    run = program.bind(image)
    first = run()
    assert first is run() and first is run.outputs
    assert torch.equal(first, program(image))


def test_binding_numpy_and_changed_inputs() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
            self.count.add_(1)
            x.add_(n)
            return {"y": x * self.count}

    with lapilli.compile(Steps(), (torch.zeros(3), 2), target=TARGET) as program:
        x = np.ones(3, np.float32)
        run = program.bind(x, 2)
        assert float(program.state()["count"][0]) == 0  # binding runs nothing
        assert np.allclose(run()["y"], 3) and np.allclose(x, 3)
        assert np.allclose(run()["y"], 10) and np.allclose(x, 5)


def test_memory_that_cannot_be_bound(image: torch.Tensor, program: lapilli.Program) -> None:
    with pytest.raises(lapilli.InvalidInputError, match="not laid out as the program reads it"):
        program.bind(image.contiguous())
    for wrong in (torch.empty(2, 8, 16, 20), torch.empty(2, 8, 16, 21).to(memory_format=LAST), torch.empty(2, 8)):
        with pytest.raises(lapilli.InvalidInputError, match="cannot be bound"):
            program.bind(image, outputs=wrong)
    with pytest.raises(lapilli.InvalidInputError, match="is missing"):
        program.bind()
