"""A graph on the device: compiled at its first call, when its weights are known, and called with torch's tensors."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lapilli.backend.aot_graph import Prepared, Updates, prepare
from lapilli.backend.graph_program import GraphProgram, load
from lapilli.backend.options import Options
from lapilli.backend.placement import device_of, targets
from lapilli.backend.repeated_sizes import RepeatedSizes
from lapilli.backend.size_sources import Sources
from lapilli.backend.weights import Snapshot, are_tracked
from lapilli.compiler import NotWhole, Storage, compile_module, short_floats
from lapilli.eager import device_copy, storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.device_state import is_ours
from lapilli.eager.transfer import on_device
from lapilli.errors import CompileError, NoDeviceError, UnsupportedOperatorError
from lapilli.graph.memory import inverse
from lapilli.legalize.partition import TOO_LITTLE
from lapilli.runtime.notice import working
from lapilli.runtime.report import Report
from lapilli.target import plans_for

RENEWALS = 1
"""How often a graph is recompiled with changed weights; after that they are arguments of every call."""


_PARTS = 8
"""The number of parts in which values of dynamic size are bound, if one proves larger than the device can bind at once."""


@dataclass(frozen=True)
class Kind:
    """The kind of a graph.

    name: "inference", "forward" or "backward". weights: positions of the arguments that are parameters and buffers. saved:
    position of the first result that is saved for the backward graph. updates: see `Updates`. changed: positions of the
    arguments whose new values are the first results.
    """

    name: str
    weights: tuple[int, ...] = ()
    saved: int | None = None
    updates: Updates = field(default_factory=dict)
    changed: tuple[int, ...] = ()


class Beyond(Exception):
    """Sizes that a program was not compiled for."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes


