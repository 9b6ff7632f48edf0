"""A NumPy interpreter of the kernel IR: the meaning of a graph, without a GPU. Slow and exact; for tests and
`verify=True`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Index, Load, Op, Select
from lapilli.ir.integer import Atom, Indirect, Int, Var
from lapilli.ir.narrow import narrowed
from lapilli.ir.node import Constant, Graph, Input, Map, Node, Reduce, State, Update
from lapilli.ir.recurrence import Recurrence
from lapilli.ir.scalar import OPS

Array = npt.NDArray[Any]

_COMPUTE = {DType.float32: np.float32, DType.int32: np.int32, DType.bool: np.bool_}

_REDUCTIONS: dict[str, Any] = {
    "sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "any": np.any, "all": np.all,
}  # fmt: skip
_NUMPY = {d: np.dtype("float32" if d in (DType.bfloat16, DType.code) else d.name) for d in DType}


def run(
    graph: Graph,
    inputs: Sequence[Array],
    symbols: Mapping[str, int] | None = None,
    states: dict[str, Array] | None = None,
) -> list[Array]:
    """The graph's outputs for given inputs.

    symbols: values of dynamic sizes. states: values of the states by name, updated in place; missing ones have their
    initial value.
    """
    states = {} if states is None else states
    sizes: dict[Atom, int] = {}
    for name, value in (symbols or {}).items():
        sizes[next(iter(graph.symbols[name].atoms()))] = value
    values: dict[int, Array] = {}
    for node in graph.nodes():
        if isinstance(node, Input):
            values[node.id] = np.asarray(inputs[node.index])
        elif isinstance(node, State):
            values[node.id] = states.get(node.name, np.asarray(node.numbers))
        else:
            values[node.id] = evaluate(node, values, sizes)
    states.update({state.name: values[new.id] for state, new in graph.stores})
    return [values[o.id] for o in graph.outputs]


def evaluate(node: Node, values: Mapping[int, Array], sizes: Mapping[Atom, int]) -> Array:
    """The elements of a value, given those that it reads."""
    if isinstance(node, Constant):
        return np.asarray(node.numbers)
    assert isinstance(node, Map | Reduce)
    if isinstance(node, Reduce) and isinstance(node.contraction, Recurrence):
        return _states(node.contraction, values, sizes)
    if isinstance(node, Reduce) and isinstance(node.contraction, Sampling):
        return _drawn(node.contraction, values, sizes)
    if isinstance(node, Map) and node.update is not None:
        return _stored(updated(node.update, values, sizes), node.dtype)
    axes: tuple[Var, ...] = node.axes + (node.raxes if isinstance(node, Reduce) else ())
    shape, env = _space(axes, sizes)
    with np.errstate(all="ignore"):
        result = np.broadcast_to(_scalar(node.body, env, values, {}), shape)
        if isinstance(node, Reduce):
            rdims = tuple(range(len(node.axes), len(axes)))
            if node.op in ("argmax", "argmin"):
                flat = result.reshape(*shape[: len(node.axes)], math.prod(shape[len(node.axes) :]))
                result = getattr(np, node.op)(flat, axis=-1)
            elif node.op == "argpool":
                result = _pooled(result.reshape(*shape[: len(node.axes)], math.prod(shape[len(node.axes) :])))
            elif node.op in ("max", "min") and 0 in shape:
                result = np.zeros(shape[: len(node.axes)])
            else:
                exact = (
                    result.astype(np.float64) if result.dtype == np.float32 and node.op in ("sum", "prod") else result
                )
                result = _REDUCTIONS[node.op](exact, axis=rdims)
        return _stored(np.asarray(result), node.dtype)


def _stored(values: Array, dtype: DType) -> Array:
    """Values as a type keeps them; those of bfloat16 are rounded float32."""
    return narrowed(values, dtype) if dtype is DType.bfloat16 else values.astype(_NUMPY[dtype])


def updated(update: Update, values: Mapping[int, Array], sizes: Mapping[Atom, int]) -> Array:
    """The old value with some elements replaced, in the old value's type."""
    shape, env = _space(update.axes, sizes)
    memo: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        value = np.broadcast_to(_scalar(update.value, env, values, memo), shape)
    stored = np.ones(shape, bool)
    for i, n in update.within:
        at = _int(i, env, values, memo)
        stored = stored & (at >= 0) & (at < _int(n, env, values, memo))
    place = [np.broadcast_to(_int(i, env, values, memo), shape)[stored] for i in update.place]
    result = np.array(values[update.old.id])
    result[tuple(place)] = value[stored]  # in order: the last one wins
    return result


def _space(axes: Sequence[Var], sizes: Mapping[Atom, int]) -> tuple[tuple[int, ...], dict[Atom, Any]]:
    """The shape of a domain, and its axes as arrays that broadcast to it."""
    shape = tuple(int(a.extent.evaluate(sizes)) for a in axes)
    env: dict[Atom, Any] = dict(sizes)
    for d, axis in enumerate(axes):
        env[axis] = np.arange(shape[d], dtype=np.int64).reshape([-1 if i == d else 1 for i in range(len(axes))])
    return shape, env


