"""Which ATen operators run where: answered by lowering small calls of each, not by a list."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lapilli.codegen.select import schedule_of, write_all
from lapilli.errors import LapilliError
from lapilli.graph.aliasing import functional_variant
from lapilli.graph.module import Module
from lapilli.legalize.decompose import tables
from lapilli.legalize.passes import clean_up
from lapilli.lower.graph import lower, refusals
from lapilli.lower.registry import decompositions, lowerings
from lapilli.lower.sample_inputs import accepts, small_call
from lapilli.target import ANY

Overload = torch._ops.OpOverload

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """An operator overload.

    where: "gpu" (it has a lowering), "decomposed" (into operators that have one) or "cpu" (torch runs it);
    by: the function that lowers it, who decomposes it, or why it is not supported;
    dtypes: of its tensor arguments, for which a small call could be lowered; None where no call was found to ask with;
    dynamic: whether a float32 call could be lowered with sizes open (None: not asked)."""

    name: str
    core: bool
    where: str
    by: str
    dtypes: tuple[str, ...] | None = None
    dynamic: bool | None = None


def overloads() -> list[Overload]:
    """Every ATen overload that torch knows, by name."""
    names = (n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    split = (n.partition(".") for n in sorted(names))
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in split]


def is_core(overload: Overload) -> bool:
    """Whether it belongs to core ATen, into which torch.export decomposes models."""
    return torch.Tag.core in overload.tags


@cache
def entry(overload: Overload) -> Entry:
    """Ask how an overload runs: about 20 ms."""
    functional = functional_variant(overload)
    if functional is not overload:
        if functional is None:
            return Entry(str(overload), is_core(overload), "cpu", "it writes to its arguments")
        same = entry(functional)
        return Entry(
            str(overload), is_core(overload), same.where, f"as {same.name}: {same.by}", same.dtypes, same.dynamic
        )
    where, by = _how(overload)
    if where == "cpu":
        return Entry(str(overload), is_core(overload), where, by)
    answers = {dtype: _ask(overload, dtype) for dtype in DTYPES}
    if all(answer is None for answer in answers.values()):
        return Entry(str(overload), is_core(overload), where, by)
    dtypes = tuple(str(d).removeprefix("torch.") for d, answer in answers.items() if answer == "")
    if not dtypes:
        return Entry(str(overload), is_core(overload), "cpu", next(a for a in answers.values() if a))
    dynamic = _ask(overload, getattr(torch, dtypes[0]), dynamic=True)
    return Entry(str(overload), is_core(overload), where, by, dtypes, None if dynamic is None else dynamic == "")


def _how(overload: Overload) -> tuple[str, str]:
    """Where an overload runs as far as the registry tells, and by what."""
    if overload in lowerings:
        function = inspect.unwrap(lowerings[overload])
        home = function.__module__.removeprefix("lapilli.").replace(".", "/")
        return "gpu", f"{home}.py: {function.__qualname__.partition('.<locals>')[0]}"
    if overload in decompositions:
        return "decomposed", "Lapilli"
    if overload in tables()[0] or overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "decomposed", "torch"
    return "cpu", "no lowering"


def _ask(overload: Overload, dtype: torch.dtype, dynamic: bool = False) -> str | None:
    """ "" where a small call can be lowered, else why not; None where no call of this dtype is known that torch accepts."""
    call = small_call(overload)
    if call is None or not accepts(overload, call(dtype)):
        return None
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kind = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
        return mode.from_tensor(leaf, symbolic_context=StatelessSymbolicContext([kind] * leaf.dim()))

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            args = tree_map(fake, call(dtype))
            graph = _call(overload, args, mode) if overload in lowerings else _decomposed(overload, args)
            returned = next(n for n in graph.nodes if n.op == "output").args[0]
            outputs = [n for n in tree_leaves(returned) if isinstance(n, fx.Node)]
            module = Module(graph, {}, outputs, {}, {}, environment.var_to_range)
            clean_up(module)
            for node, reason in refusals(module).items():
                return reason if node.target is overload else f"{node.target}, into which it is decomposed: {reason}"
            write_all(schedule_of(lower(module), ANY))
    except (LapilliError, TypeError) as error:
        return str(error).split(". ")[0]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _call(overload: Overload, args: Sequence[Any], mode: FakeTensorMode) -> fx.Graph:
    """A graph of one call; of several results it returns the first."""
    graph = fx.Graph()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    call = graph.call_function(overload, tuple(tree_map(placeholder, list(args))))
    with mode:
        results = overload(*args)
    call.meta["val"] = results
    if isinstance(results, torch.Tensor):
        graph.output([call])
    else:
        first = graph.call_function(operator.getitem, (call, 0))
        first.meta["val"] = results[0]
        graph.output([first])
    return graph


def _decomposed(overload: Overload, args: Sequence[Any]) -> fx.Graph:
    """The graph of what a call decomposes into."""
    leaves, spec = tree_flatten(list(args))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        return overload(*tree_unflatten(leaves, spec))

    traced = make_fx(call, decomposition_table=dict(tables()[0]))(*(leaves[k] for k in places))
    return traced.graph
