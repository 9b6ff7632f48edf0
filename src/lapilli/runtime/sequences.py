"""Our own operators for recurrent layers, which torch would unroll into their steps while tracing.

`lapilli::lstm`, `gru`, `rnn_tanh` and `rnn_relu` correspond to the ATen operators with those names, by which graph passes
replace them.

Packed sequences: `pack` returns the rows of all sequences, step by step, and the number of sequences at each step;
`lstm_packed` and so on are layers over those, and `pad_packed` returns a padded tensor again. These correspond to ATen's as
well, but also tell torch's tracer their sizes. `lstm_padded` and so on compute the same on padded sequences [steps, batch,
features] of given lengths; after the end of a sequence, their results are arbitrary finite numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapilli.custom_operators import define

aten = torch.ops.aten

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_SHARED = "Tensor[] params, bool biases, int layers, float dropout, bool train, bool bidirectional"


def _results(outer: Sequence[Any], x: Tensor, hx: Any, bidirectional: bool) -> tuple[Tensor, ...]:
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return (x.new_empty((*outer, width)), *(s.new_empty(s.shape) for s in states))


def _layers(kind: str) -> None:
    several = kind == "lstm"
    states, results = ("Tensor[] hx", "(Tensor, Tensor, Tensor)") if several else ("Tensor hx", "(Tensor, Tensor)")
    packet = getattr(aten, kind)

    def whole(x: Tensor, hx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _results(x.shape[:2], x, hx, arguments[-2])

    def packed(data: Tensor, batch_sizes: Tensor, hx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _results(data.shape[:1], data, hx, arguments[-1])

    def padded(x: Tensor, lengths: Tensor, hx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _results(x.shape[:2], x, hx, arguments[-1])

    def run_padded(x: Tensor, lengths: Tensor, hx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        lengths, order = lengths.sort(descending=True)
        back = order.argsort()
        data, batch_sizes = aten._pack_padded_sequence(x[:, order], lengths, False)
        hx = [h[:, order] for h in hx] if several else hx[:, order]
        out, *last = packet.data(data, batch_sizes, hx, *arguments)
        result, _ = aten._pad_packed_sequence(out, batch_sizes, False, 0.0, x.shape[0])
        return (result[:, back], *(h[:, back] for h in last))

    define(f"{kind}(Tensor input, {states}, {_SHARED}, bool batch_first) -> {results}", packet.input, whole)
    define(f"{kind}_packed(Tensor data, Tensor batch_sizes, {states}, {_SHARED}) -> {results}", packet.data, packed)
    define(f"{kind}_padded(Tensor input, Tensor lengths, {states}, {_SHARED}) -> {results}", run_padded, padded)


for _kind in KINDS:
    _layers(_kind)


def _packed_shapes(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    ctx = torch.library.get_ctx()
    rows, steps = ctx.new_dynamic_size(), ctx.new_dynamic_size()
    torch._check(steps <= x.shape[1 if batch_first else 0])  # type: ignore[no-untyped-call]
    return x.new_empty((rows, *x.shape[2:])), lengths.new_empty((steps,))


def _padded_shapes(
    data: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, value: float, steps: int
) -> tuple[Tensor, Tensor]:
    outer = (batch, steps) if batch_first else (steps, batch)
    return data.new_empty((*outer, *data.shape[1:])), batch_sizes.new_empty((batch,))


def _pad(data: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, value: float, steps: int) -> Any:
    return aten._pad_packed_sequence(data, batch_sizes, batch_first, value, steps)


define(
    "pack(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
    aten._pack_padded_sequence,
    _packed_shapes,
)
define(
    "pad_packed(Tensor data, Tensor batch_sizes, SymInt batch, bool batch_first, float value, SymInt steps) "
    "-> (Tensor, Tensor)",
    _pad, _padded_shapes,
)  # fmt: skip
