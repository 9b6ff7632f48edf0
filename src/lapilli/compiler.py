"""The driver of the compiler: from a model to a program file."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from lapilli.capture import capture, dim_names, prepared
from lapilli.capture.examples import Arguments
from lapilli.capture.sources import Source
from lapilli.codegen.build import Builder, build
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.parts import largest, split_bindings
from lapilli.codegen.select import schedule_of, write_all
from lapilli.codegen.template import Kept, address
from lapilli.errors import CompileError, UnsupportedOperatorError
from lapilli.graph.channels_last import keep_channels_last
from lapilli.graph.integers import arithmetic
from lapilli.graph.module import Module
from lapilli.graph.shared_states import share_states
from lapilli.ir.dtype import DType
from lapilli.ir.integer import forget_divisions, product
from lapilli.ir.node import MOST_ELEMENTS, Constant, Graph, Input
from lapilli.legalize.partition import Parts, partition
from lapilli.legalize.passes import functional, optimize
from lapilli.lower import STORED, is_computed, lower
from lapilli.lower.registry import from_torch
from lapilli.program.writer import PlanSource, Writer
from lapilli.runtime import structure
from lapilli.runtime.description import SymbolSpec, TensorSpec
from lapilli.runtime.host_script import HostScript
from lapilli.runtime.interface import METADATA_KEY, Interface, dumps
from lapilli.runtime.notice import working
from lapilli.runtime.report import OperatorReport
from lapilli.schedule.layout import Layout, estimate
from lapilli.schedule.order import order
from lapilli.schedule.plan import Schedule, realize_graph
from lapilli.schedule.task import Task
from lapilli.target import ANY, KNOWN, METAL, TARGETS, Target, bound_in_parts, of_device, plans_for, plans_here
from lapilli.version import __version__

Progress = Callable[[str, int, int], None]
EachKernel = Callable[[str, str, bytes], None]
"""Takes the name, the Slang source and the SPIR-V of a kernel."""


def compile_to_bytes(
    model: Source | Mapping[str, Any],
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    dynamic_shapes: Any = None,
    target: str | None = None,
    fallback: str = "cpu",
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    weights: str | None = None,
    each_kernel: EachKernel | None = None,
) -> bytes:
    """The bytes of the program file; no device is needed. Arguments as for `lapilli.compile`; weights: as for `collected`;
    each_kernel: is called with what kernels are made of, in the order of the file."""
    metadata = checked_metadata(metadata)
    if progress is not None and not callable(progress):
        raise CompileError(f"progress is a {type(progress).__name__}: give a function of (stage, done, all)")
    with uncollected(), nullcontext() if progress else working():
        return collected(
            model, example_inputs, example_kwargs=example_kwargs, precision=precision, dynamic_shapes=dynamic_shapes, target=target,
            fallback=fallback, weights=weights,
        ).finish(metadata, progress, each_kernel)  # fmt: skip


def collected(
    model: Source | Mapping[str, Any],
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    dynamic_shapes: Any = None,
    target: str | None = None,
    fallback: str = "cpu",
    weights: str | None = None,
) -> ModelCompiler:
    """All methods of a model, lowered but without kernels. Arguments as for `lapilli.compile`; weights: how constants are stored,
    if it differs from `precision`, as `Storage` has it.
    """
    _check_target(precision, target)
    if fallback not in ("cpu", "error"):
        raise CompileError(f'fallback is {fallback!r}: choose "cpu" or "error"')
    if example_kwargs is not None:
        if not isinstance(example_kwargs, Mapping):
            raise CompileError(f"example_kwargs is a {type(example_kwargs).__name__}: give a dict of arguments by name")
        example_inputs = Arguments(tuple(example_inputs or ()), dict(example_kwargs))
    sources = {name: prepared(*source) for name, source in _methods(model, example_inputs, dynamic_shapes).items()}
    captured = {name: capture(*source) for name, source in sources.items()}
    modules = {name: functional(exported) for name, exported in captured.items()}
    share_states(modules)
    arrays: dict[Any, Any] = {}
    for module in modules.values():
        module.arrays = arrays  # a weight of two methods is one
    weights = weights or precision
    targets = _targets(precision, target, short_floats(weights, *modules.values()))
    compiler = ModelCompiler(Storage(precision, weights), targets, fallback)
    for name, module in modules.items():
        channels_last = keep_channels_last(module)
        optimize(module)
        exported = captured[name]
        nesting = _structure(exported, module, *channels_last)
        compiler.add(name, nesting, module, dim_names(exported, *sources[name]))
        compiler.examples[name] = tree_leaves(exported.example_inputs)
    return compiler


@dataclass(frozen=True)
class Storage:
    """How a program stores values.

    activations, weights (of two or more dimensions): "fp32" or "fp16"; weights also "fp16-exact" or "bf16-exact": as 16 bits those
    whose numbers they hold. layout: the order of activations in memory, "auto"
    (the cheapest), "contiguous" (row-major) or "channels-last" (for those with four dimensions).
    """

    activations: str = "fp32"
    weights: str = "fp32"
    layout: str = "auto"


class NotWhole(CompileError):
    """A graph that changes tensors in place has parts that run elsewhere."""


def compile_module(
    module: Module, storage: Storage, targets: Sequence[Target], fallback: str, given: Collection[str] | None = None
) -> bytes:
    """The bytes of a program whose method `forward` is a module after all passes.

    Its inputs have the names of placeholders: tensors, and sizes, unless a single method of the player computes everything;
    that is given symbols. given: symbols whose values are given with every run, along with the key of random numbers.
    Given states of the module are outputs after its own.

    Raises NotWhole if there are given states, and parts of the module run on the CPU.
    """
    compiler = ModelCompiler(storage, targets, fallback, given)
    with uncollected():
        method = compiler.lowered("forward", module, {})
        given_states = sum(state.given for state in module.states.values())
        if method is not None:
            flat = structure.Structure.flat(len(method.inputs), len(module.outputs) + given_states)
            compiler.add_whole("forward", flat, module, method)
        elif given_states:
            raise NotWhole("parts of this graph run on the CPU, so tensors that it changes are not changed in place")
        else:
            known = module.constants.keys() | module.states.keys()
            inputs = [n for n in module.graph.nodes if n.op == "placeholder" and n not in known]
            flat = structure.Structure.flat(len(inputs), len(module.outputs))
            compiler.add_parts("forward", flat, module, {})
        return compiler.finish({}, None)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables the garbage collector, which takes a third of compile time, because it scans all of torch's objects again
    and again while expressions are created. Also raises the recursion limit, for the deep expressions of long operator
    chains.
    """
    collecting, depth = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(depth, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        forget_divisions()  # or every collection from now on looks at them, those at the interpreter's end for seconds
        if collecting:
            gc.enable()


_DEEPEST = 50_000
"""The recursion limit: nested calls of Python."""


def _methods(model: Any, example_inputs: Any, dynamic_shapes: Any) -> dict[str, tuple[Any, ...]]:
    """Sources by method name, as arguments of `capture`."""
    if not isinstance(model, Mapping):
        return {"forward": (model, example_inputs, dynamic_shapes)}
    if example_inputs is not None or dynamic_shapes is not None or not model:
        raise CompileError(
            "a mapping gives every method its own inputs: "
            '{"prefill": (model, (ids,), dynamic_shapes), "decode": exported_program}'
        )
    return {name: source if isinstance(source, tuple) else (source,) for name, source in model.items()}


class ModelCompiler:
    """Collects methods: what the player runs for each, and their metadata."""

    def __init__(
        self, storage: Storage, targets: Sequence[Target], fallback: str, given: Collection[str] | None = None
    ) -> None:
        self.storage, self.targets, self.fallback = storage, targets, fallback
        self.given, self.keyed = given or (), given is not None
        self.interfaces: list[Interface] = []
        self.methods: list[PlayerMethod] = []
        self.split: list[Parts] = []  # methods with several segments
        self.examples: dict[str, list[Any]] = {}  # what methods are called with, flat, by their names

    def add(self, name: str, nesting: structure.Structure, module: Module, dims: Mapping[str, str]) -> None:
        """Adds a method. dims: names for size symbols."""
        whole = self.lowered(name, module, dims)
        takes_sizes = any(n.op == "placeholder" and isinstance(n.meta["val"], torch.SymInt) for n in module.graph.nodes)
        if whole is None or takes_sizes or whole.given:
            self.add_parts(name, nesting, module, dims)
        else:
            self.add_whole(name, nesting, module, whole)

    def lowered(self, name: str, module: Module, dims: Mapping[str, str]) -> PlayerMethod | None:
        """The module as a single method of the player; None if that is impossible."""
        if not all(isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor) for n in module.outputs):
            return None
        try:
            return self._player_method(name, module, dims)
        except (UnsupportedOperatorError, TypeError):
            return None  # the partitioner determines which operators, and why

    def add_whole(self, name: str, nesting: structure.Structure, module: Module, method: PlayerMethod) -> None:
        """Adds a method that is a single one of the player."""
        rows = tuple(
            OperatorReport(n.name, str(n.target), "gpu", arithmetic=arithmetic(n))
            for n in module.graph.nodes
            if is_computed(n)
        )
        self.interfaces.append(Interface(name, nesting, rows, len(self.methods)))
        self.methods.append(method)

    def add_parts(self, name: str, nesting: structure.Structure, module: Module, dims: Mapping[str, str]) -> None:
        """Adds a method with several segments."""
        parts = partition(module, optimize, self.fallback, self.given)
        first = len(self.methods)
        for k, segment in enumerate(parts.segments):
            self.methods.append(self._player_method(f"{name}.{k}", segment, dims))
        _finish_calls(parts.script, self.methods, first)
        self.split.append(parts)
        inputs, outputs = _specs(module, dims)
        self.interfaces.append(Interface(name, nesting, tuple(parts.rows), None, parts.script, inputs, outputs))

    def _player_method(self, name: str, module: Module, dims: Mapping[str, str]) -> PlayerMethod:
        kept = self.storage
        halves = {t.half for t in self.targets}
        graphs = {
            half: lower(
                module, kept.activations, half, self.keyed, kept.weights, checked=True, from_host=not self.keyed
            )
            for half in halves
        }
        return PlayerMethod(name, graphs, dims)

    def finish(
        self, metadata: dict[str, str], progress: Progress | None, each_kernel: EachKernel | None = None
    ) -> bytes:
        writer = Writer()
        written = self.methods or [PlayerMethod("nothing", {half: Graph([], [], {}) for half in (False, True)})]
        schedules = _write(writer, written, self.targets, progress, self.storage.layout)
        for parts in self.split:
            for script, name, tensor in parts.constants:
                script.constants[name] = _keep(writer, name, tensor)
            for script, name, tensor in parts.states:
                if script.states[name][0] not in writer.states:
                    script.states[name][1] = _keep(writer, name, tensor)
            writer.host_operators += [o for o in parts.script.operators() if o not in writer.host_operators]
        if each_kernel is not None:
            for name, source, code in writer.code():
                each_kernel(name, source, code)
        metadata[METADATA_KEY] = dumps(self.interfaces)
        metadata["lapilli.schedule"] = _decisions(schedules[0])
        return writer.bytes(f"lapilli {__version__}", metadata)


