"""Compiles parts of an exported graph, and replaces them by calls."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from lapilli.backend.aot_graph import Prepared, prepare
from lapilli.compiler import Storage, compile_module, short_floats
from lapilli.legalize.levels import Levels, cut
from lapilli.lower.graph import is_size
from lapilli.lower.torch_sizes import Symbols, solve, tree
from lapilli.runtime import operator as run_operator
from lapilli.runtime import registration  # noqa: F401  # of the operator that the graphs call
from lapilli.runtime.description import Description
from lapilli.runtime.sizes import names
from lapilli.target import plans_here


@dataclass(frozen=True)
class Segment:
    """A program, and the inputs and outputs of its call: nodes of the original graph."""

    data: bytes
    inputs: list[fx.Node]
    sizes: list[fx.Node]
    outputs: list[fx.Node]
    interface: str


def build(
    nodes: Sequence[fx.Node], constants: Mapping[fx.Node, torch.Tensor], owner: torch.nn.Module, storage: Storage
) -> Segment:
    """The program of some nodes whose values are tensors, not sizes. Raises CompileError or TypeError if there is none."""
    made = cut(nodes)
    outside = list(made.outside)
    known = {k: constants[a] for k, a in enumerate(outside) if a in constants}
    prepared = prepare(fx.GraphModule(owner, made.graph), known, views=False)
    stored = short_floats(storage.activations, prepared.module)
    data = compile_module(prepared.module, storage, plans_here(stored), "error")
    return _segment(data, prepared, outside, list(made.results), [a for a in outside if a not in constants])


def _segment(
    data: bytes, prepared: Prepared, outside: list[fx.Node], outputs: list[fx.Node], given: list[fx.Node]
) -> Segment:
    tensors = [a for a in given if isinstance(a.meta["val"], torch.Tensor)]
    numbers = [a for a in given if isinstance(a.meta["val"], torch.SymInt)]
    method = Description.of(data).methods[0]
    needed = set(method.given)
    arguments = [prepared.arguments[spec.name] for spec in method.inputs]
    inputs = [[tensors.index(outside[a.position]), a.order] for a in arguments]
    specs = []
    symbols = Symbols(prepared.module.ranges)
    for output in prepared.outputs:
        shape = [tree(symbols.size(s)) for s in output.val.shape]
        needed = needed.union(*map(names, shape))
        specs.append([str(output.val.dtype).removeprefix("torch."), shape, output.order])
    known = _sources_of_sizes(tensors, numbers)
    if missing := sorted(needed - known.keys()):
        raise TypeError(f"the size {missing[0]} is the size of no tensor that the operators read")
    sources = {name: known[name] for name in sorted(needed)}
    return Segment(data, tensors, numbers, outputs, run_operator.dumps(inputs, specs, sources))


def _sources_of_sizes(tensors: Sequence[fx.Node], numbers: Sequence[fx.Node]) -> dict[str, Any]:
    """The sources of sizes, by name: a number, or an axis with factor * size + offset elements."""
    given = ((n.meta["val"].node.expr, k) for k, n in enumerate(numbers))
    found: dict[str, Any] = {e.name: k for e, k in given if isinstance(e, sympy.Symbol)}
    axes = (((k, axis), s) for k, n in enumerate(tensors) for axis, s in enumerate(n.meta["val"].shape))
    shown = [(place, s.node.expr) for place, s in axes if isinstance(s, torch.SymInt)]
    of_one = [(place, e) for place, e in shown if len(e.free_symbols) == 1]
    for name, (k, axis), factor, offset in solve(of_one, found):
        found[name] = [k, axis, int(factor), int(offset)]
    return found


def rewrite(graph: fx.Graph, levels: Levels, segments: Mapping[int, Segment], programs: Mapping[int, Any]) -> fx.Graph:
    """The graph with a call of `lapilli::run` for every segment, by level. programs: fake values of the new placeholders, which
    precede the user's inputs. Values keep their names."""
    made: dict[fx.Node, Any] = {}
    new = fx.Graph()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    handles: dict[int, fx.Node] = {}

    for level, value in programs.items():
        handles[level] = new.placeholder(f"lapilli_program_{level // 2}")
        handles[level].meta["val"] = value
    _copy(new, made, places)
    rest = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    for level in sorted({levels[n] for n in rest}):
        here = [n for n in rest if levels[n] == level]
        if level in segments:
            needed = _sources(segments[level].sizes)
            _copy(new, made, [n for n in here if n in needed])
            _call(new, made, segments[level], handles[level])
        _copy(new, made, [n for n in here if n not in made and (level not in segments or is_size(n.meta.get("val")))])
    output = next(n for n in graph.nodes if n.op == "output")
    new.node_copy(output, made.__getitem__)
    return new


def _sources(sizes: Sequence[fx.Node]) -> set[fx.Node]:
    """Sizes, and the sizes from which they are computed."""
    found: set[fx.Node] = set()
    left = list(sizes)
    while left:
        node = left.pop()
        if node not in found and is_size(node.meta.get("val")):
            found.add(node)
            left += node.all_input_nodes
    return found


def _copy(new: fx.Graph, made: dict[fx.Node, Any], nodes: Sequence[fx.Node]) -> None:
    for n in nodes:
        made[n] = new.node_copy(n, made.__getitem__)
        made[n].name = n.name  # a new graph renames values whose names are Python's, such as input


def _call(new: fx.Graph, made: dict[fx.Node, Any], segment: Segment, handle: fx.Node) -> None:
    overload = torch.ops.lapilli.run.default
    inputs, sizes = [made[a] for a in segment.inputs], [made[a] for a in segment.sizes]
    call = new.call_function(overload, (handle, inputs, sizes, segment.interface))
    arguments = ([n.meta["val"] for n in inputs], [n.meta["val"] for n in sizes])
    with handle.meta["val"].fake_mode:
        values = overload(handle.meta["val"], *arguments, segment.interface)
    call.meta["val"] = values
    for k, node in enumerate(segment.outputs):
        part = new.create_node("call_function", operator.getitem, (call, k), name=node.name)
        part.meta["val"] = values[k]
        made[node] = part