class Executable:
    """The function that torch calls instead of a graph of AOTAutograd: it takes a list of arguments, which it empties, and
    returns a list.

    At inference, weights are constants of the program, and are preprocessed once. In training, and if they keep changing,
    they are arguments, with copies on the device that are updated whenever a weight has changed.

    A size without a bound gets one where an algorithm needs it; calls with larger sizes have a program of their own. most: the
    bounds of that one, by the names of the sizes.

    In training, sizes that repeat have a program of their own, too. sizes: those of that one, by name.
    """

    def __init__(
        self, gm: fx.GraphModule, kind: Kind, options: Options, most: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.options = kind, options
        self.report: Report | None = None
        self._gm, self._weights = gm, list(kind.weights)
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._snapshot: Snapshot | None = None
        self._compiled_in = kind.name == "inference"
        self._renewals = 0
        self._open_parts = 1
        self._most = most or {}
        self._larger: Executable | None = None
        self._fixed = sizes or {}
        repeats = kind.name != "inference" and not sizes  # at inference, each has weights of its own on the device
        self._repeated: RepeatedSizes[Executable] | None = RepeatedSizes(gm.graph) if repeats else None

    def __call__(self, args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        if self._repeated is not None and (exact := self._repeated.get(given, self._for_exactly)) is not None:
            return exact(given)
        run = self._run
        if run is None or (self._snapshot is not None and not self._snapshot.holds([given[k] for k in self._weights])):
            with self._lock:
                run = self._renewed(given)
        try:
            return run(given)
        except CannotRun as error:  # because of the values of this call
            return self._in_torch(error)(given)
        except Beyond as error:
            return self._for_larger(error.sizes)(given)
        except NoDeviceError:  # dynamic sizes, for which a value is larger than the device binds at once
            if self._open_parts > 1:
                raise
        with self._lock:
            if self._open_parts == 1:
                self._open_parts, self._run, self._snapshot = _PARTS, None, None
            run = self._renewed(given)
        return run(given)

    def _for_larger(self, sizes: Mapping[str, int]) -> Executable:
        """For calls with these sizes and somewhat larger ones."""
        with self._lock:
            if self._larger is None:
                most = {**self._most, **{name: 1 << n.bit_length() + 1 for name, n in sizes.items()}}
                self._larger = Executable(self._gm, self.kind, self.options, most)
            return self._larger

    def _for_exactly(self, sizes: Mapping[str, int]) -> Executable:
        return Executable(self._gm, self.kind, self.options, sizes=sizes)

    def _in_torch(self, error: Exception) -> _Run:
        """Runs the graph operator by operator, for a call that the program does not support."""
        if self.options.fallback == "error":
            raise ValueError(f"The graph cannot run on the device: {error}.") from error
        warnings.warn(f"a graph runs in torch: {error}", UserWarning, stacklevel=3)
        return _InTorch(self._gm)

    def _renewed(self, given: Sequence[Any]) -> _Run:
        """The program for the weights of a call."""
        weights = [given[k] for k in self._weights]
        if not are_tracked(weights):
            self._weights, weights = [], []
        if self._run is not None and self._compiled_in:
            self._renewals += 1
            if self._renewals > RENEWALS:
                self._compiled_in, self._run, self._snapshot = False, None, None
        if self._compiled_in or self._run is None:
            self._run = self._compiled(given, weights if self._compiled_in else [])
        if not self._compiled_in:
            self._weights = [k for k in self._weights if given[k].is_cpu and self._run.reads(k)]
            weights = [given[k] for k in self._weights]
            changed = range(len(weights)) if self._snapshot is None else self._snapshot.changed(weights)
            self._run = self._run.with_copies({self._weights[k]: weights[k] for k in changed})
        self._snapshot = Snapshot(weights, self._forget) if weights else None
        return self._run

    def _compiled(self, given: Sequence[Any], constants: Sequence[torch.Tensor]) -> _Run:
        index = device_of(given, self.options.device)
        try:
            with working(), torch.no_grad(), torch.inference_mode(False):
                sources = Sources([n for n in self._gm.graph.nodes if n.op == "placeholder"])
                known, sizes = dict(zip(self._weights, constants, strict=False)), list(sources.known)
                changed = self.kind.changed if self.kind.name == "inference" else ()
                program = None
                try:
                    prepared = prepare(
                        self._gm, known, self.kind.updates, changed=changed, most=self._most, sizes=self._fixed
                    )
                    if prepared.outputs or prepared.in_place:
                        program = _program(prepared, self.options, index, self._open_parts, sizes)
                except NotWhole:
                    prepared = prepare(self._gm, known, self.kind.updates, most=self._most, sizes=self._fixed)
                    program = _program(prepared, self.options, index, self._open_parts, sizes)
        except CompileError as error:
            if self.options.fallback == "error" or isinstance(error, UnsupportedOperatorError):
                raise
            warnings.warn(f"a graph runs in torch, for Lapilli cannot compile it: {error}", UserWarning, stacklevel=2)
            return _InTorch(self._gm)
        if program is not None:
            self.report = program.report
            _warn(self.report)
        return _Run(prepared, program, sources, index, self.kind)

    def _forget(self) -> None:
        """Called when the weights are gone: drops the program made from them."""
        self._run = None


class _Run:
    """A program, called with torch's tensors."""

    def __init__(
        self, prepared: Prepared, program: GraphProgram | None, sources: Sources, index: int, kind: Kind
    ) -> None:
        self._outputs, self._results, self._scalars = prepared.outputs, prepared.results, prepared.scalars
        self._program, self._index, self._kind = program, index, kind
        self._numbers = sources.function(prepared.numbers) if prepared.numbers else None
        self._inputs = [prepared.arguments[name] for name in program.inputs] if program is not None else []
        self._in_place = prepared.in_place
        self._sizes = program.sizes(sources, prepared.module.ranges) if program is not None else None
        self._most = list(zip(program.symbols, program.most, strict=True)) if program is not None else []
        self._copies: dict[int, torch.Tensor] = {}  # copies of weights, by position
        self._is_saved = [kind.saved is not None and k >= kind.saved for k in range(len(prepared.results))]
        self._to_host = [o.val.device.type == "cpu" for o in prepared.outputs]
        pairs = list(zip(prepared.results, self._is_saved, strict=True))
        self._times = Counter(
            (r.source, r.value) for r, is_saved in pairs if not is_saved and r.source in ("program", "given")
        )
        # Of results that are saved as well, changes must be seen: a tensor and its views have one version.
        saved, returned = (
            {r.value for r, s in pairs if s == which and r.source == "program"} for which in (True, False)
        )
        self._kept = {value for value in saved & returned if not self._to_host[value]}

    def reads(self, position: int) -> bool:
        """Whether the program reads an argument."""
        return any(a.position == position for a in self._inputs)

    def with_copies(self, weights: dict[int, torch.Tensor]) -> _Run:
        """The same program with new copies of these arguments on the device."""
        made = copy(self)
        made._copies = self._copies | {k: on_device(t, None, self._index) for k, t in weights.items()}
        return made

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            return self._call(given)

    def _call(self, given: Sequence[Any]) -> list[Any]:
        numbers = self._numbers(given) if self._numbers is not None else ()
        sizes = self._sizes(given) if self._sizes is not None else ()
        beyond = {name: n for n, (name, most) in zip(sizes, self._most, strict=True) if most is not None and n > most}
        if beyond:
            raise Beyond(beyond)
        if self._scalars is not None:
            given = [*given, *self._scalars(given)]
        made: list[torch.Tensor] = []
        placed: dict[int, torch.Tensor] = dict(self._copies)
        if self._program is not None:
            values: list[Any] = []
            for argument in self._inputs:
                value = placed.get(argument.position, given[argument.position])
                if isinstance(value, torch.Tensor):
                    value = on_device(value, argument.order, self._index)
                    if argument.order is None:
                        placed[argument.position] = value
                values.append(value)
            changed = []
            for position in self._in_place:
                target = given[position]
                if not device_copy.is_aligned(target):
                    target = placed[position] = target.clone()  # torch copies it back
                changed.append(target)
            made = self._program(sizes, values, changed)
        fresh: dict[int, torch.Tensor] = {}  # one tensor for each output, however often it is a result
        results: list[Any] = []
        for r, is_saved in zip(self._results, self._is_saved, strict=True):
            if r.source == "fixed":
                results.append(r.value)
                continue
            if r.source == "number":
                results.append(numbers[r.value])
                continue
            if r.source == "given":
                kept = is_saved and not any(view.is_absolute for view in r.views)  # copies have strides of their own
                copied = kept or r.value in self._in_place
                value = placed.get(r.value, given[r.value]) if copied else given[r.value]
                if r.to_host and not is_saved:
                    value = _to_host(value)
            elif is_saved and r.value not in self._kept:
                value = self._ordered(on_device(made[r.value], None, self._index), r.value)
            else:
                if r.value not in fresh:
                    whole = (
                        _to_host(made[r.value])
                        if self._to_host[r.value]
                        else on_device(made[r.value], None, self._index)
                    )
                    fresh[r.value] = _as_no_view(self._ordered(whole, r.value))
                value = fresh[r.value]
            for view in r.views:
                value = view(value, numbers)
            alone = self._times[r.source, r.value] == 1
            if r.source == "program" and alone and r.value not in self._kept and not is_saved:
                value = _as_no_view(value)
            elif r.views and not alone and self._kind.name == "backward":
                value = value.clone()  # a gradient: autograd adds to it in place
            results.append(value)
        return results

    def _ordered(self, value: torch.Tensor, output: int) -> torch.Tensor:
        order = self._outputs[output].order
        return value if order is None else value.permute(inverse(order))


def _as_no_view(value: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory: autograd forbids changing a view in place if a function with several results returned it.

    Call it once for each memory. Autograd keeps a gradient that nobody else holds, and adds to it in place.
    """
    if not value._is_view() or value.is_conj() or value.is_neg():
        return value
    fresh = torch.empty(0, dtype=value.dtype, device=value.device)
    return fresh.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


class _InTorch(_Run):
    """A graph that cannot be compiled, run operator by operator."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        arguments = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        self._from_host = [isinstance(val, torch.Tensor) and val.is_cpu for val in arguments]

    def reads(self, position: int) -> bool:
        return False

    def with_copies(self, weights: dict[int, torch.Tensor]) -> _Run:
        return self

    def _call(self, given: Sequence[Any]) -> list[Any]:
        # a value that another graph saved for this one may be on the device, although torch believes it is on the CPU; tokens of
        # effects, which are tensors in a graph, are None
        pairs = zip(given, self._from_host, strict=True)
        return list(self._gm(*(_to_host(x) if from_host else x for x, from_host in pairs)))


def _to_host(value: Any) -> Any:
    return storage.to_cpu(value) if isinstance(value, torch.Tensor) and is_ours(value) else value


def _program(prepared: Prepared, options: Options, index: int, open_parts: int, given: Collection[str]) -> GraphProgram:
    """The program for the given device; if the device proves to lack something the plan needs, one with all plans. given:
    names of the sizes that a call can determine.
    """
    kept = Storage(options.precision, options.precision)
    stored = short_floats(options.precision, prepared.module)
    best = [replace(t, open_parts=open_parts) for t in targets(bool(stored), index)]
    for chosen in (best, plans_for(stored)):
        data = compile_module(prepared.module, kept, chosen, options.fallback, given=given)
        try:
            return load(data, index)
        except NoDeviceError:
            if chosen is not best:
                raise
    raise AssertionError("the second attempt returns or raises")


_warned: set[str] = set()


def _warn(report: Report) -> None:
    """Warns about operators that run on the CPU, once for each."""
    new = {
        o.operator: o.reason for o in report.on_cpu if o.reason not in ("", TOO_LITTLE) and o.operator not in _warned
    }
    if new:
        _warned.update(new)
        reasons = "; ".join(f"{operator}: {reason}" for operator, reason in new.items())
        warnings.warn(
            f"operators run on the CPU in torch: {reasons}. lapilli.backend.reports() lists them; "
            'options={"fallback": "error"} refuses them.',
            UserWarning, stacklevel=2,
        )  # fmt: skip
