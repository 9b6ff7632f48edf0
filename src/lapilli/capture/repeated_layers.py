"""Identical layers under torch.export: two are traced, and if they agree, the others take copies of what the first one recorded.

torch.export traces every call of a model: a millisecond each, for every layer again. A layer's trace is a function of its code, its
plain attributes and the shapes of its tensors; its weights and arguments are only named in it. What Python code can read beside
these, or change, is excluded where it can be seen: hooks, attributes that change, tensors of elsewhere, constants, and global or
enclosing variables that are not functions, classes, modules or plain values. A layer that reads something else differs in its
second trace.
"""

from __future__ import annotations

import dis
import enum
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_ENOUGH = 3
"""Layers, of which two are traced."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum, type)
_CODE = (
    types.ModuleType, types.BuiltinFunctionType, type, logging.Logger, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    torch.finfo, torch.iinfo, torch.layout, torch.memory_format,
)  # fmt: skip
_OF_MODULES = {"_parameters", "_buffers", "_modules", "forward"}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Unlike(Exception):
    """A layer is traced as any other."""


@contextmanager
def layers_once(model: nn.Module) -> Iterator[None]:
    """A context for tracing a model."""
    calls = _Calls()
    layers = _repeated(model)
    for layer in layers:
        vars(layer)["forward"] = _forward(layer, layer.forward, calls)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: nn.Module, forward: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        return calls.call(layer, forward, args, kwargs)

    return call


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Modules with parts of which there are enough alike. Those that are somewhere twice are left out: torch tells them
    apart by the way to them.
    """
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    closed = {kind: _is_closed(kind) for kind in {type(m) for m in model.modules()}}
    found: dict[Any, list[nn.Module]] = {}
    for m in model.modules():
        if m is model or places[id(m)] > 1 or not any(True for _ in m.children()) or "forward" in vars(m):
            continue
        if any(isinstance(x, torch.jit.ScriptModule | fx.GraphModule | nn.RNNBase) for x in m.modules()):
            continue  # packed sequences are known by their tensors of sizes (`recurrent_layers`)
        if not all(closed[type(x)] for x in m.modules()):
            continue
        try:
            found.setdefault((_frozen(m, {}), tuple(_described(_tensors(m)))), []).append(m)
        except _Unlike:
            continue
    return [m for alike in found.values() if len(alike) >= _ENOUGH for m in alike]


def _is_closed(kind: type) -> bool:
    """Whether the methods of a module's class name nothing that is kept elsewhere and may change from one call to the next."""
    own = [c for c in kind.__mro__ if not _is_torchs(c)]
    pending = [f for c in own for f in vars(c).values()]
    seen: set[int] = set()
    while pending:
        f = pending.pop()
        f = f.__func__ if isinstance(f, staticmethod | classmethod) else f.fget if isinstance(f, property) else f
        if not isinstance(f, types.FunctionType) or id(f) in seen or _is_torchs(f):
            continue
        seen.add(id(f))
        kept = [c.cell_contents for c in f.__closure__ or () if _is_set(c)]
        kept += [f.__globals__[name] for name in _names(f.__code__) if name in f.__globals__]
        for x in kept:
            if isinstance(x, types.FunctionType):
                pending.append(x)
            elif not isinstance(x, _PLAIN + _CODE) and not _is_plain_tuple(x) and type(x).__module__ != "typing":
                return False
        if any(i in _STORES for i in _operations(f.__code__)):
            return False
    return True


_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")


def _is_torchs(x: type | types.FunctionType) -> bool:
    return str(x.__module__).startswith("torch.")  # None in code that was run from text


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and the functions in it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


def _names(code: types.CodeType) -> set[str]:
    return {name for c in _codes(code) for name in c.co_names}


def _operations(code: types.CodeType) -> Iterator[str]:
    return (i.opname for c in _codes(code) for i in dis.get_instructions(c))


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_plain_tuple(x: Any) -> bool:
    return type(x) in (tuple, frozenset) and all(isinstance(y, _PLAIN + _CODE) or _is_plain_tuple(y) for y in x)


def _tensors(m: nn.Module) -> list[Tensor]:
    return [t for f in (m.named_parameters, m.named_buffers) for _, t in f(remove_duplicate=False)]


def _frozen(x: Any, seen: dict[int, int]) -> Any:
    """What a trace can read of a value, to be compared. Tensors and what is not plain are themselves alone."""
    if isinstance(x, _SYMBOLIC):
        return type(x), x.node.expr
    if isinstance(x, _PLAIN):
        return type(x), repr(x)
    if id(x) in seen:
        return "seen", seen[id(x)]
    seen[id(x)] = len(seen)
    if isinstance(x, nn.Module):
        return _frozen_module(x, seen)
    if type(x) in (tuple, list):
        return type(x), tuple(_frozen(y, seen) for y in x)
    if isinstance(x, dict):
        return type(x), tuple((_frozen(k, seen), _frozen(y, seen)) for k, y in x.items())
    if isinstance(x, set | frozenset):
        return type(x), tuple(sorted(repr(_frozen(y, seen)) for y in x))
    inside = getattr(x, "__dict__", None)
    plain = isinstance(inside, dict) and not isinstance(x, Tensor) and not callable(x)
    return type(x), id(x), _frozen(inside, seen) if plain else None


