"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_activations import Activation, activation
from lapilli.capture.onnx.onnx_registry import OnnxCall, operator
from lapilli.capture.onnx.onnx_values import ConstantTensor
from lapilli.errors import CompileError

Tensor = torch.Tensor


def _activations(call: OnnxCall, default: list[str], directions: int) -> list[list[Activation]]:
    """The functions of each direction; parameters are listed for those functions alone that take them."""
    names = call.get("activations") or default * directions
    alphas, betas = list(call.get("activation_alpha") or []), list(call.get("activation_beta") or [])
    takes_alpha = {"leakyrelu", "thresholdedrelu", "elu", "hardsigmoid", "scaledtanh", "affine"}
    takes_beta = {"hardsigmoid", "scaledtanh", "affine"}
    made = []
    for name in names:
        alpha = alphas.pop(0) if name.lower() in takes_alpha and alphas else None
        beta = betas.pop(0) if name.lower() in takes_beta and betas else None
        made.append(activation(name, alpha, beta))
    each = len(default)
    return [made[d * each : (d + 1) * each] for d in range(directions)]


class _Layer:
    """What the three layers share: axes, directions, lengths."""

    def __init__(self, call: OnnxCall, x: Tensor, recurrent: Tensor, lengths: Any) -> None:
        self.call = call
        self.batch_first = bool(call.get("layout", 0))
        self.x = x.transpose(0, 1) if self.batch_first else x  # [steps, batch, features]
        self.direction = call.get("direction", "forward")
        self.directions = 2 if self.direction == "bidirectional" else 1
        self.hidden = recurrent.shape[2]
        steps = self.x.shape[0]
        value = call.value(4)
        if isinstance(value, ConstantTensor) and isinstance(steps, int) and bool((value.tensor == steps).all()):
            lengths = None
        self.lengths: Tensor | None = lengths

    def state(self, given: Tensor | None) -> Tensor:
        """The first state [directions, batch, hidden]."""
        if given is None:
            return self.x.new_zeros([self.directions, self.x.shape[1], self.hidden])
        return given.transpose(0, 1) if self.batch_first else given

    def usual(self, default: list[str]) -> bool:
        """Whether torch's own layer computes it."""
        names = self.call.get("activations") or default * self.directions
        return [n.lower() for n in names] == [n.lower() for n in default * self.directions] and self.call.get(
            "clip"
        ) is None

    def outputs(self, y: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """y: [steps, directions, batch, hidden]; the layout that the node wants."""
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in states)
        return y, *states

    def whole(self, kind: str, states: Any, weights: list[Tensor], biases: bool) -> tuple[Tensor, ...]:
        """By torch's layer, in one call."""
        x = self.x
        two = self.directions == 2
        turned = self.direction == "reverse"
        if self.lengths is not None:
            if turned:
                raise CompileError("sequences of several lengths in reverse need a number of steps that is known")
            made = getattr(torch.ops.lapilli, f"{kind}_padded")(
                x, self.lengths.to(torch.int64), states, weights, biases, 1, 0.0, False, two
            )
            inside = torch.arange(x.shape[0]).unsqueeze(1) < self.lengths
            made = (torch.where(inside.unsqueeze(2), made[0], 0), *made[1:])
        else:
            made = getattr(torch, kind)(x.flip(0) if turned else x, states, weights, biases, 1, 0.0, False, two, False)
        y = made[0].flip(0) if turned else made[0]
        y = y.reshape(y.shape[0], y.shape[1], self.directions, self.hidden).permute(0, 2, 1, 3)
        return self.outputs(y, *made[1:])

    def steps(
        self, step: Callable[[int, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]], *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Step by step. step: (direction, input, states) -> states, the first of which is the output."""
        count = self.x.shape[0]
        if not isinstance(count, int):
            raise CompileError("such a layer is unrolled, which needs a number of steps that is known; fix that size")
        found, last = [], []
        for d in range(self.directions):
            backwards = self.direction == "reverse" or d == 1
            now = tuple(s[d] for s in states)
            outputs: list[Tensor] = [now[0]] * count
            for t in reversed(range(count)) if backwards else range(count):
                new = step(d, self.x[t], now)
                if self.lengths is not None:
                    inside = (t < self.lengths).unsqueeze(1)
                    now = tuple(torch.where(inside, n, o) for n, o in zip(new, now, strict=True))
                    outputs[t] = torch.where(inside, new[0], 0)
                else:
                    now, outputs[t] = new, new[0]
            found.append(torch.stack(outputs))
            last.append(now)
        y = torch.stack(found, 1)
        return self.outputs(y, *(torch.stack([now[k] for now in last]) for k in range(len(states))))


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """The blocks of the first axis in another order."""
    parts = torch.chunk(x, len(order), 0)
    return torch.cat([parts[k] for k in order])


def _weights(w: Tensor, r: Tensor, b: Tensor | None, order: list[int]) -> list[Tensor]:
    """The parameters of torch's layer, direction by direction."""
    made = []
    for d in range(w.shape[0]):
        made += [_reordered(w[d], order), _reordered(r[d], order)]
        if b is not None:
            first, second = torch.chunk(b[d], 2)
            made += [_reordered(first, order), _reordered(second, order)]
    return made


def _limited(call: OnnxCall) -> Activation:
    clip = call.get("clip")
    return (lambda x: x) if clip is None else (lambda x: torch.clamp(x, -clip, clip))


def _products(
    x: Tensor, h: Tensor, w: Tensor, r: Tensor, b: Tensor | None, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What the input and the state give each gate."""
    given, kept = F.linear(x, w), F.linear(h, r)
    if b is not None:
        first, second = torch.chunk(b, 2)
        given, kept = given + first, kept + second
    return list(torch.chunk(given, count, 1)), list(torch.chunk(kept, count, 1))


@operator("LSTM")
def lstm(
    call: OnnxCall, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Any = None, h: Tensor | None = None,
    c: Tensor | None = None, peepholes: Tensor | None = None,
) -> Any:  # fmt: skip
    layer = _Layer(call, x, r, lengths)
    default = ["Sigmoid", "Tanh", "Tanh"]
    states = (layer.state(h), layer.state(c))
    unrolled = layer.lengths is not None and isinstance(layer.x.shape[0], int)
    if layer.usual(default) and peepholes is None and not call.get("input_forget", 0) and not unrolled:
        return layer.whole(
            "lstm", list(states), _weights(w, r, b, [0, 2, 3, 1]), b is not None
        )  # i, o, f, c -> i, f, c, o
    functions = _activations(call, default, layer.directions)
    limit = _limited(call)

    def step(d: int, now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        f, g, last = functions[d]
        hidden, cell = state
        given, kept = _products(now, hidden, w[d], r[d], None if b is None else b[d], 4)
        i, o, forget, new = (a + k for a, k in zip(given, kept, strict=True))
        pi, po, pf = torch.chunk(peepholes[d], 3) if peepholes is not None else (0, 0, 0)
        i = f(limit(i + pi * cell))
        forget = 1 - i if call.get("input_forget", 0) else f(limit(forget + pf * cell))
        cell = forget * cell + i * g(limit(new))
        o = f(limit(o + po * cell))
        return o * last(cell), cell

    return layer.steps(step, *states)


@operator("GRU")
def gru(
    call: OnnxCall,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Any = None,
    h: Tensor | None = None,
) -> Any:
    layer = _Layer(call, x, r, lengths)
    default = ["Sigmoid", "Tanh"]
    state = layer.state(h)
    after = bool(call.get("linear_before_reset", 0))
    unrolled = layer.lengths is not None and isinstance(layer.x.shape[0], int)
    if layer.usual(default) and after and not unrolled:
        return layer.whole("gru", state, _weights(w, r, b, [1, 0, 2]), b is not None)  # z, r, h -> r, z, n
    functions = _activations(call, default, layer.directions)
    limit = _limited(call)

    def step(d: int, now: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        f, g = functions[d]
        (hidden,) = states
        given, kept = _products(now, hidden, w[d], r[d], None if b is None else b[d], 3)
        z, reset = f(limit(given[0] + kept[0])), f(limit(given[1] + kept[1]))
        if after:
            new = g(limit(given[2] + reset * kept[2]))
        else:
            rest = F.linear(reset * hidden, torch.chunk(r[d], 3)[2])
            rest = rest if b is None else rest + torch.chunk(b[d], 6)[5]
            new = g(limit(given[2] + rest))
        return ((1 - z) * new + z * hidden,)

    return layer.steps(step, state)


@operator("RNN")
def rnn(
    call: OnnxCall,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Any = None,
    h: Tensor | None = None,
) -> Any:
    layer = _Layer(call, x, r, lengths)
    state = layer.state(h)
    unrolled = layer.lengths is not None and isinstance(layer.x.shape[0], int)
    for kind, name in (("rnn_tanh", "Tanh"), ("rnn_relu", "Relu")):
        names = call.get("activations") or ["Tanh"] * layer.directions
        if (
            [n.lower() for n in names] == [name.lower()] * layer.directions
            and call.get("clip") is None
            and not unrolled
        ):
            return layer.whole(kind, state, _weights(w, r, b, [0]), b is not None)
    functions = _activations(call, ["Tanh"], layer.directions)
    limit = _limited(call)

    def step(d: int, now: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given, kept = _products(now, states[0], w[d], r[d], None if b is None else b[d], 1)
        return (functions[d][0](limit(given[0] + kept[0])),)

    return layer.steps(step, state)
