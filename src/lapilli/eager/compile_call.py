"""Compiles a signature to a program: traces one call on fake tensors, and runs the compiler's stages."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.compiler import assemble_graph
from lapilli.eager.call_signature import (
    CallSignature,
    CannotRun,
    NumberOperand,
    TensorOperand,
    describe_operand,
    range_of,
)
from lapilli.eager.operator_schema import Schema, wrapped
from lapilli.errors import LapilliError
from lapilli.graph.coded_layers import CODED_EMBEDDING, CODED_LINEAR, mark_given_weights
from lapilli.graph.inline import splice
from lapilli.graph.module import Module
from lapilli.ir.expr import loads
from lapilli.ir.integer import Int
from lapilli.ir.node import Input, Node, nbytes
from lapilli.legalize.decompose import decompose_calls, tables
from lapilli.legalize.passes import clean_up
from lapilli.lower import is_computed, lower, lowerings
from lapilli.lower.registry import RANDOM_KEY, decompositions
from lapilli.lower.torch_sizes import tree
from lapilli.runtime.sizes import names, text
from lapilli.schedule.plan import Schedule
from lapilli.schedule.task import Task
from lapilli.target import Target
from lapilli.torch_compat import without_logs

aten = torch.ops.aten

DEPENDS_ON_DATA = "the size of its result depends on data"

_ALL, _LAST = range(5), (-1,)
FIXED_SIZES: dict[Any, dict[int, Sequence[int]]] = {
    aten.convolution.default: {1: _ALL}, aten.convolution_overrideable.default: {1: _ALL},
    aten.convolution_backward.default: {2: _ALL}, aten.convolution_backward_overrideable.default: {2: _ALL},
    aten.scaled_dot_product_attention.default: {0: _LAST, 1: _LAST, 2: _LAST}, ATTENTION: {0: _LAST, 1: _LAST, 2: _LAST},
    ATTENTION_BACKWARD: {0: _LAST, 1: _LAST, 2: _LAST, 3: _LAST, 4: _LAST},
    aten._int_mm.default: {0: _LAST, 1: _ALL},
    CODED_LINEAR: {0: _LAST, 1: _ALL, 2: _ALL, 3: _ALL, 4: _ALL}, CODED_EMBEDDING: {1: _ALL, 2: _ALL, 3: _ALL},
}  # fmt: skip
"""Sizes that are compiled in, by argument and dimension: those of convolution weights, whose loops are unrolled, and of attention
heads, of which an invocation holds a part in registers, and quantized weights, which kernels decode."""


_HALVES = (torch.float16, torch.bfloat16)
_NORMS = (
    aten.native_layer_norm.default, aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
)  # fmt: skip
"""Norms with lowerings. Their statistics of half-precision numbers, results 1 and 2, are float32 on every device but the CPU, for
which calls are traced here. Graphs of torch.compile are traced for the device: what they save has this type."""
_COMPOSED_NORM = aten.native_batch_norm.default
"""A norm that is taken apart, with the same statistics."""


@dataclass(frozen=True)
class Compiled:
    """A program for a signature.

    data: the program file. symbols: the meaning of its method's symbols, in order: ("size", operand, dimension, divisor),
    ("number", index, 0, 1) or ("random", word, 0, 1). sizes: the sizes on which the expressions depend (name -> operand,
    dimension, divisor). guard: a Python expression in those, whether the program fits. results: another one for shape,
    strides and dtype of every result tensor. tree: the results, as indices of result tensors (-1: None; a list: a list of
    tensors). aligned: for every result, the operands that only the kernel of this result reads, and reads an element of
    only where it writes the same element of the result.
    """

    data: bytes
    symbols: tuple[tuple[str, int, int, int], ...]
    sizes: dict[str, tuple[int, int, int]]
    guard: str
    results: str
    tree: Any
    aligned: tuple[tuple[int, ...], ...]


def compile(signature: CallSignature, numbers: Sequence[Any], target: Target) -> Compiled:
    """Compiles a signature. numbers: those of a call, as examples.

    Raises CannotRun with the reason, or torch's own exception for wrong arguments.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            warnings.catch_warnings(),
            without_logs(),
            torch.device("cpu"),
        ):
            warnings.simplefilter("ignore")
            return _Call(signature, numbers).compile(target)
    except (LapilliError, TypeError) as error:
        raise CannotRun(str(error)) from error
    except CannotRun:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CannotRun(DEPENDS_ON_DATA) from error
    except Exception as error:  # any error of a lowering is a reason to run the call elsewhere
        text = str(error).strip().splitlines()
        raise CannotRun(f"{type(error).__name__}: {text[0] if text else ''}") from error


