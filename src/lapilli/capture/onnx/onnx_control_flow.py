"""If, Loop and Scan: followed where they are known at capture, and otherwise torch's cond, while_loop and scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_graph import OnnxGraph
from lapilli.capture.onnx.onnx_interpreter import Environment, OnnxInterpreter, simplified
from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator
from lapilli.capture.onnx.onnx_values import ConstantTensor, Numbers, array, numbers
from lapilli.errors import CompileError

Tensor = torch.Tensor
MOST_UNROLLED = 1024
"""Turns of a loop that are unrolled."""


class _Outside:
    """What an inner graph reads from around it: the operands of torch's control flow.

    Names of the graphs around it, and constants that come up while it runs, in their order.
    """

    def __init__(self, call: OnnxCall, env: Environment, graphs: Sequence[OnnxGraph]) -> None:
        self.interpreter = call.interpreter
        names = list(dict.fromkeys(name for g in graphs for name in g.free()))
        self.env = env
        self.known: dict[str, Any] = {}
        self.names: list[str] = []
        self.values: list[Tensor] = []
        for name in names:
            value = env[name]
            if isinstance(value, Tensor):
                self.names.append(name)
                self.values.append(value)
            else:
                self.known[name] = value
        self.constants: list[ConstantTensor] = []
        self.symbols: list[Any] = []

    def discover(self, run: Callable[[], Any]) -> Any:
        """Runs a graph once outside of torch's control flow, to find the constants that it needs."""

        def place(constant: ConstantTensor) -> Tensor | None:
            if all(c.tensor is not constant.tensor for c in self.constants):
                self.constants.append(constant)
            return None

        interpreter = self.interpreter
        interpreter.placed.append(place)
        try:
            return run()
        finally:
            interpreter.placed.pop()

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return (*self.values, *(self.interpreter.tensor(c) for c in self.constants))

    def inside(self, operands: Sequence[Tensor], run: Callable[[Environment], Any]) -> Any:
        """Runs a graph in a trace of its own, where the operands stand for what they are outside."""
        env: Environment = dict(self.env) | dict(zip(self.names, operands, strict=False))
        given = operands[len(self.names) :]

        def place(constant: ConstantTensor) -> Tensor | None:
            for c, tensor in zip(self.constants, given, strict=True):
                if c.tensor is constant.tensor or _equal(c.tensor, constant.tensor):
                    return tensor
            return None

        interpreter = self.interpreter
        interpreter.placed.append(place)
        try:
            return run(env)
        finally:
            interpreter.placed.pop()


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether constants that were folded twice are the same."""
    with _disable_current_modes():
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _truth(value: Any) -> bool | None:
    """A condition, if it is known."""
    if value is None:
        return True
    if isinstance(value, ConstantTensor | Numbers):
        return bool(numbers(value).array.reshape(-1)[0])
    return None


def _all_tensors(interpreter: OnnxInterpreter, values: Sequence[Any], what: str) -> tuple[Tensor, ...]:
    made = tuple(interpreter.tensor(v) for v in values)
    if any(not isinstance(v, Tensor) for v in made):
        raise CompileError(
            f"{what} that depends on the values of a tensor can have tensors alone, no sequences or optional values"
        )
    return made


def _own(results: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results as tensors of their own: torch's control flow returns none of its operands."""
    return tuple(r.clone() if any(r is o for o in operands) or r._base is not None else r for r in results)


@operator("If")
def if_(call: OnnxCall, env: Environment) -> Any:
    then, otherwise = call.graph("then_branch"), call.graph("else_branch")
    known = _truth(call.value(0))
    if known is not None:
        return tuple(call.interpreter.graph(then if known else otherwise, [], env))
    interpreter = call.interpreter
    outside = _Outside(call, env, [then, otherwise])

    def run(graph: OnnxGraph) -> Callable[[Environment], tuple[Tensor, ...]]:
        return lambda inner: _all_tensors(interpreter, interpreter.graph(graph, [], inner), "a branch")

    for graph in (then, otherwise):
        outside.discover(lambda g=graph: run(g)(env))  # type: ignore[misc]

    def branch(graph: OnnxGraph) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *operands: _own(outside.inside(operands, run(graph)), operands)

    return tuple(
        torch.ops.higher_order.cond(call.value(0).reshape(()), branch(then), branch(otherwise), outside.operands)
    )