@dataclass(frozen=True)
class PlayerMethod:
    """A method of the player: its graphs, by whether intermediates are stored in half precision."""

    name: str
    graphs: Mapping[bool, Graph]
    dims: Mapping[str, str] = field(default_factory=dict)  # names for size symbols

    @property
    def inputs(self) -> list[Input]:
        """The inputs, which are the same in every graph."""
        return next(iter(self.graphs.values())).inputs

    @property
    def given(self) -> list[str]:
        """Symbols that no input shows, which are the same in every graph."""
        return next(iter(self.graphs.values())).given


def _write(
    writer: Writer,
    methods: Sequence[PlayerMethod],
    targets: Sequence[Target],
    progress: Progress | None = None,
    layout: str = "auto",
) -> list[list[Schedule]]:
    """Writes methods. Returns the schedules of each, one per plan."""
    targets = [t for t in targets if _has_use_for(t, methods, targets)]
    done: dict[int, list[Planned]] = {}
    shared = {half: _shared(methods, half) for half in {t.half for t in targets}}
    kept = {t.name: Kept(shared=shared[t.half]) for t in targets}
    with Builder() as builder:  # kernels are compiled while the next plan is scheduled
        # The smallest inputs first: kernels for few rows read weights unpacked, and kernels for many rows can do so, too.
        for k, method in sorted(enumerate(methods), key=lambda item: _size(item[1])):
            realized = {half: realize_graph(graph, half) for half, graph in method.graphs.items()}
            done[k] = []
            for t in targets:
                if _is_there(t, done[k]):
                    continue
                schedule = schedule_of(realized[t.half], t, layout, kept[t.name])
                planned = kernels_of(schedule)
                builder.add(source for p in planned for source in p.sources())
                kept[t.name].add(r for task in schedule.order.run for r in task.reads())
                done[k] += planned
        codes = builder.finish(
            None if progress is None else lambda made, total: progress("kernels", made, total),
        )
    made = [done[k] for k in range(len(methods))]
    for method, plans in zip(methods, made, strict=True):
        writer.method(method.name, plans[0].schedule.graph, [p.plan for p in plans], codes, method.dims)
    return [[p.schedule for p in plans] for plans in made]


