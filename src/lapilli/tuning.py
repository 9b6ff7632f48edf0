"""Choice by measuring: the candidates of every contraction of a model are compiled, checked and timed on the device, in the running
model.

All contractions advance at once: program number j is the model with the j-th candidate of each of its questions
(`target/records.py`), so that there are as many programs as a question has candidates at most, not as many as there are
candidates. Each is timed beside the model as cost models decide it, run by run in turn, so that what else the machine does slows
both; what counts is the ratio. Ratios are stored as they are found, and a later session goes on from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lapilli.codegen.build import build
from lapilli.codegen.select import schedule_of
from lapilli.codegen.template import Asked
from lapilli.compiler import (
    ModelCompiler,
    Planned,
    PlayerMethod,
    assemble_planned,
    checked_metadata,
    collected,
    kernels_of,
    uncollected,
)
from lapilli.errors import CompileError, DeviceLostError, LapilliError
from lapilli.ir.dtype import DType
from lapilli.ir.integer import Atom, Symbol
from lapilli.ir.node import Graph, Input, Map, Reduce, reading
from lapilli.player import NativeProgram
from lapilli.runtime.devices import Device, device_named
from lapilli.schedule.copies import Packed
from lapilli.schedule.order import commands
from lapilli.schedule.plan import Schedule, realize_graph
from lapilli.schedule.task import Task
from lapilli.target import Target, taken_by, with_records
from lapilli.target.records import KernelRecord, Key, Question, Records
from lapilli.target.tuned import own, records_of, save
from lapilli.verification import CheckedRun, difference

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]

_ROUNDS, _MOST_ROUNDS, _ENOUGH = 8, 40, 0.5
"""Rounds at least and at most, and the seconds after which there are enough. Of all rounds the least time counts, of each kernel
for itself, because other work only adds to it."""
_CONFIRMING = 3
"""Times as many rounds for what won: of many candidates, one wins by chance."""
_USUAL = 64
"""Of sizes that no example shows."""
_ROUNDING = {DType.float32: 2e-5, DType.float16: 4e-3, DType.bfloat16: 3.2e-2}
"""Differences of results that are rounding, in the norm, by the least type in which values may be stored: two candidates add up
the same terms in another order (float32: 4e-6 for 4096 terms, 1e-6 by Winograd's algorithm), or round a half (2^-11) or a
bfloat16 (2^-8) the other way."""
_TOGETHER = 4
"""Programs whose kernels are compiled together, so that many processors have work."""
_GROWS, _MOST = 8, 0.05
"""By which factor differences that came before may grow from one contraction to the next, and what is never rounding."""


@dataclass(frozen=True)
class Choice:
    """What was decided of the contractions with one question.

    Attributes:
        title: operator and sizes.
        count: contractions of the model with this question.
        default: the candidate that cost models prefer. us: microseconds that all of these contractions take with it.
        best: what won. ratio: its time, in that of the default.
        tried: candidates that were timed; of: that there are.
    """

    title: str
    count: int
    default: str
    us: float
    best: str
    ratio: float
    tried: int
    of: int


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not compute what the others do. why: the difference, or the compiler's message."""

    title: str
    candidate: str
    why: str


@dataclass(frozen=True)
class Tuned:
    """What a session found.

    Attributes:
        device, plan: what was measured.
        before, after: seconds of a run of all methods on the device, as cost models decide, and with what won.
        choices: by the time that they take, the longest first.
        rejected: candidates with wrong results.
        finished: False if there was no time for some candidates; a later session goes on.
    """

    device: Device
    plan: str
    before: float
    after: float
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    finished: bool


def tune(
    model: Any,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    dynamic_shapes: Any = None,
    fallback: str = "cpu",
    metadata: Mapping[str, str] | None = None,
    device: str | int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> tuple[bytes, Tuned]:
    """Compiles a model with kernels that were measured on a device, and stores what won in the user's cache.

    Args:
        model, example_inputs, example_kwargs, precision, dynamic_shapes, fallback, metadata: as for `lapilli.compile`. A model of
            open sizes is measured at those of its examples.
        device: as for `lapilli.load`.
        seconds: for measuring; None: as many as it takes. The one program that is measured then is finished.
        progress: called with (stage, done, all).

    Returns:
        the bytes of the program, with plans for every kind of device as by `compile`, and what was found.

    Raises:
        CompileError: the model cannot be compiled.
        NoDriverError, NoDeviceError: there is no such device.
    """
    given = checked_metadata(metadata)
    with uncollected():
        compiler, found = measured(
            model, example_inputs, example_kwargs=example_kwargs, precision=precision, dynamic_shapes=dynamic_shapes,
            fallback=fallback, device=device, seconds=seconds, progress=progress,
        )  # fmt: skip
        return compiler.finish(given, progress), found


def measured(
    model: Any,
    example_inputs: Any = None,
    *,
    device: str | int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[ModelCompiler, Tuned]:
    """A model before its kernels are compiled, with targets that know what was found. Arguments as for `tune`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    taken = device_named(device)
    compiler = collected(model, example_inputs, **options)
    target = _plan(compiler, taken)
    sessions = []
    for method in compiler.methods:
        if target is not None and not method.given:
            session = _Session(method, target, taken, compiler, deadline, progress or _silent)
            session.run()
            sessions.append(session)
    compiler.targets = with_records(compiler.targets, taken, records_of(taken))
    choices = sorted((c for s in sessions for c in s.choices()), key=lambda c: -c.us)
    return compiler, Tuned(
        taken, target.name if target is not None else "", sum(s.before for s in sessions), sum(s.after for s in sessions),
        tuple(choices), tuple(r for s in sessions for r in s.rejected), all(s.finished for s in sessions),
    )  # fmt: skip


def _silent(stage: str, done: int, all: int) -> None:
    pass


def _plan(compiler: ModelCompiler, device: Device) -> Target | None:
    """The plan that a device takes of a program for any, as cost models decide it; None for a program with a plan of its own."""
    found = taken_by(device, compiler.targets) if len(compiler.targets) > 1 else None
    return None if found is None else replace(found, records=Records())


@dataclass
class _Entry:
    """A question of the model, its candidates in the order of the cost model, and what is known of them."""

    question: Question
    names: tuple[str, ...]
    record: KernelRecord
    count: int = 0

    def left(self) -> list[str]:
        return [n for n in self.names[1:] if n not in self.record.times and n not in self.record.wrong]


@dataclass
class _Made:
    """A program of the model, loaded."""

    schedule: Schedule
    native: NativeProgram
    run: CheckedRun


class _Session:
    """The measurements of one method."""

    def __init__(
        self,
        method: PlayerMethod,
        target: Target,
        device: Device,
        compiler: ModelCompiler,
        deadline: float | None,
        progress: Progress,
    ) -> None:
        self.method, self.target, self.device, self.deadline, self.progress = method, target, device, deadline, progress
        self.layout = compiler.storage.layout
        self.graph = realize_graph(method.graphs[target.half], target.half)
        self.arrays = _inputs(self.graph[0], compiler.examples.get(method.name, []))
        self.entries: dict[Key, _Entry] = {}
        self.keys: dict[int, Key] = {}  # by what a task computes, or its reduction
        self.rejected: list[Rejected] = []
        self.before = self.after = 0.0
        self.finished = True

    def run(self) -> None:
        asked: list[Asked] = []
        schedule = schedule_of(self.graph, self.target, self.layout, asked=asked)
        known = own(self.device)
        for a in asked:
            key = a.question.key
            found = known.get(a.question)
            if found is None or found.default != a.names[0]:  # measured beside another one: by an earlier version
                found = KernelRecord.of(a.question, a.names[0], 1.0, {})
            entry = self.entries.setdefault(key, _Entry(a.question, a.names, found))
            entry.count += 1
            self.keys |= dict.fromkeys(a.computed, key)
        with self._loaded(kernels_of(schedule)) as base:
            self.base = base
            self._read: dict[int, Array] = {}
            self.outputs = base.native.run(self.arrays)
            self._first()
            self._try_all()
            self._confirm()

    # -- what is measured
    def _first(self) -> None:
        """The times of what cost models decide."""
        times, self.before = self._times(self.base)
        self.after = self.before
        of_graph = {t.out.id for t in self.base.schedule.order.run if isinstance(t.out, Map | Reduce)}
        of_graph -= {t.out.id for t in self.base.schedule.order.run if isinstance(t.out, Packed)}
        spent = self._shared_out(self.base, times, of_graph)
        self.entries = {key: e for key, e in self.entries.items() if spent.get(key)}  # others' work a kernel took over
        for key, entry in self.entries.items():
            entry.record = replace(entry.record, us=spent[key] / 1e3)

    def _try_all(self) -> None:
        total = sum(len(e.left()) for e in self.entries.values())
        done = 0
        while any(e.left() for e in self.entries.values()):
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.finished = False
                return
            self.progress("measuring", done, total)
            left = {key: e.left() for key, e in self.entries.items()}
            batch = [{key: names[k] for key, names in left.items() if k < len(names)} for k in range(_TOGETHER)]
            planned = [self._planned(tried) for tried in batch if tried]
            with suppress(CompileError):  # which one it is, is found out below
                build(source for plans in planned for p in plans for source in p.sources())
            for tried, plans in zip(batch, planned, strict=False):
                if self.deadline is not None and time.monotonic() > self.deadline:
                    break
                self._try(tried, plans)
                done += len(tried)
                self.progress("measuring", done, total)
                save(self.device, [e.record for e in self.entries.values()])

    def _try(self, tried: dict[Key, str], plans: Sequence[Planned] | None = None) -> None:
        """Times candidates of different questions in one program. Those whose results are wrong are taken out one by one. plans:
        the program, if its kernels are written already."""
        try:
            while tried:
                with self._loaded(plans or self._planned(tried)) as made:
                    wrong = self._first_wrong(made, tried)
                    if wrong is None:
                        ratios = self._ratios(made, 1)[0]
                        for key, name in tried.items():
                            self._note(key, name, ratios.get(key, 1.0))
                        return
                plans, (key, error) = None, wrong
                self._reject(key, tried.pop(key), f"differs from the reference by {error:.2g} of its norm")
        except DeviceLostError:
            raise
        except LapilliError as error:
            if len(tried) == 1:
                key, name = next(iter(tried.items()))
                self._reject(key, name, str(error))
                return
            half = len(tried) // 2  # which one is it?
            for part in (list(tried.items())[:half], list(tried.items())[half:]):
                self._try(dict(part))

    def _confirm(self) -> None:
        """What won runs again, all at once and longer. What wins by this, too, is what counts."""
        confirmed: dict[Key, str] = {}
        for _ in range(_CONFIRMING):
            won = {key: e.record.best for key, e in self.entries.items() if e.record.best != e.record.default}
            if all(confirmed.get(key) == name for key, name in won.items()):
                break
            self.progress("confirming", 0, 1)
            with self._loaded(self._planned(won)) as made:
                wrong = self._first_wrong(made, won)
                if wrong is not None:
                    self._reject(wrong[0], won[wrong[0]], f"differs from the reference by {wrong[1]:.2g} of its norm")
                    continue
                ratios, self.before, self.after = self._ratios(made, _CONFIRMING)
            for key in won:
                self._note(key, won[key], ratios.get(key, 1.0))
            confirmed |= won
        if not any(e.record.best != e.record.default for e in self.entries.values()):
            self.after = self.before
        save(self.device, [e.record for e in self.entries.values()])

    def _note(self, key: Key, name: str, ratio: float) -> None:
        entry = self.entries[key]
        entry.record = replace(entry.record, times={**entry.record.times, name: max(round(ratio, 3), 0.001)})

    def _reject(self, key: Key, name: str, why: str) -> None:
        entry = self.entries[key]
        times = {n: t for n, t in entry.record.times.items() if n != name}
        entry.record = replace(entry.record, wrong=(*entry.record.wrong, name), times=times)
        self.rejected.append(Rejected(entry.question.title, name, why))

    # -- programs
    def _planned(self, chosen: Mapping[Key, str]) -> list[Planned]:
        """With candidates in place of the cost model's choices."""
        forced = Records(replace(self.entries[key].record, times={name: 0.5}, wrong=()) for key, name in chosen.items())
        return kernels_of(schedule_of(self.graph, replace(self.target, records=forced), self.layout))

    @contextmanager
    def _loaded(self, plans: Sequence[Planned]) -> Iterator[_Made]:
        data = assemble_planned(plans, self.method.dims)
        native = NativeProgram.load(data, device=self.device.index, verify=False)
        try:
            taken = native.info()["methods"][0]["plan"]  # of large values there is one in parts as well
            schedule = next(p.schedule for p in plans if p.schedule.target.name == taken)
            yield _Made(schedule, native, CheckedRun(data, native, schedule, self.arrays))
        finally:
            native.close()

    # -- times
    def _times(self, made: _Made) -> tuple[list[int], float]:
        """Nanoseconds of each command alone, and seconds of a run."""
        found = made.native.profile(self.arrays, 1)
        return found.commands, found.total * 1e-9

    def _ratios(self, made: _Made, thorough: int) -> tuple[dict[Key, float], float, float]:
        """The times of the questions in those of the base, and the seconds of a run of both."""
        best: list[tuple[list[int], float] | None] = [None, None]
        start, rounds = time.monotonic(), 0
        while rounds < _ROUNDS * thorough or (
            rounds < _MOST_ROUNDS * thorough and time.monotonic() - start < _ENOUGH * thorough
        ):
            for k, program in enumerate((self.base, made)):
                commands, total = self._times(program)
                before = best[k]
                if before is not None:
                    commands = list(map(min, commands, before[0]))
                    total = min(total, before[1])
                best[k] = commands, total
            rounds += 1
        assert best[0] is not None and best[1] is not None
        (old, before_s), (new, after_s) = best[0], best[1]
        common = {t.out.id for t in self.base.schedule.order.run} & {t.out.id for t in made.schedule.order.run}
        was, now = self._shared_out(self.base, old, common), self._shared_out(made, new, common)
        return {key: now.get(key, 0) / was[key] for key in was if was[key] > 0}, before_s, after_s

    def _shared_out(self, made: _Made, times: Sequence[int], common: set[int]) -> dict[Key, float]:
        """The time of each question: of its contractions, and of what is only there for them, such as copies of operands and
        kernels that another candidate takes in. common: tasks that are in both programs, by what they compute."""
        tasks = made.schedule.order.run
        owners: dict[int, set[Key]] = {t.out.id: self._own(t) for t in tasks}
        apart = [t for t in tasks if not owners[t.out.id] and t.out.id not in common]
        writers = {t.out.id for t in tasks}
        for t in reversed(apart):
            for reader in tasks:
                if any(r.id == t.out.id for r in reader.reads()):
                    owners[t.out.id] |= owners[reader.out.id]
        for t in apart:
            if not owners[t.out.id]:
                for read in t.reads():
                    owners[t.out.id] |= owners[read.id] if read.id in writers else set()
        spent: dict[Key, float] = {}
        assert len(times) == sum(t.commands for t in tasks)
        for t, numbers in zip(tasks, commands(tasks), strict=True):
            ns = sum(times[k] for k in numbers)
            for key in owners[t.out.id]:
                spent[key] = spent.get(key, 0.0) + ns / len(owners[t.out.id])
        return spent

    def _own(self, t: Task) -> set[Key]:
        """The questions whose contractions, or rows, a task computes."""
        second = t.template.second if t.template is not None else None
        ids = [t.out.id, *(r.id for r in (t.reduction, second) if r is not None)]
        return {self.keys[i] for i in ids if i in self.keys and self.keys[i] in self.entries}

    # -- results
    def _first_wrong(self, made: _Made, tried: Mapping[Key, str]) -> tuple[Key, float] | None:
        """The first question whose result is not that of the reference, the kernel that cost models choose, but for rounding."""
        made.native.run([_other(a) for a in self.arrays])  # so that no memory holds what is to be computed
        allowed, worst = _ROUNDING[self._least()], 0.0
        seen: set[Key] = set()
        last: Key | None = None
        tasks = made.schedule.order.run
        for task, numbers in zip(tasks, commands(tasks), strict=True):
            for key in sorted(self._own(task) - seen, key=str):
                if key not in tried or task.partial:
                    continue
                seen.add(key)
                last = key
                want = self._reference(task.out.id)
                if want is None:  # a value that the base does not store
                    continue
                error = difference(_read(made, task, numbers[-1]), want)
                if not error <= min(_MOST, max(allowed, _GROWS * worst)):
                    return key, error
                worst = max(worst, error)
        for got, want in zip(made.native.run(self.arrays), self.outputs, strict=True):
            error = difference(_numbers(got), _numbers(want)) if want.size and want.dtype.kind == "f" else 0.0
            if not error <= _MOST and last is not None:
                return last, error
        return None

    def _least(self) -> DType:
        """The type with the fewest bits in which values are stored."""
        if any(n.dtype is DType.bfloat16 for n in self.graph[0].nodes()):
            return DType.bfloat16
        return DType.float16 if self.target.half else DType.float32

    def _reference(self, value: int) -> Array | None:
        if value not in self._read:
            tasks = self.base.schedule.order.run
            for task, numbers in zip(tasks, commands(tasks), strict=True):
                if task.out.id == value:
                    self._read[value] = _read(self.base, task, numbers[-1])
        return self._read.get(value)

    # -- what is told
    def choices(self) -> Iterator[Choice]:
        for e in self.entries.values():
            r = e.record
            done = 1 + sum(n in r.times or n in r.wrong for n in e.names[1:])
            ratio = r.times.get(r.best, 1.0) if r.best != r.default else 1.0
            yield Choice(e.question.title, e.count, r.default, r.us, r.best, ratio, done, len(e.names))


def _read(made: _Made, task: Task, command: int) -> Array:
    dispatch = made.run.plan.run[command]
    return _numbers(made.run.read(task.out, dispatch.buffers[dispatch.written.index(True)], command), task.out.dtype)


def _numbers(a: Array, dtype: DType | None = None) -> Array:
    """The bits of bfloat16 as numbers."""
    if dtype is DType.bfloat16:
        return (a.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return a


def _other(a: Array) -> Array:
    """An input of other numbers."""
    return (a * np.asarray(-0.5, a.dtype)).astype(a.dtype) if a.dtype.kind == "f" else a


def _inputs(graph: Graph, examples: Sequence[Any]) -> list[Array]:
    """What a graph is run with: the examples where they fit, and random numbers."""
    given = [x.detach().cpu() for x in examples if isinstance(x, torch.Tensor)]
    shown = given if [x.dim() for x in given] == [len(n.shape) for n in graph.inputs] else []
    sizes = _sizes(graph, shown)
    rng = np.random.default_rng(0)
    found = []
    for k, node in enumerate(graph.inputs):
        shape = [int(s.evaluate(sizes)) for s in node.shape]
        example = shown[k] if shown and list(shown[k].shape) == shape and _tells(shown[k]) else None
        found.append(_array(node, shape, example, rng))
    return found


def _tells(x: torch.Tensor) -> bool:
    """Whether results of an example say anything: not if all of its numbers are equal."""
    return not x.is_floating_point() or (x.numel() > 0 and bool((x != x.flatten()[0]).any()))


def _array(node: Input, shape: list[int], example: torch.Tensor | None, rng: np.random.Generator) -> Array:
    bits = node.dtype is DType.bfloat16
    name = "uint16" if bits else node.dtype.name
    if example is not None:
        with suppress(TypeError):
            return (example.view(torch.int16) if bits else example).contiguous().numpy().astype(name, copy=False)
    if not node.dtype.is_float:
        return np.zeros(shape, name)
    made = rng.standard_normal(shape, np.float32)
    return (made.view(np.uint32) >> 16).astype(np.uint16) if bits else made.astype(name)


def _sizes(graph: Graph, shown: Sequence[torch.Tensor]) -> dict[Atom, int]:
    """The values of open sizes: those of the examples or, if none shows them, usual ones."""
    found: dict[Atom, int] = {}
    for symbol in graph.symbols.values():
        place = reading(symbol, graph.inputs)
        (atom,) = symbol.atoms()
        assert isinstance(atom, Symbol)
        found[atom] = max(atom.min, min(_USUAL, atom.max or _USUAL))
        if place is not None and shown:
            found[atom] = (int(shown[place.input.index].shape[place.axis]) - place.offset) // place.factor
    return found
