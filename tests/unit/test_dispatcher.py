"""Which worker a job goes to, and what becomes of the jobs of one that is lost: on targets that are functions."""

from __future__ import annotations

import gc
import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lapilli.errors import DeviceLostError, InvalidInputError
from lapilli.runtime.dispatcher import SLOTS, Dispatcher, Worker, choose
from lapilli.runtime.futures import Future
from lapilli.runtime.ordered import ordered

Target = Callable[[Any], Any]


def worker(name: str, seconds: float, running: int = 0) -> Worker[str]:
    made = Worker(name, name, threading.Lock())
    made.seconds, made.running, made.ended = seconds, running, 0.0
    return made


@pytest.mark.parametrize(
    ("fast", "slow", "line", "taken"),
    [
        (worker("fast", 1), worker("slow", 10), 1, "fast"),
        (worker("fast", 1, 1), worker("slow", 10), 1, "fast"),  # it has room, and is done sooner
        (worker("fast", 1, 2), worker("slow", 10), 1, None),  # waiting is shorter
        (worker("fast", 1, 2), worker("slow", 10), 40, "slow"),  # the line is longer than a job of the slow one
        (worker("fast", 1, 2), worker("slow", 0), 1, "slow"),  # nobody knows it yet
        (worker("fast", 1, 2), worker("slow", 1, 2), 9, None),
        (worker("fast", 1, 1), worker("slow", 1), 1, "slow"),  # the one with less to do
    ],
)
def test_where_a_job_goes(fast: Worker[str], slow: Worker[str], line: int, taken: str | None) -> None:
    found = choose([fast, slow], line, 0.1)
    assert (found and found.name) == taken


def test_no_job_waits_for_nothing() -> None:
    """Where every worker is free, one takes the job, whatever their speeds: nothing else would wake the line."""
    for speeds in ((1, 1), (1, 1000), (0, 1), (1e-9, 1e9, 3), (5,)):
        for line in (1, 2, 1000):
            assert choose([worker(str(k), s) for k, s in enumerate(speeds)], line, 1e-12) is not None
    for running in range(SLOTS):  # and whenever one is refused, another one has a job
        for speed in (1e-3, 1, 1e3):
            pair = [worker("a", 1, running), worker("b", speed)]
            assert choose(pair, 1, 1e-12) is not None or any(w.running for w in pair)


def test_a_worker_without_jobs_is_measured_again() -> None:
    idle = worker("idle", 0.5)
    assert choose([worker("fast", 0.1, 2), idle], 1, 1.0) is None
    assert choose([worker("fast", 0.1, 2), idle], 1, 20.0) is idle


def simulated(speeds: list[float], jobs: int, window: int) -> float:
    """Seconds for jobs in order through devices that take so long for one each, of which `window` are taken ahead."""
    workers = [worker(str(k), 0) for k in range(len(speeds))]
    free = dict.fromkeys(range(len(speeds)), 0.0)
    events: list[tuple[float, int, int, int, float]] = []  # end, order, worker, job, when it was given
    line: deque[int] = deque()
    done: set[int] = set()
    now, taken, yielded, order = 0.0, 0, 0, 0
    while yielded < jobs:
        while taken < jobs and taken - yielded < window:
            line.append(taken)
            taken += 1
        while line and (found := choose(workers, len(line), now)) is not None:
            k = int(found.name)
            found.running += 1
            free[k] = max(now, free[k]) + speeds[k]
            heapq.heappush(events, (free[k], order, k, line.popleft(), now))
            order += 1
        now, _, k, job, start = heapq.heappop(events)  # there is one: no job waits for nothing
        workers[k].running -= 1
        workers[k].measured(now - start, now)
        done.add(job)
        while yielded in done:
            yielded += 1
    return now


def test_no_pool_is_slower_than_its_best_device() -> None:
    """Sweep: up to 8 devices, up to 1000 times as slow as each other. What measuring each of them takes comes on top."""
    rng = random.Random(0)
    for _ in range(400):
        n = rng.choice([1, 2, 3, 4, 8])
        speeds = [10 ** rng.uniform(0, rng.choice([0.1, 1, 3])) for _ in range(n)]
        jobs, window = rng.choice([100, 1000]), rng.choice([2 * n, 4 * n, 16 * n])
        measuring = n * (SLOTS + 1) * max(speeds)
        assert simulated(speeds, jobs, window) <= 1.02 * min(speeds) * jobs + measuring, (speeds, jobs, window)