def _shared(methods: Sequence[PlayerMethod], half: bool) -> frozenset[int]:
    """The addresses of constants that several methods read. half: of which of their graphs."""
    if len(methods) == 1:
        return frozenset()
    read = ({address(n) for n in m.graphs[half].nodes() if isinstance(n, Constant)} for m in methods)
    return frozenset(place for place, count in Counter(chain.from_iterable(read)).items() if count > 1)


def _is_there(target: Target, planned: Sequence[Planned]) -> bool:
    """Whether a method needs no plan with few bindings: the kernels of the same plan without that limit bind no more."""
    for p in planned:
        own = p.schedule.target
        if own.bindings > target.bindings and replace(own, name=target.name, bindings=target.bindings) == target:
            return all(len(w.bindings) <= target.bindings for written in p.kernels.values() for w in written.every)
    return False


def _size(method: PlayerMethod) -> int:
    """How much a method is given."""
    return sum(estimate(product(x.shape)) for x in method.inputs)


def _has_use_for(target: Target, methods: Sequence[PlayerMethod], targets: Sequence[Target]) -> bool:
    """Whether a plan can differ from the next one: some are for codes alone."""
    is_another = target.without_codes != target.name and len(targets) > 1
    return not is_another or any(n.dtype is DType.code for m in methods for n in m.graphs[target.half].nodes())