def _states(r: Recurrence, values: Mapping[int, Array], sizes: Mapping[Atom, int]) -> Array:
    """The states of a recurrence after every step."""
    steps, batch, units = (int(a.extent.evaluate(sizes)) for a in (r.step, r.batch, r.unit))
    weight = values[r.weight.id].astype(np.float64)
    hidden, carried = (values[n.id].astype(np.float32) for n in (r.initial[0], r.initial[-1]))
    found = []
    env: dict[Atom, Any] = {**sizes, r.batch: np.arange(batch)[:, None], r.unit: np.arange(units)[None]}
    with np.errstate(all="ignore"):
        for s in range(steps):
            env[r.step] = np.asarray(s)
            sums = np.split((hidden @ weight.T).astype(np.float32), len(r.sums), axis=1)
            known = {**values, **{n.id: v for n, v in zip(r.sums, sums, strict=True)}, r.old.id: carried}
            shape = (batch, units)
            new = known[r.new.id] = np.broadcast_to(_scalar(r.carried, env, known, {}), shape).astype(np.float32)
            out = new if r.hidden is None else np.broadcast_to(_scalar(r.hidden, env, known, {}), shape)
            if r.projection is not None:
                out = out @ values[r.projection.id].astype(np.float64).T
            live = np.True_ if r.live is None else _scalar(r.live, env, known, {})
            hidden, carried = (np.where(live, a, b).astype(np.float32) for a, b in ((out, hidden), (new, carried)))
            found.append(hidden if r.hidden is None else np.concatenate([hidden, carried], axis=1))
    width = hidden.shape[1] + (0 if r.hidden is None else units)
    return np.stack(found) if found else np.zeros((0, batch, width), np.float32)


def _drawn(s: Sampling, values: Mapping[int, Array], sizes: Mapping[Atom, int]) -> Array:
    """The index that is drawn of each row."""
    shape, env = _space((*s.rows, s.element), sizes)

    def of(e: Expr, kind: Any) -> Array:
        return np.broadcast_to(
            _scalar(e, env, values, {}), shape if e in (s.logit, s.word) else (*shape[:-1], 1)
        ).astype(kind)

    with np.errstate(all="ignore"):
        x = of(s.logit, np.float64)
        first = np.asarray(np.argmax(x, axis=-1), np.int32)
        if s.temperature is None or s.word is None:
            return first
        top, heat = x.max(-1, keepdims=True), of(s.temperature, np.float64)
        plain = ~(np.isfinite(top) & (heat >= 2.0**-126))[..., 0]
        scores = np.where(x == top, 0.0, np.where(np.isneginf(x), -np.inf, (x - top) / heat))
        order = -np.sort(-x, axis=-1)
        kept = np.ones(shape, bool)
        if s.top_k is not None:
            k = of(s.top_k, np.int64)
            k = np.where((k > 0) & (k < shape[-1]), k, shape[-1])
            kept &= x >= np.take_along_axis(order, k - 1, -1)
        if s.top_p is not None:
            p, weights = of(s.top_p, np.float64), np.where(kept, np.exp(scores), 0)
            places = np.argsort(-x, axis=-1, kind="stable")
            sums = np.cumsum(np.take_along_axis(weights, places, -1), -1)
            before = np.concatenate([np.zeros((*shape[:-1], 1)), sums[..., :-1]], -1)
            count = np.maximum((before < p * sums[..., -1:]).sum(-1, keepdims=True), 1)
            kept &= ~(p < 1) | (x >= np.take_along_axis(order, count - 1, -1))
        u = (of(s.word, np.int64) % 2**32 + 0.5) / 2**32
        drawn = np.argmax(np.where(kept, scores - np.log(-np.log1p(-u)), -np.inf), axis=-1)
        return np.asarray(np.where(plain, first, drawn), np.int32)


def _pooled(x: Array) -> Array:
    """The index along the last axis of the last NaN, otherwise of the first maximum; -1 if that is the smallest number of
    the type.
    """
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(np.int32).min
    nan = np.isnan(x)
    last = x.shape[-1] - 1 - np.argmax(nan[..., ::-1], axis=-1)
    best = np.where(np.max(x, axis=-1) > lowest, np.argmax(x, axis=-1), -1)
    return np.where(nan.any(-1), last, best)


def _scalar(e: Expr, env: Mapping[Atom, Any], values: Mapping[int, Array], memo: dict[int, Any]) -> Any:
    if e.id in memo:
        return memo[e.id]
    result: Any
    if isinstance(e, Const):
        result = _COMPUTE[e.dtype](e.value)
    elif isinstance(e, Index):
        result = np.asarray(_int(e.value, env, values, memo)).astype(np.int32)
    elif isinstance(e, Load):
        array = values[e.node.id]
        index = [
            np.clip(_int(i, env, values, memo), 0, max(n - 1, 0)) for i, n in zip(e.index, array.shape, strict=True)
        ]
        empty = array.size == 0
        result = np.zeros((), _COMPUTE[e.dtype]) if empty else array[tuple(index)].astype(_COMPUTE[e.dtype])
    elif isinstance(e, Select):
        ok: Any = np.True_
        for g in e.guards:
            ok = np.logical_and(ok, np.asarray(_int(g, env, values, memo)) >= 0)
        result = np.where(ok, _scalar(e.then, env, values, memo), _scalar(e.other, env, values, memo))
    else:
        assert isinstance(e, Op)
        args = [_scalar(a, env, values, memo) for a in e.args]
        result = args[0] if e.op == "cast" else OPS[e.op].numpy(*args)
        result = np.asarray(result).astype(_COMPUTE[e.dtype])
    memo[e.id] = result
    return result


def _int(i: Int, env: Mapping[Atom, Any], values: Mapping[int, Array], memo: dict[int, Any]) -> Any:
    computed: dict[Atom, Any] = {
        a: _scalar(a.expr, env, values, memo).astype(np.int64) for a in i.atoms() if isinstance(a, Indirect)
    }
    return i.evaluate({**env, **computed})