def _frozen_module(m: nn.Module, seen: dict[int, int]) -> Any:
    own = {name: value for name, value in vars(m).items() if name not in _OF_MODULES}
    if any(value for name, value in own.items() if name.endswith("_hooks")):
        raise _Unlike
    names = tuple(m._parameters), tuple(m._buffers)
    present = tuple(t is None for t in (*m._parameters.values(), *m._buffers.values()))
    own = {
        name: value for name, value in own.items() if not name.endswith(("_hooks", "_with_kwargs", "_always_called"))
    }
    attributes = tuple((name, _frozen(value, seen)) for name, value in own.items())
    parts = tuple((name, None if part is None else _frozen(part, seen)) for name, part in m._modules.items())
    return type(m), names, present, attributes, parts


def _size(n: Any) -> Any:
    return n.node.expr if isinstance(n, _SYMBOLIC) else n


def _described(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Each tensor's form, and which earlier one it is, or shares its memory with."""
    first: dict[int, int] = {}
    memory: dict[int, int] = {}
    for k, t in enumerate(tensors):
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) or t.layout is not torch.strided:
            raise _Unlike
        yield (
            tuple(map(_size, t.shape)), tuple(map(_size, t.stride())), _size(t.storage_offset()), t.dtype, t.device,
            t.requires_grad, t.is_conj(), t.is_neg(), first.setdefault(id(t), k), memory.setdefault(_memory(t), k),
        )  # fmt: skip


