"""Random whole programs against torch: `make fuzz`.

    python tests/support/random_programs.py --seeds 0:1000 [--ways compile32,eager] [--seconds 600] [--jobs 2] [--report FILE]

A program of 10 to 60 calls is made from its seed, taken every way through Lapilli, and compared with torch in float64, within what
its results move when every intermediate result is disturbed by some units in its last place. What fails, crashes or hangs is made
as small as it gets, and printed as Python to be pasted. docs/notes/random-programs.md says what this has found."""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from whole_programs.generate import STRANGE, WIDE
from whole_programs.process import Worker
from whole_programs.program import Program
from whole_programs.shrink import closed, smallest

ALL = ["compile32", "compile16", "dynamo", "dynamo-dynamic", "grad", "repeated", "grad2", "train"]
ALL += ["eager", "eager-grad", "eager-grad2", "eager-train"]
BAD = ("wrong", "fails", "crash", "hang")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="FIRST:END, END left out")
    parser.add_argument("--new", action="store_true", help="seeds that nobody has had, from a number that is printed")
    parser.add_argument(
        "--strange", action="store_true", help="with --new: short programs of NaN, infinity and small sizes"
    )
    parser.add_argument(
        "--wide", action="store_true", help="with --new: calls that hardly read each other, of NaN and infinity too"
    )
    parser.add_argument("--ways", default=",".join(ALL))
    parser.add_argument("--each", type=int, default=0, help="how many of the ways a program takes, by its seed; 0: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no program is begun after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--life", type=int, default=60, help="programs that one process takes")
    parser.add_argument("--device", help="part of a device's name, or its index")
    parser.add_argument("--gpu-plans", action="store_true", help="what a GPU would run, whatever the device is")
    parser.add_argument("--folding", action="store_true", help="as by a driver that takes every number for finite")
    parser.add_argument("--report", type=Path, help="file of JSON lines, one a failure")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one program may take one way")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to make a failure small in")
    parser.add_argument("--show", action="store_true", help="print the programs instead")
    given = parser.parse_args()
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if given.new:
        start = random.SystemRandom().randrange(10**6, 10**9) + STRANGE * given.strange + WIDE * given.wide
        seeds = range(start, start + 10**6)
        print(f"seeds from {start} on: --seeds {start}:{start + 100} has them again", flush=True)
    ways = given.ways.split(",")
    if unknown := set(ways) - set(ALL):
        parser.error(f"no way {', '.join(sorted(unknown))}: there are {', '.join(ALL)}")
    if given.show:
        worker = Worker(given.device, given.limit, gpu_plans=given.gpu_plans, folding=given.folding)
        for seed in seeds:
            print(repro(Program.of_json(worker.ask(("make", seed))["program"]), ways[0]))
        worker.stop()
        return 0
    return Campaign(seeds, ways, given).run()