@dataclass(frozen=True)
class Planned:
    """A schedule with its kernels. largest: the size in bytes of the largest value that a second plan binds in parts."""

    schedule: Schedule
    kernels: Mapping[int, KernelSource]
    largest: int = 0

    def sources(self) -> Iterator[str]:
        """Of all kernels, in Slang."""
        return (w.source for written in self.kernels.values() for w in written.every)

    @property
    def plan(self) -> PlanSource:
        s = self.schedule
        return PlanSource(
            s.target, s.order, self.kernels, s.graph.written, s.stored, s.windows, self.largest, s.rounded
        )


def kernels_of(s: Schedule) -> list[Planned]:
    """The kernels of a schedule. If values may be larger than every device can bind at once, a second plan binds them in
    parts, for devices that cannot bind them whole: selecting a part takes time.
    """
    for node in (*s.graph.inputs, *(t.out for t in s.tasks)):
        count = product(node.shape).value or 0
        if count > MOST_ELEMENTS:
            raise CompileError(
                f"{node.name} has {count} elements, and kernels count up to {MOST_ELEMENTS}: use smaller inputs, or split it"
            )
    kernels, parts = write_all(s), bound_in_parts(s.target)
    most = max((largest(w, s.memory) for w in kernels.values()), default=0)
    if s.target.storage or most <= parts.storage:
        return [Planned(s, kernels)]
    split = {i: split_bindings(w, s.memory, parts) for i, w in kernels.items()}
    return [Planned(s, kernels, most), Planned(replace(s, target=parts), split)]


