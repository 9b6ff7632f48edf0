"""Loads and runs damaged programs, and says what went wrong: `hostile_process.py COUNT SEED...`. A line of JSON counts them."""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import hostile
import numpy as np
import torch

from lapilli import LapilliError, Limits
from lapilli.runtime.check import admit
from lapilli.runtime.description import Description
from lapilli.runtime.host import Permission
from lapilli.runtime.interface import METADATA_KEY, interfaces
from lapilli.runtime.program import Program

FORBIDDEN = ("os.", "subprocess.", "ctypes.", "socket.", "shutil.", "tempfile.", "urllib.", "webbrowser.", "pickle.", "marshal.",
             "sys._", "pty.", "ftplib.", "http.", "glob.", "code.__new__", "builtins.input")  # fmt: skip
KNOWN = {name.partition(".")[0] for name in sys.modules} | {"sympy", "mpmath"}
LIMITS = Limits(bytes=1 << 24, seconds=60, calls=500)  # what is measured is the processor, others use it too

watching = False
seen: list[str] = []
last: list[LapilliError] = []


def watch(event: str, args: Any) -> None:
    if not watching:
        return
    imported = event == "import" and str(args[0]).partition(".")[0] not in KNOWN
    written = event == "open" and isinstance(args[1], str) and args[1] not in ("r", "rb")
    if imported or written or event.startswith(FORBIDDEN):
        seen.append(f"{event} {args!r}"[:300])


def attempt(methods: Any, description: Description, permission: Permission) -> str:
    """What became of one: "refused", "failed" at its run, "ran"."""
    with hostile.deep_recursion():
        text = json.dumps(methods)
    try:
        changed = replace(description, metadata={METADATA_KEY: text})
        found = interfaces(changed)
        scripts = [(i.script, i.inputs, len(i.outputs)) for i in found if i.script is not None]
        admit(scripts, changed, permission)
    except LapilliError:
        return "refused"
    try:
        with Program(hostile.program(text), permission=permission, limits=LIMITS) as program:
            x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
            for method in program.methods.values():
                method(*[x] * len(method.inputs))
    except LapilliError as error:
        last[:] = [error]
        return "failed"
    return "ran"


def main(count: int, seeds: list[int]) -> None:
    global watching
    good = hostile.everything()
    description = Description.of(hostile.program(good))
    permission = Permission.of(True)
    torch.set_num_threads(1)
    assert attempt(good, description, permission) == "ran", last
    sys.addaudithook(watch)
    counts: dict[str, int] = {}
    rngs = [random.Random(seed) for seed in seeds]
    for number in range(count * len(rngs)):
        methods = hostile.damaged(good, rngs[number % len(rngs)])
        start = time.process_time()
        watching = True
        try:
            outcome = attempt(methods, description, permission)
        except BaseException:
            print(f"case {number}: {json.dumps(methods)[:4000]}", file=sys.stderr)
            raise
        finally:
            watching = False
        seconds = time.process_time() - start
        if seen or seconds > 1:
            sys.exit(f"case {number} took {seconds:.1f} s and did {seen}: {json.dumps(methods)[:4000]}")
        counts[outcome] = counts.get(outcome, 0) + 1
    print(json.dumps(counts))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), list(map(int, sys.argv[2:])))