@operator("Loop")
def loop(call: OnnxCall, env: Environment) -> Any:
    """Inputs: the greatest number of turns, a condition, states. The body gives a condition, states and what is stacked."""
    body = call.graph("body")
    turns, condition, states = call.value(0), call.value(1), list(call.values[2:])
    limit: Any = None
    if isinstance(turns, ConstantTensor | Numbers):
        limit = numbers(turns).array.reshape(-1)[0]
    if turns is None or isinstance(limit, int):
        made = _unrolled(call, env, body, limit, condition, states)
        if made is not None:
            return made
    return _while(call, env, body, turns, condition, states)


def _unrolled(
    call: OnnxCall, env: Environment, body: OnnxGraph, limit: int | None, condition: Any, states: list[Any]
) -> tuple[Any, ...] | None:
    """The results of a loop whose turns are known; None if they are not."""
    known = _truth(condition)
    if known is None or (limit is not None and limit > MOST_UNROLLED):
        return None
    interpreter, count = call.interpreter, len(states)
    found: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - count)]
    turn = 0
    while known and (limit is None or turn < limit):
        if turn >= MOST_UNROLLED:
            raise CompileError(f"the loop has more than {MOST_UNROLLED} turns, and no number of turns")
        with _disable_current_modes():
            given = [ConstantTensor(torch.tensor(turn)), ConstantTensor(torch.tensor(True))]
        results = interpreter.graph(body, [*given, *states], env)
        truth = _truth(results[0])
        if truth is None:
            if turn == 0:
                return None
            raise CompileError("the condition of the loop is known in its first turns alone")
        known, states = truth, results[1 : 1 + count]
        for values, value in zip(found, results[1 + count :], strict=True):
            values.append(value)
        turn += 1
    if not turn and found:
        shapes = _shapes_of_stacked(call, env, body, states)
        stacked: list[Any] = [s.new_empty((0, *s.shape)) for s in shapes]
    else:
        stacked = [_stack(interpreter, values) for values in found]
    return (*states, *stacked)


def _stack(interpreter: OnnxInterpreter, values: list[Any]) -> Any:
    if values and all(isinstance(v, ConstantTensor | Numbers) for v in values):
        arrays = [numbers(v) for v in values]
        flat = array((x for a in arrays for x in a.array.reshape(-1)), (len(values), *arrays[0].array.shape))
        return simplified(Numbers(flat, arrays[0].dtype))
    return torch.stack([interpreter.tensor(v) for v in values])


def _shapes_of_stacked(call: OnnxCall, env: Environment, body: OnnxGraph, states: list[Any]) -> list[Tensor]:
    """Tensors with the shapes of what a loop without turns would stack."""
    with _disable_current_modes():
        given = [ConstantTensor(torch.tensor(0)), ConstantTensor(torch.tensor(True))]
    results = call.interpreter.graph(body, [*given, *states], env)
    return list(_all_tensors(call.interpreter, results[1 + len(states) :], "a loop"))