def assemble(module: Module, precision: str, targets: Sequence[Target]) -> tuple[bytes, list[Schedule]]:
    """The program file of a prepared module without metadata, and the schedules of its plans."""
    return _assemble(
        {half: lower(module, precision, half, from_host=True) for half in {t.half for t in targets}}, targets
    )


def assemble_graph(graph: Graph, target: Target) -> tuple[bytes, Schedule]:
    """The program file of a graph for one target, without metadata, and its schedule."""
    data, (made, *_) = _assemble({target.half: graph}, [target])
    return data, made


def assemble_tasks(graph: Graph, tasks: Sequence[Task], target: Target) -> bytes:
    """The program file of hand-made tasks on row-major values, for one target."""
    layouts = {n.id: Layout.of(n.shape, range(n.rank)) for n in (*graph.inputs, *graph.outputs)}
    made = Schedule(target, graph, list(tasks), layouts, {}, order(tasks, graph.outputs, {}, {}), {}, {})
    kernels = write_all(made)
    writer = Writer()
    codes = build(Planned(made, kernels).sources())
    writer.method("forward", graph, [PlanSource(target, made.order, kernels, graph.outputs)], codes)
    return writer.bytes(f"lapilli {__version__}", {})


def assemble_planned(planned: Sequence[Planned], dims: Mapping[str, str]) -> bytes:
    """The program file of a schedule with its kernels, without metadata. dims: names for size symbols."""
    codes = build(source for p in planned for source in p.sources())
    writer = Writer()
    writer.method("forward", planned[0].schedule.graph, [p.plan for p in planned], codes, dims)
    return writer.bytes(f"lapilli {__version__}", {})


def _assemble(graphs: Mapping[bool, Graph], targets: Sequence[Target]) -> tuple[bytes, list[Schedule]]:
    writer = Writer()
    (schedules,) = _write(writer, [PlayerMethod("forward", graphs)], targets)
    return writer.bytes(f"lapilli {__version__}", {}), schedules


def _keep(writer: Writer, name: str, tensor: torch.Tensor) -> int:
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return writer.array(name, from_torch(tensor.dtype), bits.detach().contiguous().numpy())


def _finish_calls(script: HostScript, methods: Sequence[PlayerMethod], first: int) -> None:
    """Fills in the numbers of methods in the file, and the sizes that methods are given."""
    for call in script.calls:
        for inner in call.scripts:
            _finish_calls(inner, methods, first)
        if call.op == "gpu":
            call.method += first
            call.args += [{"size": name} for name in methods[call.method].given]