class Campaign:
    """All seeds, every way, by several processes."""

    def __init__(self, seeds: range, ways: list[str], given: argparse.Namespace) -> None:
        self.ways, self.given = ways, given
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for seed in seeds:
            self.waiting.put(seed)
        self.until = time.monotonic() + given.seconds
        self.counts: Counter[tuple[str, str]] = Counter()
        self.causes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.elements = self.open = self.programs = 0
        self.lock = threading.Lock()
        self.report = given.report.open("a") if given.report else None

    def run(self) -> int:
        threads = [threading.Thread(target=self.serve, args=(k,), daemon=True) for k in range(self.given.jobs)]
        for thread in threads:
            thread.start()
        signal.signal(signal.SIGTERM, self.stopped)
        for thread in threads:
            while thread.is_alive():
                thread.join(60)
                if thread.is_alive():
                    print(f"{self.programs} programs, {self.bad()} of their ways failed", file=sys.stderr, flush=True)
        return self.summary()

    def stopped(self, *_: Any) -> None:
        """A run that is cut off says what it has found."""
        self.summary()
        sys.stdout.flush()
        os._exit(1)

    def bad(self) -> int:
        return sum(self.counts[way, s] for way in self.ways for s in BAD)

    def summary(self) -> int:
        print(
            f"\n{self.programs} programs, {self.elements} elements compared, of them {self.open} without a definite value"
        )
        statuses = ["right", *BAD, "torch", "refused", "none"]
        print("".join(f"{s:>10}" for s in ["", "   ", *statuses]).strip())
        for way in self.ways:
            print(f"{way:>16}" + "".join(f"{self.counts[way, s]:>10}" for s in statuses))
        for title, counter in (("refused", self.refusals), ("failures", self.causes)):
            for cause, count in counter.most_common(25):
                print(f"{title}: {count:4} {cause}")
        return int(self.bad() > 0)

    def serve(self, place: int) -> None:
        worker = Worker(
            self.given.device,
            self.given.limit,
            self.given.life,
            gpu_plans=self.given.gpu_plans,
            folding=self.given.folding,
        )
        worker.share = place, self.given.jobs
        while time.monotonic() < self.until:
            try:
                seed = self.waiting.get_nowait()
            except queue.Empty:
                break
            made = worker.ask(("make", seed))
            if "program" not in made:
                with self.lock:  # which torch does alone
                    self.refusals[f"torch, while a program was made: {made['text']}"] += 1
                continue
            program = Program.of_json(made["program"])
            for way in self.chosen(seed):
                answer = worker.ask(("check", made["program"], way))
                with self.lock:
                    self.counts[way, answer["status"]] += 1
                    self.elements += answer.get("elements", 0)
                    self.open += answer.get("open", 0)
                    if answer["status"] in ("refused", "torch"):
                        self.refusals[re.sub(r"\d+", "#", answer["text"])[:110]] += 1
                if answer["status"] in BAD:
                    self.failed(seed, way, answer, self.shrunk(worker, program, way, answer))
            self.programs += 1
        worker.stop()

    def chosen(self, seed: int) -> list[str]:
        return random.Random(seed).sample(self.ways, self.given.each or len(self.ways))

    def shrunk(self, worker: Worker, program: Program, way: str, answer: dict[str, Any]) -> Program:
        until = time.monotonic() + self.given.shrink
        kind = _kind(answer)

        def fails(candidate: Program) -> bool:
            if time.monotonic() > until:
                raise TimeoutError
            limit = 20.0 if answer["status"] == "hang" else None
            return _kind(worker.ask(("check", candidate.to_json(), way), limit)) == kind

        found = re.match(r"result (\d+) \(n = (\d+)\)", answer["text"])
        if answer["status"] == "wrong" and found:  # the result that is wrong, first
            n, place = int(found[2]), int(found[1])
            for candidate in (closed(program, n), program):
                if place < len(program.outputs):
                    candidate = replace(candidate, outputs=(program.outputs[place],)).used()
                if candidate.arguments and fails(candidate):
                    program = candidate
                    break

        def ask(program: Program) -> Iterator[Program]:
            text, count = program.to_json(), 0
            while some := worker.ask(("shrink", text, count)).get("candidates", []):
                yield from map(Program.of_json, some)
                count += len(some)

        return smallest(program, fails, ask)

    def failed(self, seed: int, way: str, answer: dict[str, Any], program: Program | None) -> None:
        calls = "; ".join(s.text for s in program.steps) if program else ""
        with self.lock:
            self.causes[f"{way} {_kind(answer)}: {calls}"[:150]] += 1
            text = repro(program, way) if program else ""
            print(f"\n# seed {seed}, {way}: {answer['status']}: {answer['text']}\n{text}", flush=True)
            if self.report:
                line = {"seed": seed, "way": way, **answer, "calls": calls, "repro": text}
                if program:
                    line["program"] = program.to_json()
                self.report.write(json.dumps(line) + "\n")
                self.report.flush()


def _kind(answer: dict[str, Any]) -> str:
    """What has to stay the same while a failure becomes small."""
    if answer["status"] != "fails":
        return str(answer["status"])
    return "fails " + re.sub(r"[\d'\"]+.*", "", answer["text"].partition("\n")[0])[:60]


def repro(program: Program, way: str) -> str:
    """Python to paste."""
    lines = ["import torch, lapilli", "import torch.nn.functional as F", "inf, nan = float('inf'), float('nan')"]
    for leaf in program.leaves:
        if leaf.kind == "literal":
            tensor = leaf.make(1)
            data = tensor.tolist() if tensor.numel() <= 200 else f"... {tensor.numel()} numbers"
            lines.append(f"{leaf.name} = torch.tensor({data}, dtype={tensor.dtype}).reshape({tuple(tensor.shape)})")
        else:
            lines.append(
                f"{leaf.name} = {leaf.dtype} {leaf.kind} {leaf.shape} {leaf.layout} seed {leaf.seed} high {leaf.high}"
            )
    lines = [line if " = torch" in line or line[:1] not in "wx" else f"# {line}" for line in lines]
    lines += [f"{name} = {other}" for name, other in program.twice]
    lines += [program.source(), f"# {way}, n = {program.sizes}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
