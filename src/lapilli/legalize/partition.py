"""Divides a module into segments for the GPU and operators for the CPU, with the script that calls them in order.

An operator runs on the GPU if its lowering accepts it. Segments for both alternate (`levels.py`). A GPU segment with little
work that is adjacent to CPU operators goes to the CPU, too: the transfer would cost more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from lapilli.errors import CompileError, UnsupportedOperatorError
from lapilli.graph.complex import COMPLEX_VIEWS
from lapilli.graph.module import Module
from lapilli.legalize.levels import Levels, cut, levels, segments
from lapilli.lower import READS_NUMBER, is_size, refusals
from lapilli.lower.torch_sizes import Symbols, solve, tree
from lapilli.runtime.arithmetic import NUMBERS
from lapilli.runtime.host_script import HostCall, HostScript
from lapilli.runtime.report import OperatorReport
from lapilli.runtime.sizes import Tree, names

_HIGHER_ORDER = {"cond": "cond", "while_loop": "while", "scan": "scan"}
TOO_LITTLE = "does too little between operators of the CPU to be worth a transfer"
CHEAP = 1 << 20
"""The least work of a GPU segment next to CPU operators that is worth a transfer: elements, or terms of matrix products."""


@dataclass
class Parts:
    """script: what a run does. segments: the modules of its "gpu" calls, by method number. rows: the rows of the report."""

    script: HostScript
    segments: list[Module]
    rows: list[OperatorReport]
    constants: list[tuple[HostScript, str, torch.Tensor]] = field(default_factory=list)  # read by operators on the CPU
    states: list[tuple[HostScript, str, torch.Tensor]] = field(default_factory=list)  # with their initial values


def partition(module: Module, optimize: Callable[[Module], None], fallback: str, given: Collection[str] = ()) -> Parts:
    """The parts of a module.

    optimize: passes for the branches of control flow. given: symbols whose values are given with every run. Raises
    UnsupportedOperatorError if fallback is "error" and an operator would run on the CPU.
    """
    parts = Parts(HostScript([], []), [], [])
    parts.script = _Partitioner(module, optimize, parts, "", given).script()
    on_cpu = [r for r in parts.rows if r.where == "cpu" and r.reason != TOO_LITTLE]
    if fallback == "error" and on_cpu:
        reasons = "; ".join(dict.fromkeys(f"{r.operator}: {r.reason}" for r in on_cpu))
        raise UnsupportedOperatorError(
            f"{len({r.operator for r in on_cpu})} operator(s) of this model cannot run on the GPU: {reasons}. "
            'Replace them in the model, or compile with fallback="cpu".'
        )
    return parts


class _Partitioner:
    def __init__(
        self, module: Module, optimize: Callable[[Module], None], parts: Parts, prefix: str, given: Collection[str] = ()
    ) -> None:
        self.module, self.optimize, self.parts, self.prefix = module, optimize, parts, prefix
        self.given = given
        self.refused = refusals(module)
        self.sizes = Symbols(module.ranges)
        self.levels: Levels = {}

    def script(self) -> HostScript:
        while True:
            self.levels = levels(self.module.graph, self.refused)
            if not self._give_up_cheap_segments():
                break
        graph = self.module.graph
        self.result = HostScript([n.name for n in graph.nodes if n.op == "placeholder" and self._is_given(n)], [])
        self._find_symbols()
        calls = [n for n in graph.nodes if n.op == "call_function"]
        for level in sorted({self.levels[n] for n in calls}):
            here = [n for n in calls if self.levels[n] == level]
            numbers = [n for n in here if is_size(n.meta.get("val"))]
            rest = [n for n in here if n not in numbers]
            if level % 2 == 0 and rest:
                self._gpu(rest)
            for n in here:
                if n in numbers:
                    self._number(n)
                elif level % 2:
                    self._host(n)
        self.result.outputs = [self._argument(o) for o in self.module.outputs]
        for node, state in self.module.states.items():
            self.result.states[node.name] = [state.name, -1, self._argument(state.new)]
            self.parts.states.append((self.result, node.name, state.value))
        return self.result

    def _is_given(self, placeholder: fx.Node) -> bool:
        known = placeholder in self.module.constants or placeholder in self.module.states
        return not known and isinstance(placeholder.meta["val"], torch.Tensor | torch.SymInt)

    # -- placement
    def _give_up_cheap_segments(self) -> bool:
        """Moves cheap segments to the CPU. Returns whether there was one."""
        nodes = [n for n in self.module.graph.nodes if n.op == "call_function" and not is_size(n.meta.get("val"))]
        on_cpu = {n for n in nodes if n in self.refused and isinstance(n.target, torch._ops.OpOverload)}
        on_cpu -= {n for n in on_cpu if n.target in COMPLEX_VIEWS}  # they are free on either side
        on_cpu |= {n for n in nodes if n.target is operator.getitem and n.args[0] in on_cpu}
        for _, segment in sorted(segments(self.module.graph, self.levels).items()):
            beside = any(u in on_cpu for n in segment for u in (*n.users, *n.all_input_nodes))
            own = any(str(n.target).startswith("lapilli.") for n in segment)  # files may not ask torch for them
            if beside and not own and sum(map(_work, segment)) < CHEAP:
                for n in segment:
                    self.refused[n] = TOO_LITTLE
                return True
        return False

    # -- the GPU
    def _gpu(self, nodes: list[fx.Node]) -> None:
        """Makes a segment a method."""
        made = cut(nodes, {*self.module.outputs, *(s.new for s in self.module.states.values() if s.new is not None)})
        known = self.module.constants
        constants = {place: known[a] for a, place in made.outside.items() if a in known}
        inputs = [a.name for a in made.outside if a not in known and not is_size(a.meta["val"])]
        for n in nodes:
            self._row(n, "gpu")
        segment = Module(made.graph, constants, list(made.results.values()), {}, {}, self.module.ranges)
        names_ = [n.name for n in made.results]
        call = HostCall("gpu", [{"v": name} for name in inputs], names_, method=len(self.parts.segments))
        self.parts.segments.append(segment)
        self.result.calls.append(call)

    # -- the host
    def _number(self, n: fx.Node) -> None:
        """Integers are computed from sizes on demand; numbers read from a tensor, and floats, are computed by calls."""
        if n.target in READS_NUMBER:
            self.result.calls.append(HostCall("item", [self._argument(n.args[0])], [n.name]))
        elif not isinstance(n.meta["val"], int | torch.SymInt) or isinstance(n.meta["val"], bool):
            name = getattr(n.target, "__name__", "").removeprefix("_sym_")
            if name not in NUMBERS:
                raise CompileError(f"{n.name}: {n.target} of numbers that vary between calls is not supported")
            self.result.calls.append(HostCall("number", [name, *map(self._argument, n.args)], [n.name]))

    def _host(self, n: fx.Node) -> None:
        target: Any = n.target
        if target is operator.getitem:
            source: Any = n.args[0]
            if not isinstance(source.target, torch._ops.HigherOrderOperator):
                made = f"{n.name}.cpu" if _is_wider(n, source) else n.name
                self.result.calls.append(HostCall("getitem", [self._argument(source), n.args[1]], [made]))
                if made != n.name:
                    kwargs = {"dtype": self._argument(n.meta["val"].dtype)}
                    self.result.calls.append(HostCall("aten._to_copy.default", [{"v": made}], [n.name], kwargs))
            return
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target.__name__ not in _HIGHER_ORDER:
                raise CompileError(f"torch.{target.__name__} is not supported; use torch.cond, while_loop or scan")
            self._row(n, "host", "control flow")
            self._control_flow(n)
            return
        if target is torch.ops.aten.view.default:  # an operator on the CPU may return other strides than traced
            target = torch.ops.aten.reshape.default
        name = ".".join((target._schema.name.replace("::", "."), target._overloadname or "default"))
        self._row(n, "cpu", self.refused[n])
        kwargs = {k: self._argument(v) for k, v in n.kwargs.items()}
        self.result.calls.append(HostCall(name, [self._argument(a) for a in n.args], [n.name], kwargs))

    def _control_flow(self, n: fx.Node) -> None:
        args: Any = n.args
        kind = _HIGHER_ORDER[n.target.__name__]  # type: ignore[union-attr]
        if kind == "cond":  # constant operands are constants in the branches
            graphs, given = args[1:3], list(args[3])
            operands = [args[0], [a for a in given if a not in self.module.constants]]
        elif kind == "while":
            graphs, operands = args[:2], [list(args[2]), list(args[3])]
            given = [*[None] * len(operands[0]), *operands[1]]
        else:
            graphs, operands = args[:1], [list(args[1]), list(args[2]), list(args[3])]
            given = [*[None] * (len(operands[0]) + len(operands[1])), *operands[2]]
        if kind != "cond":
            operands[-1] = [a for a in operands[-1] if a not in self.module.constants]
        scripts = [self._branch(g, given) for g in graphs]
        self.result.calls.append(HostCall(kind, [self._argument(a) for a in operands], _results(n), scripts=scripts))

    def _branch(self, attribute: fx.Node, given: list[Any]) -> HostScript:
        """The parts of a graph within control flow."""
        child = Module.of_branch(getattr(self.module.owner, str(attribute.target)), self.module.ranges)
        places = [p for p in child.graph.nodes if p.op == "placeholder"]
        for place, operand in zip(places, given, strict=True):
            if isinstance(operand, fx.Node) and operand in self.module.constants:
                child.constants[place] = self.module.constants[operand]
        self.optimize(child)
        prefix = f"{self.prefix}{attribute.target}."
        return _Partitioner(child, self.optimize, self.parts, prefix).script()

    # -- arguments
    def _argument(self, a: Any) -> Any:
        if isinstance(a, fx.Node):
            val = a.meta.get("val")
            if isinstance(val, torch.SymInt) and a.target not in READS_NUMBER:
                return {"size": self._tree(val.node.expr)}
            if a in self.module.constants:
                self._keep_constant(a)
            return {"v": a.name}
        if isinstance(a, list | tuple):
            return [self._argument(x) for x in a]
        if isinstance(a, torch.SymInt):
            return {"size": self._tree(a.node.expr)}
        for kind in ("dtype", "layout", "memory_format"):
            if isinstance(a, getattr(torch, kind)):
                return {kind: str(a).removeprefix("torch.")}
        if isinstance(a, torch.device):
            return {"device": "cpu"}
        if isinstance(a, complex):
            return {"complex": [a.real, a.imag]}
        if a is None or isinstance(a, bool | int | float | str):
            return a
        raise CompileError(f"an operator on the CPU has an argument of type {type(a).__name__}, which cannot be saved")

    def _keep_constant(self, node: fx.Node) -> None:
        if node.name not in self.result.constants:
            self.result.constants[node.name] = -1  # the index in the file is not known before it is written
            self.parts.constants.append((self.result, node.name, self.module.constants[node]))

    def _tree(self, e: Any) -> Tree:
        """One of torch's integer expressions as a tree."""
        try:
            made = tree(self.sizes.size(e))
        except TypeError as error:
            raise CompileError(str(error)) from error
        unknown = sorted(names(made) - self.result.symbols.keys())
        if unknown:
            raise CompileError(f"the size {unknown[0]} is not the size of any tensor of the model")
        return made

    def _find_symbols(self) -> None:
        """Finds where each size symbol that is not given can be read: from an input if possible, otherwise from the first
        value with it.
        """
        known = self.result.symbols
        known |= {name: ["given"] for name in sorted(self.given)}
        inputs: list[tuple[str, int, Any]] = []
        made: list[tuple[str, int, Any]] = []
        for n in self.module.graph.nodes:
            if n in self.module.constants:
                continue
            val = n.meta.get("val")
            if isinstance(val, torch.SymInt) and isinstance(val.node.expr, sympy.Symbol):
                plain = n.op == "placeholder" or n.target in READS_NUMBER
                if plain:
                    known.setdefault(val.node.expr.name, ["value", n.name])
            maker = n.args[0] if n.target is operator.getitem else n
            if isinstance(val, torch.Tensor) and (n.op == "placeholder" or maker in self.refused):
                sizes: Any = val.shape
                shown = inputs if n.op == "placeholder" else made
                shown += [(n.name, k, s.node.expr) for k, s in enumerate(sizes) if isinstance(s, torch.SymInt)]
        self._read_dims(inputs)
        for n, value in self.module.constants.items():  # torch.compile has symbols for the sizes of parameters, too
            sizes = n.meta["val"].shape
            for size, number in zip(sizes, value.shape, strict=True):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    known.setdefault(size.node.expr.name, ["fixed", number])
        self._solve_dims(inputs)
        self._read_dims(made)  # last: sizes are read from anything else if possible
        self._solve_dims(inputs + made)

    def _read_dims(self, shown: Sequence[tuple[str, int, Any]]) -> None:
        """Symbols that are sizes of values."""
        for name, axis, e in shown:
            if isinstance(e, sympy.Symbol):
                self.result.symbols.setdefault(e.name, ["dim", name, axis, 1, 0])

    def _solve_dims(self, shown: Sequence[tuple[str, int, Any]]) -> None:
        """Symbols within sums or products that are sizes of values, if all others in them are known."""
        known = self.result.symbols
        for size, (name, axis), *solved in solve([((name, axis), e) for name, axis, e in shown], known):
            known[size] = ["dim", name, axis, *map(self._tree, solved)]

    def _row(self, n: fx.Node, where: str, reason: str = "") -> None:
        if n.target is not operator.getitem:
            self.parts.rows.append(OperatorReport(self.prefix + n.name, str(n.target), where, reason))


