"""Gives jobs to workers that are unlike in speed and may be lost: one line of jobs, a few threads a worker.

A job goes to the worker that is likely to finish it first, and stays in the line while none has room. A worker that would hold
a job longer than the others need for the whole line gets none: a pool with a slow device is no slower than one without it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lapilli.errors import DeviceLostError, InvalidInputError, RunTimeoutError

SLOTS = 2
"""Jobs of a worker at once: while the device computes one, the host copies the tensors of another."""
_FORGOTTEN = 20.0
"""A worker that had no job for so many times the length of its jobs is measured again."""
_WEIGHT = 0.25
"""Of the newest job in a worker's mean time."""

T = TypeVar("T")


class Job(Generic[T]):
    """A function to call with one of the workers' targets; once more with another, if the first one's device is lost."""

    def __init__(self, work: Callable[[T], Any]) -> None:
        self._work: Callable[[T], Any] | None = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.losses = 0

    def run(self, target: T) -> None:
        """Calls the function. Raises DeviceLostError, and nothing else: other exceptions are the job's result."""
        assert self._work is not None
        try:
            self._finish(self._work(target), None)
        except DeviceLostError:
            raise
        except BaseException as error:
            self._finish(None, error)

    def fail(self, error: BaseException) -> None:
        """Ends the job without a result."""
        self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._work = None  # and with it, the inputs
        self._result, self._error = result, error
        self._done.set()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds; None: without limit. Raises RunTimeoutError."""
        if not self._done.wait(timeout):
            raise RunTimeoutError(f"The run is not finished after {timeout} s; wait longer.")

    def outputs(self) -> Any:
        """Waits, and returns the result, or raises the exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def release(self) -> None:
        """Lets go of the result."""
        self._result = None


class Worker(Generic[T]):
    """What a dispatcher knows of a target.

    Attributes:
        target: what jobs are called with.
        name: for messages.
        lost: what was raised where its device was lost.
        running: jobs that it has.
        again: of these, the one that is done a second time, if there is one.
        seconds: mean time of a job; 0 while it is not known.
    """

    def __init__(self, target: T, name: str, lock: threading.Lock) -> None:
        self.target, self.name = target, name
        self.lost: DeviceLostError | None = None
        self.running = 0
        self.again: Job[T] | None = None
        self.seconds = 0.0
        self.ended = 0.0
        self.count = 0
        self.assigned: deque[Job[T]] = deque()
        self.ready = threading.Condition(lock)

    def measured(self, seconds: float, now: float) -> None:
        """Notes the time of a job. The first ones, for which drivers still compile, do not count."""
        self.count += 1
        if self.count > SLOTS:
            self.seconds = seconds if self.seconds == 0 else self.seconds + _WEIGHT * (seconds - self.seconds)
        self.ended = now

    def known(self, now: float) -> float:
        """The mean time of a job; 0 while it is not known, or is no longer."""
        return 0.0 if now - self.ended > _FORGOTTEN * self.seconds and not self.running else self.seconds


def choose(workers: Sequence[Worker[T]], line: int, now: float) -> Worker[T] | None:
    """The worker that the first job of the line goes to; None: it waits, for one that will be free.

    Args:
        workers: those that are not lost.
        line: number of jobs that wait, with this one.
        now: the time.
    """
    free = [worker for worker in workers if worker.running < SLOTS]
    for worker in sorted(free, key=lambda worker: ((worker.running + 1) * worker.known(now), worker.running)):
        others = [(other, other.known(now)) for other in workers if other is not worker]
        if not others or any(seconds == 0 for _, seconds in others):
            return worker
        ahead = line + sum(other.running for other, _ in others)
        rate = sum(SLOTS / seconds for _, seconds in others)
        if worker.known(now) <= max(ahead / rate, min(seconds for _, seconds in others)):
            return worker
    return None  # then another one has a job, at whose end the line is looked at again


