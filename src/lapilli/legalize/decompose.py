"""Decomposes composite operators into those that have a lowering, and keeps every operator that has one."""

from __future__ import annotations

import operator
import warnings
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram, default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lapilli.errors import CompileError
from lapilli.graph.inline import splice
from lapilli.graph.module import Module
from lapilli.graph.tracing import open_sizes
from lapilli.lower.graph import is_size, refusals
from lapilli.lower.registry import decompositions, is_supported
from lapilli.torch_compat import without_stack_traces

_WHOLE = (torch.ops.aten.complex.default, torch.ops.aten.polar.default)
"""Their decompositions write into complex memory; `lapilli.graph.complex` handles them as pairs."""
_WRONG = (torch.ops.aten.alpha_dropout.default, torch.ops.aten.uniform_.default)
"""torch's Python references of these are left out: that of alpha_dropout moves the mean the wrong way, and that of uniform_, which
it reaches, calls itself until the stack ends.
"""


@lru_cache(maxsize=1)
def tables() -> tuple[dict[Any, Any], ...]:
    """torch's decompositions into core ATen, its other ones for operators that are not in core ATen, and ours, which take
    precedence. Some of the other ones fail in torch's functionalization: the second table lacks them.
    """
    table: dict[Any, Any] = dict(default_decompositions())
    least = dict(table)
    for overload, function in decomposition_table.items():
        if (
            isinstance(overload, torch._ops.OpOverload)
            and torch.Tag.core not in overload.tags
            and overload not in _WRONG
        ):
            table.setdefault(overload, function)
    return tuple(
        {o: f for o, f in t.items() if not is_supported(o) and o not in _WHOLE} | decompositions for t in (table, least)
    )


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The same program, as far as possible in operators that have a lowering."""
    known, were_open = tables(), _open_sizes(program)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own warnings, about tree specs
        for table in known:
            try:
                with without_stack_traces():
                    decomposed: ExportedProgram = program.run_decompositions(dict(table))
            except (AssertionError, RuntimeError) as error:
                if table is known[-1]:
                    raise CompileError(
                        f"torch cannot make the exported program functional: {error}. If the model changes "
                        "tensors that are not buffers, or share memory with some, torch.export.export(..., strict=True) may help."
                    ) from error
            else:
                for name, axis in sorted(were_open - _open_sizes(decomposed)):  # torch specializes them silently
                    warnings.warn(
                        f"Size {axis} of {name!r} is not dynamic in the compiled program: torch fixes it where it makes a change "
                        "in place functional. Write the change as an assignment to keep it dynamic.",
                        stacklevel=2,
                    )
                return decomposed
    raise AssertionError("the last table returns or raises")


def _open_sizes(program: ExportedProgram) -> set[tuple[str, int]]:
    """Dynamic sizes of inputs: names and axes."""
    found = set()
    for node in program.graph.nodes:
        sizes: Any = getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()
        found |= {
            (node.name, k) for k, s in enumerate(sizes) if isinstance(s, torch.SymInt) and s.node.expr.free_symbols
        }
    return found


def decompose_calls(module: Module) -> bool:
    """Replaces every call without a lowering by its decomposition, one by one.

    Returns False if one cannot be traced on its own (control flow, operators that write to their arguments); the calls
    before it have been replaced.
    """
    known: dict[Any, fx.Graph | None] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem or is_supported(node.target):
            continue
        if is_size(node.meta.get("val")):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            return False
        form = _form(node)
        traced = known[form] if form in known else _traced(node)
        if form is not None:
            known[form] = traced
        if traced is None:
            return False
        splice(module, node, traced, [n for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)])
    module.clean()
    return True


def _form(node: fx.Node) -> Any:
    """All of a call that its decomposition depends on, equal for the calls of identical layers. None: it is like no other."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    found: list[Any] = [node.target, str(spec)]
    for leaf in leaves:
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(leaf, fx.Node) and isinstance(value, torch.Tensor) and value.layout is torch.strided:
            numbers = (*value.shape, *value.stride(), value.storage_offset())
            found += ["tensor", value.dtype, value.device, value.requires_grad, value.dim(), *map(_number, numbers)]
        elif not isinstance(leaf, fx.Node) and (
            leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
        ):
            found += [type(leaf), repr(leaf)]
        else:
            return None
    val = node.meta.get("val")
    made = [v for v in (val if isinstance(val, list | tuple) else [val]) if isinstance(v, torch.Tensor)]
    sizes: list[Any] = [size for v in made for size in v.shape if isinstance(size, torch.SymInt)]
    if any(symbol.name.startswith("u") for size in sizes for symbol in size.node.expr.free_symbols):
        return None  # each call has sizes of its own, which depend on data
    return tuple(found)