def _while(
    call: OnnxCall, env: Environment, body: OnnxGraph, turns: Any, condition: Any, states: list[Any]
) -> tuple[Any, ...]:
    """torch's while_loop, with the turn, the condition and the states as what it carries."""
    interpreter, count = call.interpreter, len(states)
    if len(body.outputs) - 1 > count:
        raise CompileError(
            "what the turns of a loop give cannot be stacked where the number of turns is not known when the model is compiled"
        )
    outside = _Outside(call, env, [body])
    carried = _all_tensors(interpreter, states, "a loop")
    first = torch.zeros([], dtype=torch.int64)
    holds = torch.ones([], dtype=torch.bool) if condition is None else interpreter.tensor(condition).reshape(()).clone()
    most = None if turns is None else interpreter.tensor(turns).reshape(()).to(torch.int64)

    def run(turn: Tensor, goes_on: Tensor, values: Sequence[Tensor]) -> Callable[[Environment], tuple[Tensor, ...]]:
        return lambda inner: _all_tensors(
            interpreter, interpreter.graph(body, [turn, goes_on, *values], inner), "a loop"
        )

    outside.discover(lambda: run(first, holds, carried)(env))
    extra = (*outside.operands, *(() if most is None else (most,)))

    def goes_on(turn: Tensor, holds: Tensor, *rest: Tensor) -> Tensor:
        return holds.clone() if most is None else holds & (turn < rest[-1])

    def step(turn: Tensor, holds: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        values, operands = rest[:count], rest[count:]
        used = operands if most is None else operands[:-1]
        new_condition, *new = outside.inside(used, run(turn, holds, values))
        shaped = [_shaped(n, v) for n, v in zip(new, values, strict=True)]
        return turn + 1, *_own([new_condition.reshape(()), *shaped], (turn, holds, *rest))

    results = torch.ops.higher_order.while_loop(goes_on, step, (first, holds, *(c.clone() for c in carried)), extra)
    return tuple(results[2:])


def _shaped(new: Tensor, old: Tensor) -> Tensor:
    """One element may be a scalar before a turn of a loop, and have an axis after it."""
    return new.reshape(old.shape) if new.shape != old.shape and new.numel() == old.numel() else new


@operator("Scan")
def scan(call: OnnxCall, env: Environment) -> Any:
    """States, then what is scanned along an axis. Version 8 has a batch and lengths before."""
    body, scanned = call.graph("body"), call.get("num_scan_inputs")
    interpreter = call.interpreter
    values = [interpreter.tensor(v) for v in call.values]
    if call.version < 9:
        return _scan_of_batches(call, env, body, values, scanned)
    count = len(values) - scanned
    axes = call.get("scan_input_axes") or [0] * scanned
    backwards = call.get("scan_input_directions") or [0] * scanned
    sequences = []
    for x, axis, turned in zip(values[count:], axes, backwards, strict=True):
        moved = x.movedim(axis_of(axis, x.ndim), 0)
        sequences.append(moved.flip(0) if turned else moved)
    states, stacked = _scanned(call, env, body, values[:count], sequences)
    outputs = len(stacked)
    axes = call.get("scan_output_axes") or [0] * outputs
    turned_out = call.get("scan_output_directions") or [0] * outputs
    made = []
    for x, axis, turned in zip(stacked, axes, turned_out, strict=True):
        made.append((x.flip(0) if turned else x).movedim(0, axis_of(axis, x.ndim)))
    return (*states, *made)


def _scanned(
    call: OnnxCall, env: Environment, body: OnnxGraph, states: list[Any], sequences: list[Tensor]
) -> tuple[list[Any], list[Tensor]]:
    interpreter, count = call.interpreter, len(states)
    steps = sequences[0].shape[0]
    if isinstance(steps, int) and steps <= MOST_UNROLLED:
        found: list[list[Any]] = [[] for _ in range(len(body.outputs) - count)]
        for t in range(steps):
            results = interpreter.graph(body, [*states, *(x[t] for x in sequences)], env)
            states = results[:count]
            for values, value in zip(found, results[count:], strict=True):
                values.append(interpreter.tensor(value))
        return states, [torch.stack(values) for values in found]
    outside = _Outside(call, env, [body])
    carried = _all_tensors(interpreter, states, "a scan")

    def run(now: Sequence[Tensor], given: Sequence[Tensor]) -> Callable[[Environment], tuple[Tensor, ...]]:
        return lambda inner: _all_tensors(interpreter, interpreter.graph(body, [*now, *given], inner), "a scan")

    outside.discover(lambda: run(carried, [x[0] for x in sequences])(env))

    def step(*operands: Tensor) -> list[Tensor]:
        now, given = operands[:count], operands[count : count + len(sequences)]
        return list(_own(outside.inside(operands[count + len(sequences) :], run(now, given)), operands))

    made = torch.ops.higher_order.scan(step, [c.clone() for c in carried], sequences, outside.operands)
    return list(made[:count]), list(made[count:])


def _scan_of_batches(call: OnnxCall, env: Environment, body: OnnxGraph, values: list[Any], scanned: int) -> Any:
    lengths, given = values[0], values[1:]
    if lengths is not None:
        raise CompileError(
            "Scan of version 8 with lengths of sequences is not supported; export the model with a newer opset"
        )
    count = len(given) - scanned
    batch = given[0].shape[0]
    if not isinstance(batch, int):
        raise CompileError("Scan of version 8 needs a batch size that is known")
    backwards = call.get("directions") or [0] * scanned
    rows = []
    for n in range(batch):
        sequences = [x[n].flip(0) if b else x[n] for x, b in zip(given[count:], backwards, strict=True)]
        states, stacked = _scanned(call, env, body, [x[n] for x in given[:count]], sequences)
        rows.append([call.interpreter.tensor(v) for v in (*states, *stacked)])
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