@pytest.mark.parametrize(("speeds", "window", "least"), [
    ([1.0] * 2, 8, 1.99), ([1.0] * 4, 16, 3.95), ([1.0] * 8, 32, 7.9),  # equal ones
    ([1, 2], 8, 1.49), ([1, 3], 8, 1.32), ([1, 5], 64, 1.19), ([1, 10], 64, 1.09),  # the sum of their rates
])  # fmt: skip
def test_devices_add_up(speeds: list[float], window: int, least: float) -> None:
    assert 2000 / simulated(speeds, 2000, window) > least


def sleeper(seconds: float) -> Target:
    def run(x: Any) -> Any:
        time.sleep(seconds)
        return x

    return run


def submit(dispatcher: Dispatcher[Any], x: Any) -> Future:
    return Future(dispatcher.submit(lambda target: [target(x)]), lambda outputs: None, lambda outputs: outputs[0])


def test_a_slow_worker_makes_nothing_slower() -> None:
    """200 jobs of 2 ms, two at a time, on one worker, and the same beside one that takes a hundred times as long."""

    def seconds(targets: list[tuple[str, Target]]) -> float:
        dispatcher = Dispatcher(targets)
        for _ in ordered(lambda x: submit(dispatcher, x), range(4 * SLOTS), 8, "raise"):  # all are measured
            pass
        start = time.monotonic()
        assert list(ordered(lambda x: submit(dispatcher, x), range(200), 8, "raise")) == list(range(200))
        took = time.monotonic() - start
        dispatcher.close()
        return took

    alone = seconds([("fast", sleeper(0.002))])
    both = seconds([("fast", sleeper(0.002)), ("slow", sleeper(0.2))])
    assert both < 1.5 * alone + 0.3  # one job of the slow one at most, and what threads of other tests take


def test_equal_workers_share() -> None:
    counts = {name: 0 for name in "abc"}

    def counted(name: str) -> Target:
        def run(x: Any) -> Any:
            counts[name] += 1
            time.sleep(0.002)
            return x

        return run

    dispatcher = Dispatcher([(name, counted(name)) for name in counts])
    assert list(ordered(lambda x: submit(dispatcher, x), range(150), 12, "raise")) == list(range(150))
    dispatcher.close()
    assert min(counts.values()) > 25, counts


class Losing:
    """A target that is lost at its n-th job, and with every job that is poison."""

    def __init__(self, after: int = 1 << 30) -> None:
        self.after, self.done, self.lost = after, list[Any](), False
        self.lock = threading.Lock()

    def __call__(self, x: Any) -> Any:
        time.sleep(0.001)
        with self.lock:
            self.lost |= x == "poison" or len(self.done) >= self.after
            if self.lost:
                raise DeviceLostError("the test says so")
            self.done.append(x)
        return x


@pytest.mark.parametrize("after", [0, 1, 2, 3, 7])
def test_jobs_of_a_lost_worker_are_done_elsewhere(after: int) -> None:
    first, second = Losing(after), Losing()
    dispatcher = Dispatcher([("first", first), ("second", second)])
    with pytest.warns(RuntimeWarning, match="first was lost and is taken out of the pool") as told:
        assert list(ordered(lambda x: submit(dispatcher, x), range(40), 8, "raise")) == list(range(40))
        dispatcher.close()
    assert len(told) == 1
    assert sorted(first.done + second.done) == list(range(40))  # each once


def test_a_job_takes_two_workers_at_most() -> None:
    targets = [Losing() for _ in range(4)]
    dispatcher = Dispatcher([(str(k), target) for k, target in enumerate(targets)])
    items: list[Any] = [*range(10), "poison", *range(10, 20)]
    with pytest.warns(RuntimeWarning):
        results = list(ordered(lambda x: submit(dispatcher, x), items, 4, "return"))
        dispatcher.close()
    assert sum(target.lost for target in targets) == 2
    assert [r for r in results if not isinstance(r, DeviceLostError)] == list(range(20))
    assert isinstance(results[10], DeviceLostError)


