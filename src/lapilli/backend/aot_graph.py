"""Turns AOTAutograd's graph into a module for the compiler, and describes the arguments and results of a call.

Only what must be computed becomes part of the program. A result that is a view of an argument, or of another result, is
created by the host from that one, so that nothing is copied and strides are as torch expects. Tensors with permuted axes in
memory (channels-last) enter and leave the program as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.value_ranges import ValueRanges

from lapilli.backend.fixed_sizes import fix_sizes
from lapilli.backend.output_views import View, is_whole, view_of
from lapilli.backend.scalars import Scalars, take_out
from lapilli.backend.size_sources import Sources, expression
from lapilli.errors import CompileError
from lapilli.graph.aliasing import base_of, root_of
from lapilli.graph.coded_layers import mark_given_weights
from lapilli.graph.memory import Order, inverse, memory_order, permuted
from lapilli.graph.module import Module, ModuleState
from lapilli.graph.quantized import recognize
from lapilli.legalize.decompose import decompose_calls
from lapilli.legalize.passes import optimize

aten = torch.ops.aten

Updates = Mapping[int, tuple[int, int]]
"""Results that are views of an argument that the graph changes, by position: of the result that is its new value, and of the
argument itself. PyTorch creates such a view again, of the argument, and takes from the result only where it lies in memory.
"""


@dataclass(frozen=True)
class Argument:
    """An argument that the program may read: its position in the call, and the order of its axes in memory (None:
    row-major).
    """

    position: int
    order: Order | None


@dataclass(frozen=True)
class Output:
    """A tensor that the program computes: torch's sizes, dtype and device, and the order of its axes in memory."""

    val: torch.Tensor
    order: Order | None


@dataclass(frozen=True)
class Result:
    """A result of the call: its source, and the views of that to create.

    source: "program" (an output of the program), "given" (an argument), "number" (computed from sizes) or "fixed". value:
    its position among those, or the fixed value. to_host: an argument that torch takes for a CPU tensor. Results that a
    forward graph saves for its backward graph are on the device in any case.
    """

    source: str
    value: Any
    views: tuple[View, ...] = ()
    to_host: bool = False


@dataclass
class Prepared:
    """A module after all passes, and what surrounds it."""

    module: Module
    arguments: dict[str, Argument] = field(default_factory=dict)  # by their names in the program
    outputs: list[Output] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)  # for "number" results and final views
    scalars: Scalars | None = None  # computes further arguments
    in_place: list[int] = field(default_factory=list)  # positions of arguments that the program changes in place


def prepare(
    gm: fx.GraphModule, constants: Mapping[int, torch.Tensor], updates: Updates | None = None, views: bool = True,
    changed: Sequence[int] = (), most: Mapping[str, int] | None = None, sizes: Mapping[str, int] | None = None,
) -> Prepared:  # fmt: skip
    """Prepares a graph for the compiler, and leaves gm unchanged.

    constants: values of arguments that are the same in every call, by position. views: whether to leave final views to the
    host. changed: positions of arguments whose new values are the first results; those of which only some entries change are
    changed in place (`Prepared.in_place`). most: upper bounds of sizes, by name. sizes: values of them.
    """
    ranges = _bounded(_ranges([n for n in gm.graph.nodes if n.op == "placeholder"]), most or {})
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    if sizes:
        fix_sizes(graph, sizes)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    module = Module(graph, {}, [], {}, {}, ranges, owner=gm)
    prepared = Prepared(module)
    _lift_attributes(module, gm)
    _forget_devices(graph)
    _skip_doubles(graph)
    prepared.scalars = take_out(graph, placeholders, module.constants)
    results = _Results(prepared, placeholders, updates or {}, views)
    for k, position in enumerate(changed):
        results.change_in_place(k, placeholders[position])
    results.collect()
    for position, node in enumerate(placeholders):
        if position in constants:
            module.constants[node] = constants[position].detach().cpu()
    _drop_unread(module, placeholders)
    for position, node in enumerate(placeholders):
        is_read = position not in constants and node not in module.states and node in module.graph.nodes
        if is_read and node.meta.get("val") is not None:
            prepared.arguments[node.name] = Argument(position, _as_in_memory(module, node))
    recognize(module)
    decompose_calls(module)
    mark_given_weights(module)
    optimize(module)
    return prepared


