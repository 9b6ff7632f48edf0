"""A graph on the device: compiled at its first call, when its weights are known, and called with torch's tensors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from lapilli.backend.device import targets
from lapilli.backend.graph import Argument, Output, Prepared, inverse, prepare
from lapilli.backend.options import Options
from lapilli.backend.sizes import Sources
from lapilli.backend.weights import Snapshot, are_tracked
from lapilli.compiler import Storage, compile_module
from lapilli.errors import NoDeviceError
from lapilli.lower.random import STATE
from lapilli.runtime.program import Program
from lapilli.runtime.report import Report
from lapilli.schedule.target import plans_for

RENEWALS = 1
"""How often changed weights are compiled in anew; after that they are arguments of every call."""


class Executable:
    """What torch calls instead of a graph of AOTAutograd: takes a list of arguments, which it empties, gives a list."""

    def __init__(self, gm: fx.GraphModule, kind: str, static: Sequence[int], options: Options) -> None:
        """kind: "inference", "forward" or "backward"; static: positions of arguments that are weights, to be compiled in."""
        self.kind, self.options = kind, options
        self._gm, self._static = gm, list(static)
        self._lock = threading.Lock()
        self._run: Callable[[Sequence[Any]], list[Any]] | None = None
        self._snapshot: Snapshot | None = None
        self._renewals = 0
        self.report: Report | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        run = self._run
        if run is None or (self._snapshot is not None and not self._snapshot.holds([given[k] for k in self._static])):
            with self._lock:
                run = self._run = self._compiled(given)
        return run(given)

    def _compiled(self, given: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        if self._run is not None:
            self._renewals += 1
        weights = [given[k] for k in self._static]
        if self._renewals > RENEWALS or not are_tracked(weights):
            self._static, weights = [], []
        self._snapshot = Snapshot(weights, self._forget) if weights else None
        with torch.no_grad():
            prepared = prepare(self._gm, dict(zip(self._static, weights, strict=True)))
            program = _program(prepared, self.options) if prepared.outputs else None
        if program is not None:
            self.report = program.report()
            _warn(self.report)
        sources = Sources([n for n in self._gm.graph.nodes if n.op == "placeholder"])
        return _Run(prepared, program, sources)

    def _forget(self) -> None:
        """The weights are gone, and so is what they were compiled into."""
        self._run = None


class _Run:
    """A program with torch's tensors around it."""

    def __init__(self, prepared: Prepared, program: Program | None, sources: Sources) -> None:
        self._outputs, self._results, self._scalars, self._program = (
            prepared.outputs, prepared.results, prepared.scalars, program
        )  # fmt: skip
        self._numbers = sources.function(prepared.numbers) if prepared.numbers else None
        self._inputs: list[Argument | int] = []  # of the program: arguments, and sizes by their number
        sizes: list[sympy.Symbol] = []
        symbols = {s.name: s for s in prepared.module.ranges if isinstance(s, sympy.Symbol)}
        for spec in program.inputs if program is not None else ():
            if spec.name in prepared.arguments:
                self._inputs.append(prepared.arguments[spec.name])
            else:
                self._inputs.append(len(sizes))
                sizes.append(symbols[spec.name])
        self._sizes = sources.function(sizes) if sizes else None
        self._random = program is not None and any(s.name == STATE for s in program.description.states)

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        numbers = self._numbers(given) if self._numbers is not None else ()
        carriers = [torch.empty((n, 0), dtype=torch.uint8) for n in self._sizes(given)] if self._sizes is not None else []
        if self._scalars is not None:
            given = [*given, *self._scalars(given)]
        made: list[Any] = []
        if self._program is not None:
            if self._random:
                key = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32)
                self._program.set_state({STATE: key})
            values = [carriers[i] if isinstance(i, int) else _value(given[i.position], i) for i in self._inputs]
            outputs = self._program.methods["forward"].run_tensors(values)
            made = [_tensor(v, o) for v, o in zip(outputs, self._outputs, strict=True)]
        results: list[Any] = []
        for r in self._results:
            if r.source == "fixed":
                results.append(r.value)
                continue
            value = {"program": made, "given": given, "number": numbers}[r.source][r.value]
            for view in r.views:
                value = view(value)
            results.append(value)
        return results


def _value(value: Any, argument: Argument) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value if argument.order is None else value.permute(argument.order)


def _tensor(value: torch.Tensor, output: Output) -> torch.Tensor:
    if not value.numel():
        return value.new_empty_strided(value.shape, torch.empty(value.shape, device="meta").stride())
    return value if output.order is None else value.permute(inverse(output.order))


def _program(prepared: Prepared, options: Options) -> Program:
    """For the device at hand; where that turns out to lack what the plan needs, with all plans."""
    made = targets(options.precision, options.device)
    storage = Storage(options.precision, options.precision)
    for chosen in (made, plans_for(options.precision)):
        data = compile_module(prepared.module, storage, chosen, options.fallback)
        try:
            return Program._from_bytes(data, options.device)
        except NoDeviceError:
            if chosen is not made:
                raise
    raise AssertionError("the second attempt returns or raises")


_warned: set[str] = set()


def _warn(report: Report) -> None:
    """Says once of every operator that it runs on the CPU."""
    new = {o.operator: o.reason for o in report.on_cpu if o.reason and o.operator not in _warned}
    if new:
        _warned.update(new)
        reasons = "; ".join(f"{operator}: {reason}" for operator, reason in new.items())
        warnings.warn(
            f"operators run on the CPU in torch: {reasons}. lapilli.backend.reports() lists them; "
            'options={"fallback": "error"} refuses them.',
            UserWarning, stacklevel=2,
        )  # fmt: skip