@dataclass
class _Call:
    signature: CallSignature
    examples: Sequence[Any]
    graph: fx.Graph = field(default_factory=fx.Graph)
    symbols: dict[int, Any] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)  # the guard's conditions on sizes that are compiled in
    operands: int = 0
    numbers: int = 0
    inner: tuple[fx.Node, fx.Graph, list[fx.Node]] | None = None  # a call that represents a graph

    def __post_init__(self) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True)

    def compile(self, target: Target) -> Compiled:
        schema = self.signature.schema
        op = schema.computed
        fixed = FIXED_SIZES.get(op, {})
        # Kernels for matrix units depend on the number of channels, which the weights determine.
        channels = range(1, 2 if fixed and self.signature.ranges else 1)
        given = [self._tensor(x) if k in schema.tensors else x for k, x in enumerate(self.signature.leaves)]
        leaves = [self._leaf(x, fixed.get(k, channels)) for k, x in enumerate(given)]
        flat, tree = self._results(schema, leaves)
        nodes = [self._in_memory(n, where) for n, where in zip(flat, self._places(schema, flat), strict=True)]
        module = Module(self.graph, {}, [n for n, _, _ in nodes], {}, {}, self.environment.var_to_range)
        self.graph.output(module.outputs)
        if self.inner is not None:
            splice(module, *self.inner)
        clean_up(module)
        if not decompose_calls(module):
            raise CannotRun("torch has no decomposition of it into operators with GPU lowerings")
        clean_up(module)
        mark_given_weights(module)
        if [n.meta["val"].dtype for n in module.outputs] != [n.meta["val"].dtype for n, _, _ in nodes]:
            raise CannotRun("it is taken apart into operators whose results have other types")
        missing = sorted({str(n.target) for n in module.graph.nodes if is_computed(n) and n.target not in lowerings})
        if missing:
            raise CannotRun(f"there is no GPU lowering of {', '.join(missing)}")
        lowered = lower(module, "fp32", target.half, keyed=True)
        data, schedule = assemble_graph(lowered, replace(target, ranges=False))  # a call waits for it
        known = {name: ("size", *place) for name, place in self.sizes.items()}
        known.update({f"number{k}": ("number", k, 0, 1) for k in range(self.numbers)})
        known.update({name: ("random", k, 0, 1) for k, name in enumerate(RANDOM_KEY)})
        return Compiled(
            data,
            tuple(known[name] for name in lowered.symbols),
            self.sizes,
            self._guard(
                [f"{symbol} <= {bound}" for symbol, bound in lowered.limits.items()]
                + [f"{symbol} >= {least}" for symbol, least in lowered.least.items()]
                + _bindable(schedule, set(self.sizes))
            ),
            "["
            + ", ".join(
                f"({_text(shape)}, {_text(strides)}, {str(n.meta['val'].dtype)!r})" for n, shape, strides in nodes
            )
            + "]",
            tree,
            _aligned(schedule),
        )

    # -- arguments
    def _size(self, n: int, place: tuple[int, int], fixed: bool) -> Any:
        if n < 2 or self.signature.exact:
            return n
        if fixed:
            name = f"fixed{len(self.fixed)}"
            self.sizes[name] = (*place, 1)
            self.fixed.append(f"{name} == {n}")
            return n
        if n not in self.symbols:
            name = f"s{len(self.symbols)}"
            source = ConstantSource(name)
            unit = self.signature.unit(n)
            symbol = self.environment.create_symbol(n // unit, source, dynamic_dim=DimDynamic.DYNAMIC)
            if self.signature.ranges:
                within = range_of(n)
                self.environment.var_to_range[symbol] = ValueRanges(within.least // unit, within.most // unit)
            size = self.environment.create_symintnode(symbol, hint=n // unit, source=source)
            self.symbols[n] = size * unit if unit > 1 else size
            self.sizes[str(symbol)] = (*place, unit)
        return self.symbols[n]

    def _tensor(self, leaf: Any) -> Any:
        """A number where a tensor is required, as a tensor without dimensions."""
        schema = self.signature.schema
        beside = [x for k, x in enumerate(self.signature.leaves) if k in schema.tensors and k not in schema.outs]
        types = [(x.dtype, len(x.shape)) for x in beside if isinstance(x, TensorOperand)]
        if isinstance(leaf, NumberOperand) and leaf.dtype is None:
            return replace(leaf, dtype=wrapped(0.5 if leaf.kind == "float" else 2, types))
        if isinstance(leaf, int | float):
            return self._node(aten.full.default, [], leaf, dtype=wrapped(leaf, types))
        return leaf

    def _leaf(self, leaf: Any, fixed: Sequence[int]) -> Any:
        if isinstance(leaf, TensorOperand):
            return self._operand(leaf, fixed)
        if isinstance(leaf, NumberOperand):
            return self._number(leaf)
        if isinstance(leaf, tuple):
            return [self._leaf(x, fixed) for x in leaf]
        if isinstance(leaf, torch.Generator):
            return None  # tracing would advance it
        return leaf

    def _operand(self, leaf: TensorOperand, fixed: Sequence[int]) -> fx.Node:
        rank = len(leaf.shape)
        sizes = [self._size(n, (self.operands, d), d in fixed or d - rank in fixed) for d, n in enumerate(leaf.shape)]
        node = self.graph.placeholder(f"x{self.operands}")
        self.operands += 1
        inwards = [d for d in leaf.order if d not in leaf.expanded]
        with self.mode:
            node.meta["val"] = torch.empty([sizes[d] for d in inwards], dtype=leaf.dtype, device="cpu")
        if inwards != sorted(inwards):
            node = self._node(aten.permute.default, node, [inwards.index(d) for d in sorted(inwards)])
        for d in leaf.expanded:
            node = self._node(aten.unsqueeze.default, node, d)
        return self._node(aten.expand.default, node, sizes) if leaf.expanded else node

    def _number(self, leaf: NumberOperand) -> fx.Node:
        """The value of a Scalar, as a number; that of a tensor, as a tensor without dimensions."""
        example = self.examples[self.numbers]
        node = self.graph.placeholder(f"number{self.numbers}")
        node.meta["number"] = leaf.kind
        node.meta["val"] = example
        if leaf.dtype is not None:
            with self.mode:
                node.meta["val"] = torch.empty((), dtype=leaf.dtype, device="cpu")
        self.numbers += 1
        return node

    def _node(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the graph, evaluated on fake tensors."""
        given, named = (
            tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, x) for x in (list(args), kwargs)
        )
        with self.mode:
            value = op(*given, **named)
            if op in _NORMS:
                saved = (v.to(torch.float32) if v.dtype in _HALVES else v for v in value[1:3])
                value = (value[0], *saved, *value[3:])
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = value
        return node

    # -- results
    def _results(self, schema: Schema, leaves: list[Any]) -> tuple[list[fx.Node], Any]:
        """Nodes of the result tensors, and the tree of results."""
        kept = [k for k in range(len(leaves)) if k not in schema.outs]
        if schema.functional is None or (schema.functional in decompositions and not _has_meta(schema.functional)):
            call, values = self._traced(schema, leaves)
        else:
            arguments = schema.functional._schema.arguments
            names = [a.name for a in arguments]
            if len(names) != len(kept):
                raise CannotRun(f"its arguments are not those of {schema.functional}")
            given = {a.name: (a, leaves[k]) for a, k in zip(arguments, kept, strict=True)}
            args = [leaf for a, leaf in given.values() if not a.kwarg_only]
            kwargs = {n: leaf for n, (a, leaf) in given.items() if a.kwarg_only and not _is_default(a, leaf)}
            call = self._node(schema.functional, *args, **kwargs)
            values = call.meta["val"]
        if isinstance(values, torch.Tensor):
            return [call], 0
        if not isinstance(values, list | tuple):
            raise CannotRun("its result is not a tensor")
        flat: list[fx.Node] = []
        tree: list[Any] = []
        composed = schema.functional is _COMPOSED_NORM
        for k, value in enumerate(values):
            part = self.graph.call_function(operator.getitem, (call, k))
            part.meta["val"] = value
            if composed and k in (1, 2) and value.dtype in _HALVES:
                part = self._node(aten._to_copy.default, part, dtype=torch.float32)
            if isinstance(value, torch.Tensor):
                tree.append(len(flat))
                flat.append(part)
            elif value is None:
                tree.append(-1)
                self.graph.erase_node(part)
            elif isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value):
                inner = [self.graph.call_function(operator.getitem, (part, i)) for i in range(len(value))]
                for node, v in zip(inner, value, strict=True):
                    node.meta["val"] = v
                tree.append(list(range(len(flat), len(flat) + len(inner))))
                flat += inner
            else:
                raise CannotRun("its result is not a tensor")
        return flat, tree

    def _traced(self, schema: Schema, leaves: list[Any]) -> tuple[fx.Node, list[Any]]:
        """An operator that we decompose, or one that writes to its arguments and has no functional schema. The latter
        writes to copies, which follow its results.
        """
        nodes = [n for n in tree_leaves(leaves) if isinstance(n, fx.Node)]
        ours = decompositions.get(schema.functional) if schema.functional is not None else None

        def run(*tensors: torch.Tensor) -> Any:
            made = dict(zip(nodes, tensors, strict=True))
            args = tree_map(lambda a: made.get(a, a) if isinstance(a, fx.Node) else a, leaves)
            if ours is not None:
                found = ours(*(a for k, a in enumerate(args) if k not in schema.outs))
                return list(found) if isinstance(found, list | tuple) else [found]
            for k in schema.written:
                args[k] = (
                    torch.empty(0, dtype=args[k]) if k in schema.outs else None if args[k] is None else args[k].clone()
                )
            found = schema.op(
                *args[: schema.positional],
                **dict(zip(schema.names[schema.positional :], args[schema.positional :], strict=True)),
            )
            results = found if isinstance(found, list | tuple) else [found] if found is not None else []
            new = [r for r, place in zip(results, schema.returned, strict=False) if place is None]
            return [*new, *(args[k] for k in schema.written)]

        given = [n.meta["val"] for n in nodes]
        traced = make_fx(torch.func.functionalize(run), decomposition_table=dict(tables()[0]))(*given)
        returned: Any = next(n for n in traced.graph.nodes if n.op == "output").args[0]
        values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in returned]
        call = self.graph.call_function(schema.op, tuple(nodes))
        call.meta["val"] = values
        self.inner = (call, traced.graph, nodes)
        return call, values

    def _places(self, schema: Schema, flat: list[fx.Node]) -> list[TensorOperand | None]:
        """The argument to which each result is written in place, or None."""
        places: list[TensorOperand | None] = [None] * len(flat)
        for result, position in schema.stored:
            leaf = self.signature.leaves[position]
            if isinstance(leaf, TensorOperand):
                places[result] = leaf
            elif isinstance(leaf, torch.dtype):
                places[result] = TensorOperand((), leaf, (), (), True)
        return places

    def _in_memory(self, node: fx.Node, place: TensorOperand | None) -> tuple[fx.Node, list[Any], list[Any]]:
        """A result with its dimensions in memory order, its shape and its strides.

        place: the argument to which it is written (for an out argument only the dtype is known here).
        """
        val = node.meta["val"]
        if place is not None and val.dtype != place.dtype:
            if not torch.can_cast(val.dtype, place.dtype):
                raise CannotRun(f"its result cannot be cast to {place.dtype}")
            node = self._node(aten._to_copy.default, node, dtype=place.dtype)
            val = node.meta["val"]
        if any(isinstance(s, torch.SymInt) and s.node.hint is None for s in val.shape):
            raise CannotRun(DEPENDS_ON_DATA)
        shape = [_expr(s) for s in val.shape]
        hints = tuple(map(_hint, val.shape))
        seen = describe_operand(hints, [_hint(s) for s in val.stride()], val.dtype)
        order = seen.order if not seen.expanded and not seen.strided else tuple(range(len(shape)))
        if place is not None and place.order:
            if place.shape != hints:
                raise CannotRun("its result does not have the shape of the tensor that it is written to")
            order = place.order
        strides: list[Any] = [sympy.Integer(1)] * len(shape)
        step: Any = sympy.Integer(1)
        for d in reversed(order):
            strides[d] = step
            step = step * (1 if shape[d] == 0 else shape[d])
        if order != tuple(range(len(shape))):
            node = self._node(aten.permute.default, node, list(order))
        return node, shape, strides

    def _guard(self, limited: list[str]) -> str:
        parts = [_text(g.expr) for g in self.environment.guards] + limited + self.fixed
        return " and ".join(f"({p})" for p in dict.fromkeys(parts)) or "True"


def _bindable(schedule: Schedule, sizes: Collection[str]) -> list[str]:
    """Conditions that no value of dynamic size is larger than the device can bind at once. Larger sizes get a program of
    their own, with values in parts.
    """
    most = schedule.target.storage
    values = {n.id: n for t in schedule.order.run for n in (t.out, *t.reads())}
    found = {nbytes(schedule.memory(n)) for n in values.values()} if most else set()
    texts = [_formula(size, sizes) for size in found if (size.bounds[1] is None or size.bounds[1] > most)]
    return [f"{text} <= {most}" for text in sorted(t for t in texts if t is not None)]


def _formula(size: Int, sizes: Collection[str]) -> str | None:
    """A size as a Python expression; None if it depends on anything but the sizes of operands."""
    made = tree(size)
    return text(made) if names(made) <= set(sizes) else None


def _has_meta(op: Any) -> bool:
    """Whether torch can determine an operator's results without computing them."""
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _text(e: Any) -> str:
    if isinstance(e, list):
        return "(" + "".join(f"{_text(x)}, " for x in e) + ")"
    return str(PythonPrinter().doprint(e))


def _is_default(argument: Any, leaf: Any) -> bool:
    return argument.has_default_value() and not isinstance(leaf, fx.Node) and leaf == argument.default_value


def _aligned(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """See `Compiled.aligned`."""
    writers: dict[int, list[Task]] = {}
    readers: dict[int, list[Task]] = {}
    for task in schedule.order.run:
        writers.setdefault(task.out.id, []).append(task)
        for node in task.reads():
            readers.setdefault(node.id, []).append(task)

    def with_result(output: Node) -> tuple[int, ...]:
        task, *others = writers.get(output.id, [None])
        if task is None or others or task.row is not None or task.template is not None:
            return ()
        place = schedule.layouts[output.id].offset(task.store)
        found = []
        for k, given in enumerate(schedule.graph.inputs):
            assert isinstance(given, Input)
            if any(reader is not task for reader in readers.get(given.id, ())):
                continue
            reads = [
                ld for e in (task.value, task.reduction_body) if e is not None for ld in loads(e) if ld.node is given
            ]
            same = all(schedule.layouts[given.id].offset(ld.index) == place for ld in reads)
            if same and given.dtype.size == output.dtype.size:
                found.append(k)
        return tuple(found)

    return tuple(map(with_result, schedule.graph.outputs))