def _ranges(placeholders: Sequence[fx.Node]) -> Mapping[Any, Any]:
    """Bounds of the sizes, from the shape environment of any symbolic one."""
    for node in placeholders:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else [val]:
            if isinstance(size, torch.SymInt | torch.SymFloat):
                ranges: Mapping[Any, Any] = size.node.shape_env.var_to_range
                return ranges
    return {}


def _bounded(ranges: Mapping[Any, Any], most: Mapping[str, int]) -> Mapping[Any, Any]:
    if not most:
        return ranges
    return {s: ValueRanges(r.lower, most[s.name]) if s.name in most else r for s, r in ranges.items()}


def _lift_attributes(module: Module, gm: fx.GraphModule) -> None:
    """Makes constants of tensors that are attributes of the graph's module."""
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value: Any = gm
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor):
            module.replace(node, module.add_constant(value.detach().cpu(), f"{node.name}_value"))
            module.graph.erase_node(node)


def _forget_devices(graph: fx.Graph) -> None:
    """Replaces the devices of operators that create tensors: here these belong to the program, or are on the CPU."""
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        if node.target is torch.ops.prims.convert_element_type.default:
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": node.args[1]}


def _skip_doubles(graph: fx.Graph) -> None:
    """Converts numbers directly to float32 that would be converted to float64 first, as torch does with numbers computed
    from sizes.
    """
    for node in graph.nodes:
        source = node.args[0] if node.target is aten._to_copy.default else None
        if isinstance(source, fx.Node) and source.target is aten._to_copy.default and not node.meta["val"].dim():
            types = [n.meta["val"].dtype for n in (source.all_input_nodes[0], source, node)]
            if types[0] is not torch.float64 and types[1:] == [torch.float64, torch.float32]:
                node.args = source.args[:1]


