"""A process that checks programs, and may crash or hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class Worker:
    """Takes questions (seed or program, way), gives answers; begins anew after a death, and after `life` programs."""

    def __init__(
        self, device: str | None, limit: float, life: int = 60, gpu_plans: bool = False, folding: bool = False
    ) -> None:
        self.device, self.limit, self.life, self.gpu_plans, self.folding = device, limit, life, gpu_plans, folding
        self.share = 0, 1  # this worker's place among others: each has its part of the processors
        self.process: Any = None
        self.count = 0

    def ask(self, question: tuple[Any, ...], limit: float | None = None) -> Answer:
        """The answer, or {"status": "crash" or "hang", "text": ...}; "torch" where torch ran alone, on the CPU."""
        if self.process is None or self.count >= self.life:
            self.begin()
        self.count += question[0] == "make"
        try:
            self.connection.send(question)
            allowed = (limit or self.limit) + 60 * self.fresh
            if not self.answered(allowed):
                self.stop()
                return {"status": self.ended("hang"), "text": f"no result within {allowed:.0f} s"}
            self.fresh = False
            answer: Answer = self.connection.recv()
            return answer
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode or 0
            self.stop()
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return {"status": self.ended("crash"), "text": f"the process ended with {ended}"}

    def ended(self, status: str) -> str:
        return status if self.stage.value else "torch"

    def answered(self, allowed: float) -> bool:
        """Waits so many seconds, six times that where the machine is busy with other things."""
        used, until = self.seconds(), time.monotonic() + 6 * allowed
        if self.connection.poll(allowed):
            return True
        while time.monotonic() < until and 0 <= used <= self.seconds() < used + allowed / 2:
            before = self.seconds()
            if self.connection.poll(allowed / 4):
                return True
            if self.seconds() == before:  # asleep: waiting for something that does not come
                return False
        return False

    def seconds(self) -> float:
        """Of a processor that the process and its children have used."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return -1
        return sum(int(f) for f in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    def begin(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.stage = context.Value("b", 0, lock=False)  # 1 while Lapilli is asked
        self.process = context.Process(
            target=_main, args=(theirs, self.device, self.gpu_plans, self.folding, self.share, self.stage), daemon=True
        )
        self.process.start()
        theirs.close()
        self.fresh, self.count = True, 0

    def stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.join(2)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
            self.process = None


def _main(
    connection: Connection, device: str | None, gpu_plans: bool, folding: bool, share: tuple[int, int], stage: Any
) -> None:
    place, jobs = share
    if hasattr(os, "sched_setaffinity") and jobs > 1:  # or each would start as many compilers as there are processors
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[place % len(processors) :: jobs] or processors)
    if device is not None:
        os.environ["LAPILLI_DEVICE"] = device
    if gpu_plans:
        os.environ["LAPILLI_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "lapilli-gpu-plans")
    import torch

    from lapilli.codegen import packing
    from lapilli.lower import scatter
    from whole_programs import families, generate, networks, ways  # networks: its families
    from whole_programs.program import Program

    del families, networks
    usual = packing.WORTH_COPYING, scatter._MANY_PAIRS, scatter._MANY, scatter._FEW_PLACES
    if gpu_plans:
        import as_gpu

        as_gpu.on_any_device()
        ways.TARGETS.update(fp32="gpu-fp32", fp16="gpu-fp16-matrix")
    if folding:
        from folding import install

        install()
    torch.set_num_threads(1)
    ways.stage = stage
    left: list[Any] = []
    smaller: Iterator[Program] = iter(())
    while True:
        try:
            what, *question = connection.recv()
        except EOFError:
            return
        if what == "make":
            ways.forget()
            answer: Answer = {"program": generate.program(question[0]).to_json()}
        elif what == "check":
            program = Program.of_json(question[0])
            # what large contractions do, and many additions, by small ones
            small = (1, 0, 0, 0) if program.seed % 2 else usual
            packing.WORTH_COPYING, scatter._MANY_PAIRS, scatter._MANY, scatter._FEW_PLACES = small
            outcome = ways.check(program, question[1])
            answer = {
                "status": outcome.status,
                "text": outcome.text,
                "elements": outcome.elements,
                "open": outcome.open,
            }
        else:
            from whole_programs import shrink

            if left != question:  # of this program, after so many
                smaller = islice(shrink.candidates(Program.of_json(question[0])), question[1], None)
            some = [p.to_json() for p in islice(smaller, 8)]
            answer, left = {"candidates": some}, [question[0], question[1] + len(some)]
        connection.send(answer)
