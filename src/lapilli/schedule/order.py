"""Orders kernels in levels with a barrier between them, and computes the lifetime of every buffer.

A task's level is one more than the highest level it reads, so tasks of one level are independent and may run concurrently.
Tasks that depend only on constants, and not on dynamic sizes, run once, at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lapilli.ir.node import Constant, Node, State
from lapilli.schedule.concatenate import Window
from lapilli.schedule.task import Task


@dataclass(frozen=True)
class Order:
    """Tasks in the order of their commands. barriers[i]: whether a barrier precedes task i. lifetimes: first and last task that
    bound the lifetime of a value, by id.
    """

    load: list[Task]
    load_barriers: list[bool]
    run: list[Task]
    run_barriers: list[bool]
    lifetimes: dict[int, tuple[int, int]]


def commands(tasks: Sequence[Task]) -> list[range]:
    """The numbers of the commands of each task."""
    ends = [*accumulate(t.commands for t in tasks)]
    return [range(end - t.commands, end) for t, end in zip(tasks, ends, strict=True)]


def order(
    tasks: Sequence[Task], outputs: Sequence[Node], stored: Mapping[int, State], windows: Mapping[int, Window]
) -> Order:
    """stored: results stored in states; windows: results stored in other values, which are complete when all of their windows
    are.
    """
    fixed = {o.id for o in outputs} | set(stored) | set(windows)
    at_load: set[int] = set()
    for t in tasks:
        known = all(isinstance(r, Constant) or r.id in at_load for r in t.reads())
        if known and t.out.id not in fixed and not t.every_run and not t.is_dynamic():
            at_load.add(t.out.id)
    load = [t for t in tasks if t.out.id in at_load]
    run = [t for t in tasks if t.out.id not in at_load]
    load_order, load_levels = _by_level(load, {}, {})
    run_order, run_levels = _by_level(run, stored, windows)
    lifetimes = _lifetimes(run_order, run_levels, windows)
    return Order(load_order, _barriers(load_levels), run_order, _barriers(run_levels), lifetimes)


def _by_level(
    tasks: Sequence[Task], stored: Mapping[int, State], windows: Mapping[int, Window]
) -> tuple[list[Task], list[int]]:
    """A state is overwritten after all readers of the old value (see schedule/state.py: then there is nothing to wait for)."""
    level: dict[int, int] = {}
    readers: dict[int, list[int]] = {state.id: [] for state in stored.values()}  # results of tasks that read a state
    for t in tasks:
        read = t.reads()
        level[t.out.id] = 1 + max((level.get(r.id, -1) for r in read), default=-1)
        if t.out.id in windows:
            whole = windows[t.out.id].whole.id
            level[whole] = max(level.get(whole, -1), level[t.out.id])
        for r in read:
            if r.id in readers:
                readers[r.id].append(t.out.id)
    for new, state in stored.items():
        level[new] = max([level[new], *(1 + level[out] for out in readers[state.id] if out != new)])
    ordered = sorted(tasks, key=lambda t: level[t.out.id])  # stable: producers first
    return ordered, [level[t.out.id] for t in ordered]


def _barriers(levels: Sequence[int]) -> list[bool]:
    return [k > 0 and level != levels[k - 1] for k, level in enumerate(levels)]


def _lifetimes(
    tasks: Sequence[Task], levels: Sequence[int], windows: Mapping[int, Window]
) -> dict[int, tuple[int, int]]:
    """First and last command of the levels in which a value is written and last read."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for k, level in enumerate(levels):
        starts.setdefault(level, k)
        ends[level] = k
    lives: dict[int, tuple[int, int]] = {}
    for t, level in zip(tasks, levels, strict=True):
        out = windows[t.out.id].whole if t.out.id in windows else t.out
        lives[out.id] = (lives[out.id][0] if out.id in lives else starts[level], ends[level])
        for n in t.template.scratch if t.template is not None else ():
            lives[n.id] = (starts[level], ends[level])
        for r in t.reads():
            if r.id in lives:
                lives[r.id] = (lives[r.id][0], ends[level])
    return lives
