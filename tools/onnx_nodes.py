"""The ONNX standard's tests of operators, compiled and run on the device: `make onnx`.

    python tools/onnx_nodes.py [--shard I/K] [NAME...]

Results go to a file of JSON lines; a run goes on where the last one stopped, and writes docs/onnx_nodes.md when every case has been
measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
RESULTS = ROOT / "build" / "onnx_nodes.jsonl"
PAGE = ROOT / "docs" / "onnx_nodes.md"


def main() -> None:
    import onnx_cases

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="0/1")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="cases to run again, whether they were measured or not"
    )
    options = parser.parse_args()
    number, count = map(int, options.shard.split("/"))
    cases = onnx_cases.cases()
    done = _done()
    for name in options.names or list(cases)[number::count]:
        if name in done and not options.names:
            continue
        outcome = onnx_cases.run(cases[name], "device")
        if outcome.what == "wrong":
            print(f"{name}: {outcome.message}")
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **asdict(outcome)}) + "\n")
    done = _done()
    if done.keys() >= cases.keys():
        PAGE.write_text(page(done, cases), encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} written")


def _done() -> dict[str, dict[str, Any]]:
    """What was measured, the last measurement of each case."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}


def page(done: dict[str, dict[str, Any]], cases: dict[str, Any]) -> str:
    """The page of results, one line for each operator that a test is about."""
    import onnx
    import onnx_cases

    whole = Counter(done[name]["what"] for name in cases)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, case in cases.items():
        about = "expanded" if "_expanded" in name else ", ".join(sorted(onnx_cases.operators(case)))
        groups[about].append(name)
    fixed = sum(done[name]["fixed"] for name in cases)
    host = sum(done[name]["on_cpu"] > 0 for name in cases)
    lines = [
        "# The ONNX standard's tests",
        "",
        f"Made by `make onnx`: the {len(cases)} tests of single operators in the package onnx {onnx.__version__}, compiled, run on",
        "lavapipe and compared with the standard's own numbers (tests/support/onnx_cases.py has the bounds).",
        "",
        f"- {whole['right']} right ({whole['right'] / len(cases):.1%}), {whole['refused']} refused, {whole['wrong']} wrong.",
        f"- In {fixed} of them an input that decides sizes is given as Python's numbers, which compiles it in.",
        f"- {host} have an operator that torch computes on the host.",
        "",
        "Refused are strings and files of pictures. *Expanded* are operators written out as the standard defines them.",
        "",
        "| operators of a test | right | refused | wrong | on the host |",
        "|---|---|---|---|---|",
    ]
    for about, names in sorted(groups.items()):
        what = Counter(done[n]["what"] for n in names)
        on_cpu = sum(done[n]["on_cpu"] > 0 for n in names)
        lines.append(
            f"| {about} | {what['right']}/{len(names)} | {what['refused'] or ''} | {what['wrong'] or ''} | {on_cpu or ''} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