def _memory(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


@dataclass(frozen=True)
class _Given:
    """What a call is given. tensors: of its arguments, then its weights; the others are kept, so that no id is taken anew."""

    layer: nn.Module
    leaves: list[Any]
    spec: TreeSpec
    tensors: list[Tensor]

    def form(self) -> Any:
        return (
            _frozen(self.layer, {}),
            tuple(None if isinstance(x, Tensor) else _frozen(x, {}) for x in self.leaves),
            self.spec,
            tuple(_described(self.tensors)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
        )


@dataclass(frozen=True)
class _Recorded:
    """What a call recorded. nodes: without sizes, which are known by their expressions; before: those of the given tensors; after:
    by number of a given tensor, the node that it is now; stack: torch's stack of modules; results: a given tensor, a node with an
    example, or a value.
    """

    nodes: list[fx.Node]
    before: list[fx.Node]
    after: dict[int, fx.Node]
    stack: Mapping[str, Any]
    results: list[tuple[str, Any]]
    spec: TreeSpec
    given: _Given

    def form(self) -> Any:
        """To be compared with that of another layer. Raises _Unlike if there is more in it than the layer."""
        names: dict[fx.Node, Any] = {}
        for k, node in enumerate(self.before):
            names.setdefault(node, ("given", k))
        rows = []
        for k, node in enumerate(self.nodes):
            if node.op != "call_function":
                raise _Unlike
            rows.append((node.target, _argument(node.args, names), _argument(node.kwargs, names), _values(node)))
            names[node] = ("node", k)
        after = tuple((k, names[node]) for k, node in self.after.items())
        results = tuple(
            (kind, names[x[0]] if kind == "node" else _frozen(x, {}) if kind == "value" else x)
            for kind, x in self.results
        )
        return rows, after, results, self.spec


def _argument(x: Any, names: Mapping[fx.Node, Any]) -> Any:
    if isinstance(x, fx.Node):
        if _is_size(x):
            return "size", x.meta["val"].node.expr
        if x not in names:
            raise _Unlike
        return names[x]
    if isinstance(x, tuple | list):
        return type(x), tuple(_argument(y, names) for y in x)
    if isinstance(x, dict):
        return tuple((k, _argument(y, names)) for k, y in x.items())
    if isinstance(x, slice):
        return "slice", tuple(_argument(y, names) for y in (x.start, x.stop, x.step))
    if isinstance(x, _PLAIN) or type(x) in (torch.layout, torch.memory_format):
        return type(x), repr(x)
    raise _Unlike


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _SYMBOLIC)


def _values(node: fx.Node) -> Any:
    return tuple(
        (tuple(map(_size, x.shape)), tuple(map(_size, x.stride())), x.dtype) if isinstance(x, Tensor) else repr(x)
        for x in tree_flatten(node.meta.get("val"))[0]
    )


class _Calls:
    """The calls of one trace. seen: by the form of what was given, what was recorded first and its form, and whether a second one
    agreed; None: they are not alike.
    """

    def __init__(self) -> None:
        self.seen: dict[Any, tuple[_Recorded, Any, bool] | None] = {}

    def call(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None or not isinstance(mode.tracer, proxy_tensor.PythonKeyTracer):
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        given = _Given(layer, leaves, spec, [x for x in leaves if isinstance(x, Tensor)] + _tensors(layer))
        try:
            form = given.form()
            before = [_node(t, mode.tracer) for t in given.tensors]
            known = self.seen.get(form)
        except (_Unlike, TypeError):  # TypeError: what an argument holds has no hash
            return forward(*args, **kwargs)
        if known is not None and known[2]:
            return _replayed(known[0], given, before, mode.tracer)
        if form in self.seen and known is None:
            return forward(*args, **kwargs)
        last = next(iter(reversed(mode.tracer.graph.nodes)))
        symbols = _unbacked(given)
        stack = dict(getattr(mode.tracer, "module_stack", {}))
        result = forward(*args, **kwargs)
        try:
            if given.form() != form or _unbacked(given) != symbols:
                raise _Unlike
            recorded = _recorded(result, given, before, last, stack, mode.tracer)
            seen = recorded.form()
        except _Unlike:
            self.seen[form] = None
            return result
        if known is None:
            self.seen[form] = recorded, seen, False
        else:
            self.seen[form] = (known[0], known[1], True) if known[1] == seen else None
        return result


def _unbacked(given: _Given) -> Any:
    """How many sizes depend on data so far."""
    modes = {t.fake_mode for t in given.tensors if isinstance(t, FakeTensor)}
    return [m.shape_env and m.shape_env.unbacked_symint_counter for m in modes]


def _node(t: Tensor, tracer: Any) -> fx.Node:
    slot = proxy_tensor.get_proxy_slot(t, tracer, None)
    if slot is None or slot.constant is not None:
        raise _Unlike
    node = slot.proxy.node
    assert isinstance(node, fx.Node)
    return node


def _recorded(
    result: Any, given: _Given, before: list[fx.Node], last: fx.Node, stack: Mapping[str, Any], tracer: Any
) -> _Recorded:
    nodes: list[fx.Node] = []
    for node in reversed(tracer.graph.nodes):
        if node is last:
            break
        nodes.append(node)
    nodes = [n for n in reversed(nodes) if not _is_size(n)]
    inside = set(nodes)
    now = [_node(t, tracer) for t in given.tensors]
    after = {k: node for k, (node, old) in enumerate(zip(now, before, strict=True)) if node is not old}
    numbers = {id(t): k for k, t in reversed(list(enumerate(given.tensors)))}
    taken = {_memory(t) for t in given.tensors}
    results: list[tuple[str, Any]] = []
    leaves, spec = tree_flatten(result)
    for x in leaves:
        if not isinstance(x, Tensor):
            if not isinstance(x, _PLAIN + _SYMBOLIC):
                raise _Unlike
            results.append(("value", x))
        elif id(x) in numbers:
            results.append(("given", numbers[id(x)]))
        else:
            node = _node(x, tracer)
            if node not in inside or type(x) is not FakeTensor or x.requires_grad or _memory(x) in taken:
                raise _Unlike
            taken.add(_memory(x))
            results.append(("node", (node, x)))
    if any(node not in inside for node in after.values()):
        raise _Unlike
    return _Recorded(nodes, before, after, stack, results, spec, given)


def _replayed(first: _Recorded, given: _Given, before: Sequence[fx.Node], tracer: Any) -> Any:
    """The result of a call, with what it would have recorded."""
    copies: dict[fx.Node, fx.Node] = dict(zip(first.before, before, strict=True))
    stack = dict(tracer.module_stack)
    old, new = (next(iter([*s.values()][-1:]), ("", None))[0] for s in (first.stack, stack))
    for node in first.nodes:
        copies[node] = copy = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
        inner = list(copy.meta.get("nn_module_stack", {}).items())[len(first.stack) :]
        copy.meta["nn_module_stack"] = {
            key: (path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)
            for key, (path, kind) in stack.items()
        } | {new + key.removeprefix(old): (new + path.removeprefix(old), kind) for key, (path, kind) in inner}
    for k, node in first.after.items():
        _track(given.tensors[k], copies[node], tracer)
    leaves: list[Any] = []
    for kind, x in first.results:
        if kind == "value":
            leaves.append(x)
        elif kind == "given":
            leaves.append(given.tensors[x])
        else:
            node, example = x
            with _disable_current_modes(), example.fake_mode:
                made = torch.empty_strided(
                    example.shape, example.stride(), dtype=example.dtype, device=example.device
                )  # (memory of its own)
            _track(made, copies[node], tracer)
            leaves.append(made)
    return tree_unflatten(leaves, first.spec)


def _track(t: Tensor, node: fx.Node, tracer: Any) -> None:
    proxy_tensor.track_tensor_tree(t, tracer.proxy(node), constant=None, tracer=tracer)