def _specs(module: Module, dims: Mapping[str, str]) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and outputs of a method with a script."""
    known = module.constants.keys() | module.states.keys()
    given = [n for n in module.graph.nodes if n.op == "placeholder" and n not in known]
    inputs = [n for n in given if isinstance(n.meta["val"], torch.Tensor | torch.SymInt)]
    symbols: dict[str, SymbolSpec] = {}
    for k, n in enumerate(inputs):
        for axis, size in enumerate(n.meta["val"].shape if isinstance(n.meta["val"], torch.Tensor) else ()):
            bounds = module.ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if bounds is not None and str(size) not in symbols:
                upper = int(bounds.upper) if bounds.upper.is_Integer else None
                symbols[str(size)] = SymbolSpec(dims.get(str(size), str(size)), int(bounds.lower), upper, k, axis)

    def spec(n: Any) -> TensorSpec:
        val = n.meta["val"]
        if not isinstance(val, torch.Tensor):
            kind = "float" if isinstance(val, torch.SymFloat) else "bool" if isinstance(val, torch.SymBool) else "int"
            return TensorSpec(n.name, kind, ())
        shape = tuple(s if isinstance(s, int) else dims.get(str(s), str(s)) for s in val.shape)
        return TensorSpec(n.name, str(val.dtype).removeprefix("torch."), shape, tuple(symbols.values()))

    return tuple(map(spec, inputs)), tuple(map(spec, module.outputs))


_SHORT = [d for d in DType if d.is_short_float]


def _check_target(precision: str, target: str | None) -> None:
    """Before anything takes time. Which plans there are depends on the model too."""
    if precision not in ("fp32", "fp16"):
        raise CompileError(f'precision is {precision!r}: choose "fp32" or "fp16"')
    if target is not None and target not in KNOWN and target not in _plans(precision, _SHORT):
        raise _wrong_target(precision, target, ())


def short_floats(weights: str, *modules: Module) -> set[DType]:
    """The 16-bit floats that programs of these modules store: their own, and what constants are stored as."""
    short, _ = STORED[weights]
    rounded = set() if short is None else {from_torch(short)}
    return rounded | {from_torch(dtype) for m in modules for dtype in m.short_floats()}


def _plans(precision: str, stored: Collection[DType]) -> dict[str, Target]:
    """The plans that a caller may name. A model that is in half precision itself may have those of other models too. stored:
    16-bit floats that it stores.
    """
    plans = plans_for(stored) + (plans_for(()) if precision == "fp32" else [])
    return {t.name: t for t in plans}


def _targets(precision: str, target: str | None, stored: Collection[DType]) -> list[Target]:
    if target is None:
        return plans_here(stored)
    if target == METAL:  # the other is for GPUs without halves, and what the first-run check compares with
        return [of_device(KNOWN[METAL], half=bool(stored), matrix=False), ANY]
    if target in KNOWN:
        return [of_device(KNOWN[target], half=bool(stored), matrix=True)]
    if target not in _plans(precision, stored):
        raise _wrong_target(precision, target, stored)
    return [TARGETS[target]]


def _wrong_target(precision: str, target: str, stored: Collection[DType]) -> CompileError:
    names = ", ".join(_plans(precision, stored))
    return CompileError(
        f"target is {target!r}: with precision {precision!r} choose None (all), one of the plans {names}, or one of the "
        f"devices {', '.join(KNOWN)}"
    )


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A caller's metadata. Raises CompileError if it is none."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise CompileError(f"metadata is a {type(metadata).__name__}: give a dict that maps strings to strings")
    result = dict(metadata or {})
    for key, value in result.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CompileError(
                f"metadata must map strings to strings; {key!r} is a {type(value).__name__} (use json.dumps)"
            )
        if key.startswith("lapilli."):
            raise CompileError(f"metadata key {key!r}: names that begin with 'lapilli.' are reserved")
    return result


def _structure(
    exported: ExportedProgram, module: Module, inputs_last: tuple[int, ...], outputs_last: tuple[int, ...]
) -> structure.Structure:
    """How inputs and outputs nest. inputs_last, outputs_last: those in channels-last format."""
    call = exported.call_spec
    inputs = structure.from_torch(call.in_spec, module.fixed_inputs)
    outputs = structure.from_torch(call.out_spec, module.fixed_outputs)
    signature = exported.module_call_graph[0].signature
    given = (signature.forward_arg_names or []) if signature is not None else []
    names = tuple(given[: len(inputs.children[0].children)])
    return structure.Structure(inputs, outputs, names, tuple(module.updates), inputs_last, outputs_last)


def _decisions(schedules: list[Schedule]) -> str:
    """The reason why each value of a plan was realized, in the order of its commands, for `lapilli inspect`."""
    reasons = {
        s.target.name: {"load": [t.reason for t in s.order.load], "run": [t.reason for t in s.order.run]}
        for s in schedules
    }
    return json.dumps(reasons, separators=(",", ":"))
