"""Recurrent layers over sequences of any length: one program for all lengths and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import plan
from recurrent_agreement import agree, is_one_method
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.ir import recurrence
from lapilli.lower import recurrent

LENGTHS = (1, 2, 3, 7, 65)
BATCHES = (1, 2, 5)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.RNN(3, 5),
    "relu": lambda: nn.RNN(4, 6, 2, nonlinearity="relu", bias=False, batch_first=True),
    "gru": lambda: nn.GRU(3, 5, bias=False),
    "gru both ways": lambda: nn.GRU(3, 7, 2, bidirectional=True, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 5, batch_first=True),
    "lstm both ways": lambda: nn.LSTM(5, 6, 3, bidirectional=True, bias=False),
    "lstm projected": lambda: nn.LSTM(3, 6, 2, bidirectional=True, proj_size=4),
    "more units than invocations": lambda: nn.LSTM(3, 261),
    "projected from more units": lambda: nn.LSTM(3, 261, proj_size=258, bias=False),
}


def sizes(layer: Any, most: int = 80) -> dict[int, Any]:
    time, batch = Dim("time", max=most), Dim("batch", max=8)
    return {0: batch, 1: time} if layer.batch_first else {0: time, 1: batch}


def sequence(layer: Any, length: int, batch: int) -> torch.Tensor:
    return torch.randn(*((batch, length) if layer.batch_first else (length, batch)), layer.input_size)


@pytest.mark.parametrize("name", LAYERS)
def test_one_program_for_all_lengths_and_batches(name: str) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name]().eval()
    program = lapilli.compile(layer, (sequence(layer, 4, 3),), dynamic_shapes=(sizes(layer),), fallback="error")
    assert is_one_method(program)
    for length in LENGTHS:
        for batch in BATCHES:
            x = sequence(layer, length, batch)
            agree(program(x), layer, (x,), length)


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_initial_states(target: str, gpu_plans: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 6, 2, proj_size=4)
            self.gru = nn.GRU(4, 5, bidirectional=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, g: torch.Tensor) -> Any:
            x, states = self.lstm(x, (h, c))
            return self.gru(x, g), states

    torch.manual_seed(2)
    model = Model().eval()
    time, batch = Dim("time", max=80), Dim("batch", max=8)
    given = lambda t, b: (torch.randn(t, b, 3), torch.randn(2, b, 4), torch.randn(2, b, 6), torch.randn(2, b, 5))  # noqa: E731
    open_batch = {1: batch}
    shapes = ({0: time, 1: batch}, open_batch, open_batch, open_batch)
    program = lapilli.compile(model, given(4, 3), dynamic_shapes=shapes, target=target)
    for length in (1, 7, 65):
        args = given(length, 5)
        agree(program(*args), model, args, length, 16)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


@pytest.mark.parametrize("source", ["module", "script", "trace"])
def test_a_part_of_a_larger_model(source: str) -> None:
    torch.manual_seed(3)
    model = Tagger().eval()
    ids = torch.randint(0, 11, (3, 4))
    given: Any = model
    if source != "module":
        given = torch.jit.script(model) if source == "script" else torch.jit.trace(model, (ids,))
    shapes = ({0: Dim("batch", max=8), 1: Dim("time", max=80)},)
    program = lapilli.compile(given, (ids,), dynamic_shapes=shapes)
    assert is_one_method(program)
    for length in (1, 2, 65):
        ids = torch.randint(0, 11, (2, length))
        agree(program(ids), model, (ids,), length)


def test_half_precision_keeps_states_whole() -> None:
    """Weights and inputs are rounded to 11 bits; states, which would gather such errors, are not."""
    torch.manual_seed(4)
    model = Tagger().eval()
    shapes = ({0: Dim("batch", max=8), 1: Dim("time", max=80)},)
    program = lapilli.compile(model, (torch.zeros(3, 4, dtype=torch.int64),), dynamic_shapes=shapes, precision="fp16")
    for length in (1, 65):
        ids = torch.randint(0, 11, (2, length))
        with torch.no_grad():
            want = model(ids)
        assert float((program(ids) - want).abs().max()) <= 8 * 2**-11 * float(want.abs().max())


def test_nothing_is_refused_as_torch_does() -> None:
    layer = nn.GRU(3, 5).eval()
    program = lapilli.compile(layer, (torch.randn(4, 3, 3),), dynamic_shapes=(sizes(layer),))
    assert program(torch.randn(4, 0, 3))[0].shape == layer(torch.randn(4, 0, 3))[0].shape
    with pytest.raises(lapilli.InvalidInputError, match=r"time in 1\.\.80"):
        program(torch.randn(0, 2, 3))


def test_a_nan_stays_in_its_sequence() -> None:
    layer = nn.LSTM(3, 5).eval()
    program = lapilli.compile(layer, (torch.randn(4, 3, 3),), dynamic_shapes=(sizes(layer),))
    x = torch.randn(6, 3, 3)
    x[2, 1, 0], x[3, 2, 1] = torch.nan, torch.inf
    with torch.no_grad():
        got, want = program(x)[0], layer(x)[0]
    assert torch.equal(got.isnan(), want.isnan()) and bool(got[:, 0].isfinite().all())


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences_too_long_for_one_loop(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """lavapipe ends the loops of an invocation after 65,535 rounds: longer sequences are several loops."""
    monkeypatch.setattr(recurrent, "ROUNDS", 20 * recurrence.rounds(5, 5, False))
    layer = nn.LSTM(3, 5, bidirectional=reverse).eval()
    program = lapilli.compile(layer, (torch.randn(4, 3, 3),), dynamic_shapes=(sizes(layer),))
    for length in (1, 19, 20, 21, 40, 61, 80):
        x = torch.randn(length, 2, 3)
        agree(program(x), layer, (x,), length)


def test_as_many_units_as_can_be() -> None:
    """130 steps of 2048 units are more than 65,535 rounds."""
    torch.manual_seed(5)
    layer = nn.RNN(2, recurrence.MOST_UNITS).eval()
    shapes = ({0: Dim("time", max=200)},)
    program = lapilli.compile(layer, (torch.randn(4, 1, 2),), dynamic_shapes=shapes, target="cpu-fp32")
    x = torch.randn(130, 1, 2)
    agree(program(x), layer, (x,), 130)


def test_known_lengths_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "STEPS", 4)

    def loops(length: int) -> int:
        tasks = plan(nn.GRU(3, 5), torch.randn(length, 2, 3)).tasks
        return sum(
            t.reduction is not None and isinstance(t.reduction.contraction, recurrence.Recurrence) for t in tasks
        )

    assert loops(4) == 0
    assert loops(5) == 1


def test_more_units_than_a_kernel_can_hold() -> None:
    layer = nn.GRU(3, recurrence.MOST_UNITS + 1).eval()
    with pytest.raises(lapilli.CompileError, match="at most 2048 units"):
        lapilli.compile(layer, (torch.randn(4, 3, 3),), dynamic_shapes=(sizes(layer),), fallback="error")


@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
def test_kernels_are_checked_one_by_one(target: str, gpu_plans: None) -> None:
    torch.manual_seed(6)
    model = nn.LSTM(3, 6, 2, proj_size=4, bidirectional=True).eval()
    checks = lapilli.verify(model, (torch.randn(5, 3, 3),), dynamic_shapes=(sizes(model),), target=target)
    found = [c for c in checks if c.kernel.startswith("recurrence")]
    assert len(found) == 4 and all(c.error <= 1e-6 for c in checks)
