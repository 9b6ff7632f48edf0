"""Inference and training beside torch's CPU, which takes turns with the system in the same process: with all threads and with
one, of which the faster counts (on a busy machine threads wait for each other)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from workers import Result

from comparison.cases import Inputs
from comparison.judging import expected, judge
from comparison.models import TRAINING
from comparison.systems import Eager, ExecuTorch, System

THREADS = torch.get_num_threads()
ROUNDS, LEAST = 15, 3
"""Runs whose median is taken; where they take long, at least so many."""

SECONDS = 15.0
"""After which only the least number of runs is taken."""

STEPS, WARMUP = 12, 2
"""Training steps, and those of them that are not timed."""

APART = 1e-3
"""Relative difference that losses may have from those of the CPU."""


def latency(system: System, model: nn.Module, inputs: Inputs) -> Result:
    """Medians of the system and of torch's CPU, host to host; the first run with all that comes before it."""
    if isinstance(system, ExecuTorch):
        return system.case(model, inputs)
    want, exact = expected(model, inputs)
    start = time.perf_counter()
    run = system.prepare(model, inputs)
    found = judge(run(), want, exact)
    found["first"] = time.perf_counter() - start
    for _ in range(WARMUP):
        run()
    times: list[list[float]] = []
    end = time.perf_counter() + SECONDS
    while len(times) < ROUNDS and (len(times) < LEAST or time.perf_counter() < end):
        times.append(_turn(run, lambda: model(*inputs), lambda: model(*inputs)))
    return found | _medians(times)


def training(system: System, name: str) -> Result:
    """Losses beside those of the CPU from the same weights; medians of a step of both."""
    if not isinstance(system, Eager):
        raise NotImplementedError("has no backward pass")
    chosen = TRAINING[name]

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    def trainer(device: str, loss: Callable[..., Tensor]) -> Callable[[], float]:
        model = chosen.make().to(device)
        optimizer = chosen.optimizer(model.parameters(), lr=0.01)

        def step() -> float:
            x, labels = chosen.batch()
            optimizer.zero_grad()
            value = loss(model, x.to(device), labels.to(device))
            value.backward()
            optimizer.step()
            return float(value)

        return step

    trainers = [trainer("vulkan", system.trained(loss)), trainer("cpu", loss), trainer("cpu", loss)]
    losses: list[tuple[float, float]] = []
    times: list[list[float]] = []
    for _ in range(STEPS):
        found: list[float] = []
        times.append(_turn(*(lambda step=step: found.append(step()) for step in trainers)))  # noqa: B023
        losses.append((found[0], found[1]))
    return follows(losses) | _medians(times[WARMUP:])


def follows(losses: list[tuple[float, float]]) -> Result:
    """Whether a system's losses follow the CPU's, which fall."""
    apart = float(torch.tensor([abs(a - b) / abs(b) for a, b in losses]).max())  # NaN is the largest
    fell = losses[-1][1] < losses[0][1]
    found: Result = {"verdict": "right", "apart": apart, "losses": [a for a, _ in losses]}
    if not apart <= APART:
        found |= {"verdict": "wrong", "reason": f"losses differ by {apart:.2g} from the CPU's"}
    elif not fell:
        found |= {"verdict": "wrong", "reason": "the losses do not fall"}
    return found


def _turn(run: Callable[[], Any], cpu: Callable[[], Any], cpu_alone: Callable[[], Any]) -> list[float]:
    """Seconds of the system, of torch's CPU with all threads, and of torch's CPU with one."""
    times = []
    for threads, function in ((THREADS, run), (THREADS, cpu), (1, cpu_alone)):
        torch.set_num_threads(threads)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(THREADS)
    return times


def _medians(times: list[list[float]]) -> Result:
    ours, *torchs = (statistics.median(column) for column in zip(*times, strict=True))
    return {"seconds": ours, "torch_seconds": min(torchs), "runs": len(times)}
