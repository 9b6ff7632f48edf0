"""What stops most: operators and errors by how many models of the zoo and entries of op_db they stop.

python tools/blockers.py [--opdb FILE] [--zoo FILE]"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import opdb
import zoo
from workers import Log

OPERATOR = re.compile(r"\b[a-z_]\w*\.\w+\.\w+\b")
FOLLOWS = "does too little between operators of the CPU"
"""The partitioner's reason for what is on the CPU because its neighbours are."""
Steps = Mapping[str, Mapping[str, Any]]


def causes(found: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a step from being right, or from running on the GPU alone."""
    causes = [(operator, reason) for operator, reason in found["cpu"] if not reason.startswith(FOLLOWS)]
    yield from (f"on the CPU: {operator} ({plain(reason)})" for operator, reason in causes)
    if found["verdict"] in ("right", "unexportable"):
        return
    reason = found["reason"]
    missing = OPERATOR.findall(reason) if "no GPU lowering" in reason else []
    yield from (f"no lowering: {operator}" for operator in missing)
    if not missing:
        yield f"{found['verdict']}: {plain(reason)}"


def plain(reason: str) -> str:
    """A reason without what differs between models: numbers, names of values."""
    reason = re.sub(r"(?<![\w.])-?\d[\d.]*(e-?\d+)?", "N", reason)
    return re.sub(r"(_N)+\b|_\d+\b", "", reason)[:160]


def count(opdb_tasks: Steps, zoo_tasks: Steps) -> list[tuple[str, list[str], list[str]]]:
    """(cause, models, entries), those that stop most models first."""
    models: dict[str, list[str]] = defaultdict(list)
    entries: dict[str, list[str]] = defaultdict(list)
    for tasks, stopped in ((zoo_tasks, models), (opdb_tasks, entries)):
        for name, task in tasks.items():
            for cause in dict.fromkeys(c for step in task["steps"] for c in causes(step)):
                stopped[cause].append(name)
    every = models.keys() | entries.keys()
    ordered = sorted(every, key=lambda c: (-len(models[c]), -len(entries[c]), c))
    return [(cause, models[cause], entries[cause]) for cause in ordered]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opdb", type=Path, default=opdb.RESULTS)
    parser.add_argument("--zoo", type=Path, default=zoo.RESULTS)
    options = parser.parse_args()
    opdb_tasks, zoo_tasks = Log(options.opdb).tasks, Log(options.zoo).tasks
    print(f"{len(zoo_tasks)} models and {len(opdb_tasks)} op_db entries measured\nmodels entries  cause")
    for cause, models, entries in count(opdb_tasks, zoo_tasks):
        examples = ", ".join([m.partition("/")[2] for m in models[:3]] + entries[:4])
        print(f"{len(models):6} {len(entries):7}  {cause}  [{examples}]")


if __name__ == "__main__":
    main()
