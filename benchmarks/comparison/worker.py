"""One part of one system, measured in its own environment: python -m comparison.worker SYSTEM PART FILE

Every measurement is a step of a process that may die or hang (tools/workers.py). FILE gets a JSON line a task."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from workers import Died, Late, Limits, Log, Result

from comparison.cases import DTYPES, WRONG_ELSEWHERE, Case
from comparison.features import checks
from comparison.judging import first_line
from comparison.models import MODELS, TRAINING
from comparison.systems import SYSTEMS, System
from comparison.timing import latency, training

START = 60.0
"""Seconds for the imports of a process."""

Task = Callable[[System], Result]


def _cases(cases: dict[str, Case]) -> dict[str, Task]:
    return {name: lambda system, case=case: system.case(*case.make()) for name, case in cases.items()}


def tasks(system: str, part: str) -> dict[str, Task]:
    """The measurements of a part, by name. Raises ValueError for another part, and without such checks."""
    match part:
        case "cases":
            return _cases(WRONG_ELSEWHERE)
        case "dtypes":
            return _cases(DTYPES)
        case "models":
            return {name: lambda s, case=case: latency(s, *case.make()) for name, case in MODELS.items()}
        case "training":
            return {name: lambda s, name=name: training(s, name) for name in TRAINING}
        case "features":
            return {name: lambda s, name=name: checks(s)[name]() for name in checks(SYSTEMS[system]())}
    raise ValueError(f"no such part: {part!r}; there are cases, dtypes, models, training, features, operators")


_open: list[System] = []
"""The system of this process, once it is open."""


def opened(name: str) -> System:
    if not _open:
        _open.append(SYSTEMS[name]())
        _open[0].open()
    return _open[0]


def work(name: str, part: str, task: str, start: int) -> Iterator[Result]:
    """One measurement. What a system raises is its refusal."""
    warnings.simplefilter("ignore")
    try:
        with torch.set_grad_enabled(part == "training"):
            yield tasks(name, part)[task](opened(name))
    except Exception as error:
        yield {"verdict": "refused", "reason": first_line(error)}


def entry(name: str, strict: bool, limit: int, task: str, start: int) -> Iterator[Result]:
    """An entry of op_db by tools/eager.py, on this system's device."""
    opened(name)
    import eager

    yield from eager.work(limit, strict, task, start)


def died(reason: Died) -> Result:
    verdict = "not measured" if isinstance(reason, Late) else "crash"
    return {"verdict": verdict, "reason": reason.reason, "sample": 0, "cpu": {}}


def show(name: str, steps: list[Result], seconds: float) -> None:
    bad = "; ".join(f"{s['verdict']} {s.get('reason', '')}" for s in steps if s["verdict"] not in ("right", "random"))
    print(f"{seconds:6.0f} s  {name:50} {bad}"[:200], file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("part", help="cases, dtypes, models, training, features, operators; -strict: the CPU forbidden")
    parser.add_argument("file", type=Path)
    parser.add_argument("--step", type=float, default=60.0, help="seconds that a measurement may take")
    parser.add_argument("--total", type=float, default=600.0, help="seconds after which none is begun")
    parser.add_argument("--samples", type=int, default=3, help="of an entry of op_db")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="one of K entries of op_db")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    part, _, strict = options.part.partition("-")
    if strict:
        os.environ[SYSTEMS[options.system]().strict] = "1"
    if part == "operators":
        from opinfo import entries, shard

        names, measure = (
            shard(entries(), options.every),
            partial(entry, options.system, bool(strict), options.samples),
        )
    else:
        try:
            names, measure = list(tasks(options.system, part)), partial(work, options.system, part)
        except ValueError as error:
            parser.error(str(error))
    limits = Limits(options.step, START, deaths=1, total=options.total)
    Log(options.file).fill(measure, names, options.jobs, limits, died, show)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