_open: weakref.WeakSet[Dispatcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before threads and the player end with the process."""
    for dispatcher in list(_open):
        dispatcher.close()


class Dispatcher(Generic[T]):
    """Runs jobs on several targets. Thread-safe.

    A target whose job raises DeviceLostError gets no more jobs, with a warning; the job is done once more by another one, and
    fails if that is lost, too: work that makes devices fail takes two of them at most. What was running beside it is done
    once more apart from it, so that it does not share its fate twice.
    """

    def __init__(self, targets: Sequence[tuple[str, T]]) -> None:
        """Starts the threads.

        Args:
            targets: with their names.
        """
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self.workers = [Worker(target, name, self._lock) for name, target in targets]
        self._line: deque[Job[T]] = deque()
        self._closed = self._ended = False
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"lapilli-pool-{worker.name}", daemon=True)
            for worker in self.workers
            for _ in range(SLOTS)
        ]
        for thread in self._threads:
            thread.start()
        _open.add(self)

    def submit(self, work: Callable[[T], Any]) -> Job[T]:
        """Queues a function, and returns at once.

        Raises InvalidInputError if it is closed, and DeviceLostError if all devices are lost, or the process was forked.
        """
        job = Job(work)
        if os.getpid() != self._process:
            raise DeviceLostError(
                "This process was forked from one that has the pool: its devices and threads are not here. Load it in this "
                "process."
            )
        with self._lock:
            if self._closed:
                raise InvalidInputError("This pool is closed; load it again to use it.")
            if all(worker.lost for worker in self.workers):
                raise self._none_left()
            self._line.append(job)
            self._dispatch()
        return job

    def close(self) -> None:
        """Waits until all jobs have ended, and ends the threads. Calling it twice is fine."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            while self._line or any(worker.running for worker in self.workers):
                self._idle.wait()
            self._ended = True
            for worker in self.workers:
                worker.ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _dispatch(self) -> None:
        now = time.monotonic()
        alive = [worker for worker in self.workers if worker.lost is None]
        while self._line and alive:
            job = self._line[0]
            worker = choose([w for w in alive if w.again is None] if job.losses else alive, len(self._line), now)
            if worker is None:
                return
            if job.losses:
                worker.again = job
            worker.assigned.append(self._line.popleft())
            worker.running += 1
            worker.ready.notify()

    def _serve(self, worker: Worker[T]) -> None:
        while True:
            with self._lock:
                while not worker.assigned:
                    if worker.lost is not None or self._ended:
                        return
                    worker.ready.wait()
                job = worker.assigned.popleft()
            start = time.monotonic()
            try:
                job.run(worker.target)
            except DeviceLostError as error:
                self._lose(worker, job, error)
            else:
                now = time.monotonic()
                with self._lock:
                    worker.running -= 1
                    if worker.again is job:
                        worker.again = None
                    worker.measured(now - start, now)
                    self._dispatch()
                    self._idle.notify_all()
            del job

    def _lose(self, worker: Worker[T], job: Job[T], error: DeviceLostError) -> None:
        """Takes a worker out, and gives its jobs back to the line."""
        job.losses += 1
        with self._lock:
            first, worker.lost = worker.lost is None, worker.lost or error
            left = sum(other.lost is None for other in self.workers)
            again = [] if job.losses > 1 else [job]
            again += worker.assigned
            worker.running -= 1 + len(worker.assigned)
            worker.assigned.clear()
            self._line.extendleft(reversed(again))
            ended = list(self._line) if not left else []
            if not left:
                self._line.clear()
            self._dispatch()
            worker.ready.notify_all()
            self._idle.notify_all()
        if first:
            warnings.warn(
                f"The device {worker.name} was lost and is taken out of the pool ({left} of {len(self.workers)} left); its work is "
                f"done elsewhere. {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        if job.losses > 1:
            job.fail(error)
        for other in ended:
            other.fail(self._none_left())

    def _none_left(self) -> DeviceLostError:
        last = next(worker.lost for worker in reversed(self.workers) if worker.lost)
        return DeviceLostError(f"All devices of the pool are lost; load it again. {last}")
