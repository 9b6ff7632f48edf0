"""Recurrent layers: LSTM, GRU and plain cells, unrolled over the steps of a sequence whose length is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lapilli.ir.expr import Expr, binary, load, unary
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node
from lapilli.lower.matmul import linear
from lapilli.lower.pointwise import sigmoid
from lapilli.lower.registry import Call, lowering
from lapilli.lower.views import cat, stack

aten = torch.ops.aten

STEPS = 1024
"""Steps of all layers and directions of a call: each is two or three kernels."""


@dataclass(frozen=True)
class _Cell:
    """One direction of one layer. x: what its weights make of the input, [length, batch, gates * hidden]; w, b: of the hidden
    state; projection: of an LSTM's result, or None."""

    call: Call
    x: Node
    w: Node
    b: Node | None
    projection: Node | None

    def of(self, h: Node) -> Node:
        """What the weights make of the hidden state: [batch, gates * hidden]."""
        shape = (h.shape[0], self.w.shape[0])
        return linear(self._call(shape), h, self.w, self.b)

    def value(self, shape: Sequence[Int], body: Callable[[Int, Int], Expr]) -> Map:
        return self._call(shape).map(body)

    def _call(self, shape: Sequence[Int]) -> Call:
        return replace(self.call, shapes=(tuple(shape),), dtypes=self.call.dtypes[:1])


Step = Callable[[_Cell, int, list[Node]], list[Node]]
"""The new states, hidden state first, at a step."""


def _lstm(cell: _Cell, t: int, states: list[Node]) -> list[Node]:
    h, c = states
    hidden, made = c.shape[1], cell.of(h)

    def gate(k: int, b: Int, j: Int) -> Expr:
        at = k * hidden + j
        return load(cell.x, [as_int(t), b, at]) + load(made, [b, at])

    def new_cell(b: Int, j: Int) -> Expr:
        return sigmoid(gate(1, b, j)) * load(c, [b, j]) + sigmoid(gate(0, b, j)) * unary("tanh", gate(2, b, j))

    new = cell.value(c.shape, new_cell)
    out: Node = cell.value(c.shape, lambda b, j: sigmoid(gate(3, b, j)) * unary("tanh", load(new, [b, j])))
    if cell.projection is not None:
        out = linear(cell._call(h.shape), out, cell.projection)
    return [out, new]


def _gru(cell: _Cell, t: int, states: list[Node]) -> list[Node]:
    (h,) = states
    hidden, made = h.shape[1], cell.of(h)

    def body(b: Int, j: Int) -> Expr:
        x = [load(cell.x, [as_int(t), b, k * hidden + j]) for k in range(3)]
        y = [load(made, [b, k * hidden + j]) for k in range(3)]
        reset, update = sigmoid(x[0] + y[0]), sigmoid(x[1] + y[1])
        new = unary("tanh", x[2] + reset * y[2])
        return new + update * (load(h, [b, j]) - new)

    return [cell.value(h.shape, body)]


def _plain(activation: Callable[[Expr], Expr]) -> Step:
    def step(cell: _Cell, t: int, states: list[Node]) -> list[Node]:
        (h,) = states
        made = cell.of(h)
        return [cell.value(h.shape, lambda b, j: activation(load(cell.x, [as_int(t), b, j]) + load(made, [b, j])))]

    return step


def _layers(
    step: Step, call: Call, x: Node, initial: Sequence[Node], params: Sequence[Node], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> list[Node]:  # fmt: skip
    """The output of the last layer, and the last states of all: each [layers * directions, batch, hidden]."""
    directions = 2 if bidirectional else 1
    length = x.shape[1 if batch_first else 0].value
    if length is None:
        raise TypeError(f"{call.op}: the length of the sequence is dynamic, and its steps are kernels of their own")
    if length * layers * directions > STEPS:
        raise TypeError(f"{call.op}: {length * layers * directions} steps are more than {STEPS}")
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
            cell = _Cell(call, linear(ahead, x, w_x, b_x), w, b, projection)
            states: list[Node] = [_part(call, s, k) for s in initial]
            found: list[Node] = []
            for t in range(length)[:: -1 if direction else 1]:
                states = step(cell, t, states)
                found.append(states[0])
            shape = (as_int(length), *states[0].shape)
            outputs.append(stack(replace(call, shapes=(shape,)), found[:: -1 if direction else 1], 0))
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
    return _layers(_lstm, call, x, initial, *arguments)


_ONE_STATE: dict[Any, Step] = {
    aten.gru.input: _gru,
    aten.rnn_tanh.input: _plain(lambda e: unary("tanh", e)),
    aten.rnn_relu.input: _plain(lambda e: binary("max", e, 0.0)),
}


def _one_state(step: Step) -> Callable[..., list[Node]]:
    return lambda call, x, initial, *arguments: _layers(step, call, x, [initial], *arguments)


for _overload, _step in _ONE_STATE.items():
    lowering(_overload)(_one_state(_step))