def _is_wider(result: fx.Node, maker: fx.Node) -> bool:
    """Whether one of several results has more bits than all operands: the statistics of half-precision norms. They are
    float32 on GPUs, where the norm may have been traced, but half precision on the CPU.
    """
    val = result.meta["val"]
    given = [a.meta.get("val") for a in maker.all_input_nodes]
    floats = [v.dtype for v in given if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return val.dtype is torch.float32 and bool(floats) and all(t.itemsize < val.dtype.itemsize for t in floats)


def _results(n: fx.Node) -> list[str]:
    """Names for the results of control flow: those of the getitems that read them."""
    count = len(n.meta["val"])
    names = [f"{n.name}.{k}" for k in range(count)]
    for user in n.users:
        if user.target is operator.getitem:
            names[user.args[1]] = user.name  # type: ignore[index]
    return names


def _work(n: fx.Node) -> float:
    """The approximate number of elements that a node computes; a contraction counts its terms. Dynamic sizes count as their
    hint.
    """
    val = n.meta.get("val")
    results = [v for v in (val if isinstance(val, list | tuple) else [val]) if isinstance(v, torch.Tensor)]
    total = float(sum(_count(v.shape) for v in results))
    if any(word in str(n.target) for word in ("mm", "matmul", "linear", "conv", "attention", "lstm", "gru", "rnn")):
        weights: Iterable[torch.Tensor] = (
            a.meta["val"] for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)
        )
        total *= math.sqrt(max((_count(w.shape) for w in weights), default=1))
    return total


def _count(shape: Any) -> int:
    return math.prod(s if isinstance(s, int) else 64 for s in shape)