class _Results:
    """Classifies the results of the graph."""

    def __init__(self, prepared: Prepared, placeholders: Sequence[fx.Node], updates: Updates, views: bool) -> None:
        self.prepared, self.updates, self.views = prepared, updates, views
        self.position = {node: k for k, node in enumerate(placeholders)}
        self.sources = Sources(placeholders)
        self.made: dict[fx.Node, int] = {}
        self.readers: Counter[fx.Node] = Counter()  # the number of results that share the memory of a value
        self.in_place: dict[Any, int] = {}  # positions of arguments that are changed in place, by their new values

    def _returned(self) -> Any:
        return next(n for n in self.prepared.module.graph.nodes if n.op == "output").args[0]

    def change_in_place(self, k: int, argument: fx.Node) -> None:
        """Makes an argument a state if result k replaces entries of it by values that do not depend on it. Then a second run with
        the same arguments changes nothing, which may come after a run whose integers proved too large.
        """
        new, val = self._returned()[k], argument.meta["val"]
        if not (isinstance(new, fx.Node) and new.target in _REPLACES and new.args[0] is argument):
            return
        if list(argument.users) != [new] or not val.is_floating_point() or val.device.type == "cpu":
            return
        if not all(isinstance(n, int) for n in val.shape) or not val.numel() or not val.is_contiguous():
            return
        if new.target is aten.index_put.default and any(new.args[3:]):  # it adds
            return
        self.in_place[new] = self.position[argument]
        self.prepared.in_place.append(self.position[argument])
        self.prepared.module.states[argument] = ModuleState(argument.name, val, new, given=True)

    def collect(self) -> None:
        returned = self._returned()
        self.readers.update(root_of(n) for n in dict.fromkeys(returned) if isinstance(n, fx.Node))
        for k, value in enumerate(returned):
            if isinstance(value, fx.Node) and value in self.in_place:
                self.prepared.results.append(Result("given", self.in_place[value]))
                continue
            new, argument = self.updates.get(k, (None, None))
            self.prepared.results.append(self._result(value, returned[new] if new is not None else None, argument))

    def _result(self, value: Any, new: fx.Node | None, argument: int | None) -> Result:
        """new, argument: as in `Updates`, for the value of such a result."""
        if not isinstance(value, fx.Node):
            return Result("fixed", value)
        val = value.meta["val"]
        if not isinstance(val, torch.Tensor):
            return Result("number", self._number(val))
        if new is not None and argument is not None and (views := self._path(value, new)) is not None:
            return Result("given", argument, views, val.device.type == "cpu")
        base, views = self._unviewed(value) if self.views else (value, ())
        if base in self.position:
            return Result("given", self.position[base], views, val.device.type == "cpu")
        if base not in self.made:
            self.made[base] = len(self.made)
            self._compute(base)
        return Result("program", self.made[base], views)

    def _number(self, value: Any) -> int:
        if not self.sources.has(value):
            raise CompileError(f"the graph returns {expression(value)}, a number that is read from a tensor")
        self.prepared.numbers.append(value)
        return len(self.prepared.numbers) - 1

    def _path(self, node: fx.Node, base: fx.Node) -> tuple[View, ...] | None:
        """The views that make a value of another, first to last. None: it is no view of that."""
        views: list[View] = []
        at: fx.Node | None = node
        while at is not None and at is not base:
            views.append(view_of(at, self._number))
            at = base_of(at)
        return tuple(reversed(views)) if at is base else None

    def _unviewed(self, node: fx.Node) -> tuple[fx.Node, tuple[View, ...]]:
        """The value from which the host creates a result, and the views to apply, first to last.

        If other results share its memory, that is their common base; otherwise the smallest value.
        """
        root = root_of(node)
        is_shared = root in self.position or (self.readers[root] > 1 and memory_order(root.meta["val"]) is not None)
        views: list[View] = []
        at, base = node, base_of(node)
        while base is not None and (is_shared or is_whole(at)):
            views.append(view_of(at, self._number))
            at, base = base, base_of(base)
        if not is_shared and memory_order(at.meta["val"]) is None:
            return node, ()
        return at, tuple(reversed(views))

    def _compute(self, node: fx.Node) -> None:
        val, module = node.meta["val"], self.prepared.module
        order = memory_order(val)
        if order is not None and order != tuple(range(val.dim())):
            with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op == "output")):
                node = permuted(module, node, order)
        else:
            order = None
        module.outputs.append(node)
        self.prepared.outputs.append(Output(val, order))


_REPLACES = (
    aten.index_copy.default, aten.index_put.default, aten.slice_scatter.default, aten.select_scatter.default,
)  # fmt: skip
"""Operators whose result is their first argument but for some entries."""


def _as_in_memory(module: Module, node: fx.Node) -> Order | None:
    """Permutes a placeholder to the order of its axes in memory. Returns that order, or None if it is row-major already."""
    val = node.meta["val"]
    order = memory_order(val) if isinstance(val, torch.Tensor) else None
    if order is None or order == tuple(range(val.dim())):
        return None
    users = list(node.users)
    node.meta["val"] = val.permute(*order)
    first = next(n for n in module.graph.nodes if n.op != "placeholder")
    with module.graph.inserting_before(first):
        back = permuted(module, node, inverse(order))
    for user in users:
        user.replace_input_with(node, back)
    return order


def _drop_unread(module: Module, placeholders: Sequence[fx.Node]) -> None:
    output = next(n for n in module.graph.nodes if n.op == "output")
    output.args = ((*module.outputs, *(s.new for s in module.states.values())),)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and not _is_effect(node):
            module.graph.erase_node(node)
    for node in placeholders:
        if not node.users:
            module.constants.pop(node, None)
            module.graph.erase_node(node)


def _is_effect(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
