"""Packed sequences inside programs: recurrent layers over sequences of different lengths, which are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent_agreement import agree, is_one_method
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import lapilli
from lapilli.lower import recurrent

SORTED = ((7, [7, 5, 5, 2]), (9, [8, 6, 1]), (65, [65, 1]), (2, [1]))
"""Lengths of padded tensors, and of the sequences in them."""


class Packed(nn.Module):
    """Everything that comes out of a layer over packed sequences."""

    def __init__(self, layer: Any, enforce_sorted: bool, whole: bool) -> None:
        super().__init__()
        self.layer, self.enforce_sorted, self.whole = layer, enforce_sorted, whole

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        first: bool = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=self.enforce_sorted)
        y, states = self.layer(packed)
        length = x.shape[1 if first else 0] if self.whole else None
        return pad_packed_sequence(y, first, padding_value=-1.5, total_length=length), states


def shapes(batch_first: bool) -> Any:
    time, batch = Dim("time", max=80), Dim("batch", max=8)
    return ({0: batch, 1: time} if batch_first else {0: time, 1: batch}), {0: batch}


def given(length: int, lengths: list[int], batch_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(length, len(lengths), 3)
    return (x.transpose(0, 1).contiguous() if batch_first else x), torch.tensor(lengths)


CASES: dict[str, tuple[Any, bool, bool]] = {
    "lstm": (lambda: nn.LSTM(3, 5, batch_first=True), False, True),
    "lstm both ways": (lambda: nn.LSTM(3, 6, 2, bidirectional=True, proj_size=4), True, False),
    "gru both ways": (lambda: nn.GRU(3, 5, 2, bidirectional=True), False, False),
    "relu": (lambda: nn.RNN(3, 5, nonlinearity="relu", batch_first=True, bias=False), True, True),
    "tanh": (lambda: nn.RNN(3, 5, bidirectional=True), False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_lengths_are_an_input(name: str) -> None:
    """With `total_length` nothing is left to the host; without it, it reads one number, the greatest length."""
    torch.manual_seed(1)
    make, enforce_sorted, whole = CASES[name]
    model = Packed(make(), enforce_sorted, whole).eval()
    first = model.layer.batch_first
    program = lapilli.compile(
        model, given(*SORTED[0], first), dynamic_shapes=shapes(first), fallback="error" if whole else "cpu"
    )
    assert is_one_method(program) is whole and not program.report().on_cpu
    for length, lengths in SORTED:
        args = given(length, lengths if enforce_sorted else lengths[1:] + lengths[:1], first)
        agree(program(*args), model, args, length, 16)


@pytest.mark.parametrize("source", ["script", "trace"])
def test_in_torchscript(source: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 5, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, states = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            return pad_packed_sequence(y, batch_first=True)[0], states

    torch.manual_seed(2)
    model = Model().eval()
    example = given(*SORTED[0], True)
    script = torch.jit.script(model) if source == "script" else torch.jit.trace(model, example)
    program = lapilli.compile(script, example, dynamic_shapes=shapes(True))
    for length, lengths in SORTED:
        args = given(length, lengths[::-1], True)
        agree(program(*args), model, args, length)


def test_rows_go_through_other_layers_and_initial_states_are_sorted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 3), nn.Linear(12, 7)
            self.first, self.second = nn.GRU(3, 6, bidirectional=True), nn.LSTM(7, 4, 2)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
            p = pack_padded_sequence(ids, lengths, enforce_sorted=False)
            p = PackedSequence(self.embedding(p.data), *p[1:])
            y, first = self.first(p)
            y = PackedSequence(self.linear(y.data).relu(), *y[1:])
            z, last = self.second(y, (h, c))
            return pad_packed_sequence(z)[0], first, last

    torch.manual_seed(3)
    model = Model().eval()

    def inputs(length: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        n = len(lengths)
        return torch.randint(0, 9, (length, n)), torch.tensor(lengths), torch.randn(2, n, 4), torch.randn(2, n, 4)

    over, _ = shapes(False)
    sizes = (over, {0: over[1]}, {1: over[1]}, {1: over[1]})
    program = lapilli.compile(model, inputs(*SORTED[0]), dynamic_shapes=sizes)
    assert not program.report().on_cpu
    for length, lengths in SORTED:
        args = inputs(length, lengths[1:] + lengths[:1])
        agree(program(*args), model, args, length, 32)


def test_lengths_that_are_known() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 5)

        def forward(self, x: torch.Tensor) -> Any:
            y, states = self.gru(pack_padded_sequence(x, [6, 5, 2]))
            return pad_packed_sequence(y)[0], states

    model = Model().eval()
    x = torch.randn(7, 3, 3)
    agree(lapilli.compile(model, (x,))(x), model, (x,), 7)


def test_what_is_too_long_for_the_gpu_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "PIECES", 0)
    model = Packed(nn.LSTM(3, 5), False, True).eval()
    program = lapilli.compile(model, given(*SORTED[0]), dynamic_shapes=shapes(False))
    reasons = {o.operator: o.reason for o in program.report().on_cpu}
    assert "at most 0 steps" in reasons["lapilli.lstm_padded.default"]
    for length, lengths in SORTED:
        args = given(length, lengths[::-1])
        agree(program(*args), model, args, length)


def test_what_reads_packed_rows_otherwise_is_right_on_the_cpu() -> None:
    """A sum over packed rows is none over padded ones: torch's own operators do it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 5)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            y, states = self.gru(pack_padded_sequence(x, lengths))
            return y.data.sum(0), y.data, y.batch_sizes, states

    model = Model().eval()
    program = lapilli.compile(model, given(*SORTED[0]), dynamic_shapes=shapes(False))
    assert {o.operator for o in program.report().on_cpu} >= {"aten._pack_padded_sequence.default", "aten.gru.data"}
    for length, lengths in SORTED:
        args = given(length, lengths)
        agree(program(*args), model, args, length, 8 * sum(lengths))
