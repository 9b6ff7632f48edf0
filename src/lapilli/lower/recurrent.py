"""Recurrent layers: LSTM, GRU and plain cells. A sequence of known length is unrolled, with kernels for every step; others
are a loop inside one kernel (`ir/recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, index, load, select, unary
from lapilli.ir.integer import Int, as_int, maximum, minimum
from lapilli.ir.node import Map, Node, Reduce
from lapilli.ir.recurrence import MOST_UNITS, ROUNDS, Recurrence, rounds
from lapilli.lower.matmul import linear
from lapilli.lower.pointwise import sigmoid
from lapilli.lower.registry import LONGEST, Call, lowering
from lapilli.lower.views import cat, stack
from lapilli.runtime.sequences import KINDS as KINDS  # importing it registers the operators

aten, ours = torch.ops.aten, torch.ops.lapilli

STEPS = 1024
"""The most steps that are unrolled, over all layers and directions of a call; each takes two or three kernels."""
PIECES = 8
"""The most loops, one after another, that a sequence is divided into if it is too long for one."""

Gate = Callable[[int], Expr]


@dataclass(frozen=True)
class _Kind:
    """A cell. x and y: contributions of the input and of the hidden state to a gate.

    carried: the new state, computed from the old one. hidden: the hidden state, if it differs from that.
    """

    gates: int
    carried: Callable[[Gate, Gate, Expr], Expr]
    hidden: Callable[[Gate, Gate, Expr], Expr] | None = None


def _new_cell(x: Gate, y: Gate, old: Expr) -> Expr:
    """LSTM: c' = sigmoid(f) * c + sigmoid(i) * tanh(g), with the gates in the order i, f, g, o; then h' = sigmoid(o) *
    tanh(c').
    """
    return sigmoid(x(1) + y(1)) * old + sigmoid(x(0) + y(0)) * unary("tanh", x(2) + y(2))


def _new_gru(x: Gate, y: Gate, old: Expr) -> Expr:
    """GRU: h' = n + z * (h - n) with n = tanh(x_n + r * y_n), and the gates in the order r, z, n."""
    new = unary("tanh", x(2) + sigmoid(x(0) + y(0)) * y(2))
    return new + sigmoid(x(1) + y(1)) * (old - new)


_LSTM = _Kind(4, _new_cell, lambda x, y, new: sigmoid(x(3) + y(3)) * unary("tanh", new))
_GRU = _Kind(3, _new_gru)
_TANH = _Kind(1, lambda x, y, _: unary("tanh", x(0) + y(0)))
_RELU = _Kind(1, lambda x, y, _: binary("max", x(0) + y(0), 0.0))


@dataclass(frozen=True)
class _Direction:
    """One direction of one layer.

    x: the input times its weights, [length, batch, gates * units]. w, b: weights and bias of the hidden state. projection:
    of an LSTM's hidden state, or None. lengths: of the sequences, if they differ.
    """

    call: Call
    kind: _Kind
    x: Node
    w: Node
    b: Node | None
    projection: Node | None
    reverse: bool
    lengths: Node | None

    @property
    def length(self) -> Int:
        return self.x.shape[0]

    @property
    def units(self) -> Int:
        return self.x.shape[2] // self.kind.gates

    def _call(self, shape: Sequence[Int]) -> Call:
        return replace(self.call, shapes=(tuple(shape),), dtypes=self.call.dtypes[:1])

    def _of_input(self, t: Int, b: Int, j: Int) -> Gate:
        return lambda k: cast_to(load(self.x, [t, b, k * self.units + j]), DType.float32)

    # -- every step as kernels
    def unrolled(self, states: list[Node], length: int) -> tuple[Node, list[Node]]:
        """The hidden states [length, batch, width], and the final states [batch, ...]."""
        found: list[Node] = []
        for t in range(length)[:: -1 if self.reverse else 1]:
            states = self._step(t, states)
            found.append(states[0])
        shape = (as_int(length), *states[0].shape)
        return stack(self._call(shape), found[:: -1 if self.reverse else 1], 0), states

    def _step(self, t: int, states: list[Node]) -> list[Node]:
        """The states after one step: hidden state, and cell state for an LSTM."""
        h, old = states[0], states[-1]
        made = linear(self._call((h.shape[0], self.w.shape[0])), h, self.w, self.b)
        call = self._call(old.shape)

        def value(f: Callable[[Gate, Gate, Expr], Expr], state: Node) -> Node:
            def body(b: Int, j: Int) -> Expr:
                return f(
                    self._of_input(as_int(t), b, j), lambda k: load(made, [b, k * self.units + j]), load(state, [b, j])
                )

            return call.map(body)

        new = value(self.kind.carried, old)
        if self.kind.hidden is None:
            return [new]
        out = value(self.kind.hidden, new)
        return [out if self.projection is None else linear(self._call(h.shape), out, self.projection), new]

    # -- a loop
    def looped(self, states: list[Node]) -> tuple[Node, list[Node]]:
        """As `unrolled`, for any length. Raises TypeError if a layer or the bound on the length is too large."""
        units, width = self.units.value, states[0].shape[1].value
        if units is None or width is None or max(units, width) > MOST_UNITS:
            raise TypeError(
                f"{self.call.op}: a dynamic length is only supported for layers of at most {MOST_UNITS} units"
            )
        piece = ROUNDS // rounds(units, width, self.projection is not None)
        most = self.call.longest(self.length, min(LONGEST, PIECES * piece))
        if most is None or most > PIECES * piece:
            raise TypeError(
                f"{self.call.op}: sequences of {units} units have at most {PIECES * piece} steps if their length is dynamic; "
                "give it a smaller `max` in its Dim"
            )
        self.call.some(self.length)
        count = -(-most // piece)
        parts: list[Node] = []
        for n in range(count):
            first = as_int(n * piece)
            size = self.length if count == 1 else minimum(maximum(self.length - first, 0), piece)
            part = self._piece(states, first, size)
            states = self._last(part, states, size)
            parts.append(part)

        def body(t: Int, b: Int, j: Int) -> Expr:
            s = self.length - 1 - t if self.reverse else t
            found = [load(part, [s - n * piece, b, j]) for n, part in enumerate(parts)]
            return reduce(
                lambda rest, n: select([(n + 1) * piece - 1 - s], found[n], rest), range(count - 1)[::-1], found[-1]
            )

        return self._call((self.length, *states[0].shape)).map(body), states

    def _piece(self, states: list[Node], first: Int, size: Int) -> Reduce:
        """All states after each of `size` steps, beginning with step `first`: [size, batch, width of all states]."""
        kind, call = self.kind, self.call
        batch, width = states[0].shape
        wide = width if kind.hidden is None else width + self.units
        (s, b, column), (si, bi, _) = fresh_axes((size, batch, wide))
        (unit, term), (ji, ki) = fresh_axes((self.units, width), "rk")
        t = first + si
        t = self.length - 1 - t if self.reverse else t
        stand_ins = [Node((batch, self.units), DType.float32, f"{call.name}_state{k}") for k in range(kind.gates + 2)]
        *sums, old, new = stand_ins
        bias = self.b

        def gate(k: int) -> Expr:
            e = load(sums[k], [bi, ji])
            return e if bias is None else e + cast_to(load(bias, [k * self.units + ji]), DType.float32)

        x = self._of_input(t, bi, ji)
        note = Recurrence(
            s, b, unit, self.w, tuple(states), tuple(sums), old, new,
            carried=kind.carried(x, gate, load(old, [bi, ji])),
            hidden=None if kind.hidden is None else kind.hidden(x, gate, load(new, [bi, ji])),
            projection=self.projection,
            live=None if self.lengths is None else binary("lt", index(t), load(self.lengths, [bi])),
        )  # fmt: skip
        read = [
            *note.loads(),
            load(self.w, [ji, ki]),
            *(load(n, [bi, k]) for n, k in zip(states, (ki, ji), strict=False)),
        ]
        if self.projection is not None:
            read.append(load(self.projection, [ki, ji]))
        return Reduce(
            (size, batch, wide), DType.float32, call.name, call.op, axes=(s, b, column), raxes=(unit, term),
            body=reduce(lambda e, ld: e + cast_to(ld, DType.float32), read[1:], cast_to(read[0], DType.float32)),
            contraction=note,
        )  # fmt: skip

    def _last(self, part: Node, states: list[Node], size: Int) -> list[Node]:
        """The states after a piece, or the given ones if the piece has no steps."""
        found: list[Node] = []
        for n, state in enumerate(states):
            start = states[0].shape[1] * n

            def body(b: Int, j: Int, state: Node = state, start: Int = start) -> Expr:
                last = load(part, [size - 1, b, start + j])
                return select([size - 1], last, cast_to(load(state, [b, j]), DType.float32))

            found.append(self.call.map(body, shape=state.shape, dtype=DType.float32))
            found[-1].dtype = DType.float32  # intermediates of an operator stay float32 in half precision
        return found


def _layers(
    kind: _Kind, call: Call, x: Node, initial: Sequence[Node], params: Sequence[Node], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, lengths: Node | None = None,
) -> list[Node]:  # fmt: skip
    """x [length, batch, input], or [batch, length, input] if batch_first -> the outputs of the last layer, [length, batch,
    directions * hidden] or batch first; and the final states of all layers, each [layers * directions, batch, hidden].
    """
    directions = 2 if bidirectional else 1
    length = x.shape[1 if batch_first else 0].value
    unrolled = length is not None and lengths is None and length * layers * directions <= STEPS
    if train and dropout and layers > 1:
        raise TypeError(f"{call.op}: dropout between layers is not supported; call eval() on the model")
    count = len(params) // (layers * directions)
    if batch_first:
        x = _swapped(call, x)
    last: list[list[Node]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            w_x, w, *rest = params[k * count : (k + 1) * count]
            b_x, b = rest[:2] if has_biases else (None, None)
            projection = rest[-1] if len(rest) > 2 * has_biases else None
            ahead = replace(call, shapes=((*x.shape[:2], w_x.shape[0]),))
            made = linear(ahead, x, w_x, b_x)
            d = _Direction(call, kind, made, w, b, projection, bool(direction), lengths)
            states: list[Node] = [_part(call, s, k) for s in initial]
            output, states = d.unrolled(states, length) if unrolled and length is not None else d.looped(states)
            outputs.append(output)
            last.append(states)
        x = outputs[0] if directions == 1 else _side_by_side(call, outputs[0], outputs[1])
    finals = [
        stack(replace(call, shapes=call.shapes[1 + n :], dtypes=call.dtypes[1 + n :]), [s[n] for s in last], 0)
        for n in range(len(initial))
    ]
    return [_swapped(call, x) if batch_first else x, *finals]


def _swapped(call: Call, x: Node) -> Map:
    return call.map(lambda i, j, k: load(x, [j, i, k]), shape=(x.shape[1], x.shape[0], x.shape[2]), dtype=x.dtype)


def _part(call: Call, x: Node, k: int) -> Map:
    return call.map(lambda i, j: load(x, [as_int(k), i, j]), shape=x.shape[1:], dtype=x.dtype)


def _side_by_side(call: Call, a: Node, b: Node) -> Map:
    return cat(replace(call, shapes=((*a.shape[:2], a.shape[2] + b.shape[2]),)), [a, b], 2)


@lowering(aten.lstm.input)
def lstm(call: Call, x: Node, initial: Sequence[Node], *arguments: Any) -> list[Node]:
    """x, (h, c) -> outputs, h and c; see `_layers` for shapes, and torch.nn.LSTM for the formulas."""
    return _layers(_LSTM, call, x, initial, *arguments)


_ONE_STATE: dict[Any, _Kind] = {aten.gru.input: _GRU, aten.rnn_tanh.input: _TANH, aten.rnn_relu.input: _RELU}


def _one_state(kind: _Kind) -> Callable[..., list[Node]]:
    return lambda call, x, initial, *arguments: _layers(kind, call, x, [initial], *arguments)


for _overload, _kind in _ONE_STATE.items():
    lowering(_overload)(_one_state(_kind))


@lowering(ours.lstm_padded.default)
def lstm_padded(call: Call, x: Node, lengths: Node, initial: Sequence[Node], *arguments: Any) -> list[Node]:
    """`lstm` of padded sequences x [length, batch, input] with lengths [batch]."""
    return _layers(_LSTM, call, x, initial, *[*arguments, False, lengths])


def _one_state_padded(kind: _Kind) -> Callable[..., list[Node]]:
    def build(call: Call, x: Node, lengths: Node, initial: Node, *arguments: Any) -> list[Node]:
        return _layers(kind, call, x, [initial], *[*arguments, False, lengths])

    return build


for _padded, _kind in {ours.gru_padded: _GRU, ours.rnn_tanh_padded: _TANH, ours.rnn_relu_padded: _RELU}.items():
    lowering(_padded.default)(_one_state_padded(_kind))