def _number(size: Any) -> Any:
    """A size as something that is equal for equal sizes and proves nothing, as comparing open sizes would."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_decomposable(module: Module, node: fx.Node) -> bool:
    """Whether a call without a lowering decomposes into calls that can all run on the GPU."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or node.target._schema.is_mutable
        or is_supported(node.target)
    ):
        return False
    traced = _traced(node)
    if traced is None:
        return False
    output = next(n for n in traced.nodes if n.op == "output")
    results: Any = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    return not refusals(Module(traced, {}, list(results), {}, {}, module.ranges))


def _traced(node: fx.Node) -> fx.Graph | None:
    """The graph of a call, with a placeholder for every node among its arguments; None if torch cannot trace it
    like that.
    """
    target: Any = node.target
    leaves, spec = tree_flatten((node.args, node.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def call(*values: Any) -> Any:
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, spec)
        return target(*args, **kwargs)

    given = [leaves[k].meta["val"] for k in places]
    mode = detect_fake_mode(tree_leaves((given, node.meta.get("val"))))
    # Equal calls share one traced decomposition, and so their results share fake tensors. make_fx tells its arguments apart by
    # identity, so each place needs a tensor of its own: also where one node stands in two, for it will not in other calls.
    first = {id(value): k for value, k in zip(reversed(given), reversed(places), strict=True)}
    with mode or nullcontext():
        given = [
            value.detach() if isinstance(value, torch.Tensor) and first[id(value)] != k else value
            for value, k in zip(given, places, strict=True)
        ]
    try:
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),  # where torch decomposes by itself, which no table replaces
            open_sizes(mode),
            mode or nullcontext(),  # tensors created from nothing (windows) must be fake, too
            enable_python_dispatcher(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            traced = make_fx(call, decomposition_table=dict(tables()[0]))(*given)
            if any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in traced.graph.nodes):
                traced = make_fx(torch.func.functionalize(traced), decomposition_table=dict(tables()[0]))(*given)
            _keep_sizes(node.meta.get("val"), traced.graph)
    except (AssertionError, RuntimeError, TypeError):
        return None
    return None if any(n.op == "get_attr" for n in traced.graph.nodes) else traced.graph


def _keep_sizes(known: Any, traced: fx.Graph) -> None:
    """Gives sizes that depend on data, new in every trace, the names by which the rest of the graph knows them, as PyTorch does in
    a second trace (torch.fx.experimental.symbolic_shapes.ShapeEnv._rename_unbacked_to).
    """
    output = next(n for n in traced.nodes if n.op == "output")
    results = [n.meta.get("val") for n in tree_leaves(output.args) if isinstance(n, fx.Node)]
    for new, old in zip(results, tree_leaves(known), strict=False):
        for a, b in zip(getattr(new, "shape", ()), getattr(old, "shape", ()), strict=False):
            if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
                fresh, name = a.node.expr, b.node.expr
                if fresh != name and fresh.is_Symbol and name.is_Symbol and free_unbacked_symbols((fresh, name)):
                    a.node.shape_env._rename_unbacked_to(fresh, name)
