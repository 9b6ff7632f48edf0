"""Work that may crash or hang, in processes of its own: a worker that dies is a result like any other.

A task is done in steps (the samples of an operator); results are written as JSON lines as they come, and a second run
goes on where the first one stopped."""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Work = Callable[[str, int], Iterator[Result]]
"""The results of a task's steps, from a step on."""

MEMORY = 10 << 30
"""Bytes of address space that a worker may have: one that wants more fails, and the machine lives."""

END = None


@dataclass(frozen=True)
class Limits:
    """step: seconds that a step may take; start: more for the first one of a process, which imports; deaths: workers that a
    task may cost, then its other steps are left out; total: seconds after which no task is begun."""

    step: float
    start: float = 120.0
    deaths: int = 4
    total: float = math.inf


@dataclass(frozen=True)
class Died:
    """Why a worker gave no result."""

    reason: str


class Late(Died):
    """The task was not begun: the time for all of them was over."""


def run(work: Work, tasks: Sequence[str], jobs: int, limits: Limits) -> Iterator[tuple[str, int, Result | Died | None]]:
    """Results of all steps of all tasks as (task, step, result); None when a task is at its end.

    jobs: processes at a time."""
    until = time.monotonic() + limits.total
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    done: queue.SimpleQueue[tuple[str, int, Result | Died | None]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_serve, args=(work, waiting, done, limits, until), daemon=True) for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    for _ in tasks:
        while True:
            task, step, result = done.get()
            yield task, step, result
            if result is END:
                break


def _serve(
    work: Work, waiting: queue.SimpleQueue[str], done: queue.SimpleQueue[Any], limits: Limits, until: float
) -> None:
    """One worker process after another, until no task waits."""
    worker: _Worker | None = None
    while True:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            break
        if time.monotonic() > until:
            done.put((task, 0, Late(f"not begun within {limits.total:.0f} s")))
            done.put((task, 1, END))
            continue
        step, deaths = 0, 0
        result: Died | None = Died("")
        while result is not END:
            try:
                if worker is None or step == 0:
                    worker = worker or _Worker(work)
                    worker.connection.send((task, step))
                result = worker.receive(limits)
            except (EOFError, OSError, TimeoutError) as error:
                assert worker is not None
                done.put((task, step, Died(worker.end(error, limits))))
                worker, deaths = None, deaths + 1
                result = END if deaths == limits.deaths else Died("")
                if result is END:
                    done.put((task, step, END))
            else:
                done.put((task, step, result))
            step += 1
    if worker is not None:
        worker.end(EOFError(), limits)


class _Worker:
    """A process that waits for tasks."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.fresh = True

    def receive(self, limits: Limits) -> Any:
        if not self.connection.poll(limits.step + limits.start * self.fresh):
            raise TimeoutError
        self.fresh = False
        return self.connection.recv()

    def end(self, error: Exception, limits: Limits) -> str:
        """Stops the process; says what happened to it."""
        self.connection.close()
        self.process.join(5 if isinstance(error, EOFError) else 0)
        late = self.process.is_alive()
        if late:
            self.process.kill()
            self.process.join()
        if isinstance(error, TimeoutError):
            return f"no result within {limits.step:.0f} s"
        code = self.process.exitcode or 0
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _main(work: Work, connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        try:
            task, step = connection.recv()
        except EOFError:
            return
        for result in work(task, step):
            connection.send(result)
        connection.send(END)


class Log:
    """Results as JSON lines: one line a finished task, {"task": ..., "steps": [...]}, in a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tasks: dict[str, Mapping[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.tasks[entry["task"]] = entry

    def fill(
        self,
        work: Work,
        tasks: Sequence[str],
        jobs: int,
        limits: Limits,
        died: Callable[[Died], Result],
        show: Callable[[str, list[Result], float], None],
    ) -> None:
        """Does the tasks that have no line yet; a step whose worker died has the result `died` gives it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        missing = [task for task in tasks if task not in self.tasks]
        steps: dict[str, list[Result]] = {task: [] for task in missing}
        started = time.monotonic()
        with self.path.open("a") as file:
            for task, _, result in run(work, missing, jobs, limits):
                if result is not END:
                    steps[task].append(died(result) if isinstance(result, Died) else result)
                    continue
                entry = {"task": task, "steps": steps[task]}
                self.tasks[task] = entry
                file.write(json.dumps(entry) + "\n")
                file.flush()
                show(task, steps[task], time.monotonic() - started)