def test_what_runs_beside_a_poisoned_job_is_not_lost_twice() -> None:
    """Both are on the first worker when it is lost, and the second one is by far the faster of those that are left."""
    both = threading.Barrier(2)

    class Dying:
        lost = False

        def __call__(self, x: str) -> str:
            if self is targets[0]:
                both.wait(10)
            time.sleep(0.05)
            self.lost |= x == "poison"
            time.sleep(0.05)
            if self.lost:
                raise DeviceLostError("the test says so")
            return x

    targets = [Dying() for _ in range(3)]
    dispatcher = Dispatcher([(str(k), target) for k, target in enumerate(targets)])
    for known, seconds in zip(dispatcher.workers, (1e-6, 1e-3, 10.0), strict=True):
        known.seconds, known.ended = seconds, time.monotonic() + 100
    with pytest.warns(RuntimeWarning):
        poison, innocent = submit(dispatcher, "poison"), submit(dispatcher, "innocent")
        dispatcher.close()
    assert isinstance(poison.exception(0), DeviceLostError) and innocent.result(0) == "innocent"
    assert targets[0].lost and sum(target.lost for target in targets) == 2


def test_all_are_lost() -> None:
    dispatcher = Dispatcher([(str(k), Losing(3)) for k in range(2)])
    with pytest.warns(RuntimeWarning):
        results = list(ordered(lambda x: submit(dispatcher, x), range(50), 8, "return"))
        with pytest.raises(DeviceLostError, match="All devices of the pool are lost"):
            submit(dispatcher, 0)
        dispatcher.close()
    good = [r for r in results if not isinstance(r, Exception)]
    assert len(good) == 6 and all(isinstance(r, DeviceLostError) for r in results if r not in good)
    assert all(r == k for k, r in enumerate(results) if not isinstance(r, Exception))


def test_closing_waits_for_what_was_submitted() -> None:
    dispatcher = Dispatcher([("a", sleeper(0.01)), ("b", sleeper(0.02))])
    waiting = [submit(dispatcher, k) for k in range(20)]
    closers = [threading.Thread(target=dispatcher.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert [future.result(0) for future in waiting] == list(range(20))
    with pytest.raises(InvalidInputError, match="closed"):
        submit(dispatcher, 0)


def test_a_worker_lost_while_closing() -> None:
    for after in range(3):
        first, second = Losing(after), Losing()

        def behind(x: Any, first: Losing = first, second: Losing = second) -> Any:
            """Begins when the other is lost: on a busy machine it might do all jobs before that one has its third."""
            end = time.monotonic() + 30
            while not first.lost and time.monotonic() < end:
                time.sleep(0.001)
            return second(x)

        dispatcher = Dispatcher([("first", first), ("second", behind)])
        with pytest.warns(RuntimeWarning):
            waiting = [submit(dispatcher, k) for k in range(8)]
            dispatcher.close()
        assert [future.result(0) for future in waiting] == list(range(8))


def test_an_endless_generator_is_read_a_few_items_ahead() -> None:
    taken = 0
    alive = 0

    class Item:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def endless() -> Iterator[Item]:
        nonlocal taken
        while True:
            taken += 1
            yield Item()

    dispatcher = Dispatcher([("a", sleeper(0)), ("b", sleeper(0.001))])
    results = ordered(lambda x: submit(dispatcher, x), endless(), 6, "raise")
    for k in range(300):
        next(results)
        gc.collect() if k % 50 == 0 else None
        assert taken - k <= 6 and alive <= 6 + 2, (k, taken, alive)
    results.close()  # type: ignore[attr-defined]
    dispatcher.close()


def test_errors_come_at_their_place() -> None:
    def target(x: Any) -> Any:
        if x % 5 == 3:
            raise ValueError(x)
        return x

    def source() -> Iterator[int]:
        yield from range(7)
        raise KeyError("the source's own")

    dispatcher: Dispatcher[Target] = Dispatcher([("a", target), ("b", target)])
    results = ordered(lambda x: submit(dispatcher, x), source(), 4, "return")
    seen = [next(results) for _ in range(7)]
    assert [r for r in seen if not isinstance(r, ValueError)] == [0, 1, 2, 4, 5, 6] and isinstance(seen[3], ValueError)
    with pytest.raises(KeyError):
        next(results)
    results = ordered(lambda x: submit(dispatcher, x), range(9), 4, "raise")
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)
    for options in ((0, "raise"), (1, "ignore")):
        with pytest.raises(InvalidInputError, match="in_flight|on_error"):
            ordered(lambda x: submit(dispatcher, x), [], *options)
    dispatcher.close()
