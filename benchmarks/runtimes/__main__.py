"""Lapilli beside onnxruntime, ncnn, ExecuTorch, tinygrad and MLX on this machine: writes docs/runtimes.md.

    make runtimes                     environments under build/runtimes (some minutes), then some minutes of measuring
    make runtimes ARGS="--rounds 1"   a quick look

Each system is in an environment of its own, as pip installs it; what does not install, or does not run, is said in the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS
from comparison import machine

from runtimes.models import write
from runtimes.page import page

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "runtimes"
PAGE = REPOSITORY / "docs" / "runtimes.md"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """wanted: what pip installs, without which the system does not run. more: what only makes its files from PyTorch's."""

    wanted: tuple[str, ...]
    more: tuple[str, ...] = ()


ENVIRONMENTS = {
    "lapilli": Environment((str(REPOSITORY),)),
    "torch": Environment((TORCH,)),
    "onnxruntime": Environment(("onnxruntime==1.32.0",)),
    "ncnn": Environment(("ncnn",), ("pnnx", TORCH)),
    "executorch": Environment(("executorch==1.5.1", TORCH)),
    "tinygrad": Environment(("tinygrad",)),
    "mlx": Environment(("mlx[cpu]",)),
}
SYSTEMS = {"ncnn-vulkan": "ncnn"} | {name: name for name in ENVIRONMENTS}
"""The environment of each system."""


def install(name: str) -> dict[str, Any]:
    """Makes an environment, unless it is there: versions, bytes and packages; {"failed": …} where pip fails."""
    folder, facts = BUILD / name, BUILD / f"{name}.json"
    wanted = ENVIRONMENTS[name]
    known = json.loads(facts.read_text()) if facts.exists() else {}
    if known.get("wanted") == [*wanted.wanted, *wanted.more] and name != "lapilli":  # that one is of this source
        return dict(known)
    print(f"installing {name}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))

    def room() -> tuple[int, int]:
        return sum(f.stat().st_size for f in site.rglob("*") if f.is_file()), len(list(site.glob("*.dist-info")))

    before = room()
    try:
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted.wanted], check=True)
        after = room()
        subprocess.run([python, "-m", "pip", "install", "-q", "numpy", *wanted.more], check=True)
    except subprocess.CalledProcessError as error:
        return {"failed": f"pip install {' '.join(wanted.wanted)} fails with exit code {error.returncode}"}
    listed = json.loads(subprocess.check_output([python, "-m", "pip", "list", "--format", "json"]))
    found: dict[str, Any] = {"installed": after[0] - before[0], "packages": after[1] - before[1]}
    found |= {
        "wanted": [*wanted.wanted, *wanted.more],
        "version": {p["name"].lower(): p["version"] for p in listed}[name],
    }
    facts.write_text(json.dumps(found))
    return found


def prepare(folder: Path) -> None:
    """The models' files, Lapilli's programs of the ONNX files, and what pnnx makes for ncnn."""
    import lapilli

    write(folder)
    for file in sorted(folder.glob("*.onnx")):
        lapilli.compile(file).save(file.with_suffix(".lap"))
    pnnx = BUILD / "ncnn" / "bin" / "pnnx"
    for name, shape in (("convolutions", "[1,3,128,128]"), ("transformer", "[1,128,256]"), ("products", "[64,1024]")):
        if pnnx.exists():
            command = [str(pnnx), f"{name}.pt", f"inputshape={shape}", "fp16=0"]
            subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False)  # what is missing shows later


def measure(system: str, folder: Path) -> dict[str, Any]:
    """A worker's answer."""
    python = BUILD / SYSTEMS[system] / "bin" / "python"
    settings = os.environ | {"PYTHONPATH": str(REPOSITORY / "benchmarks")}
    try:
        done = subprocess.run(
            [str(python), "-m", "runtimes.worker", system, str(folder)],
            env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=300, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": "no answer in five minutes"}
    if done.returncode:
        return {"failed": f"exit code {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=3, help="each has all systems in turn; 0: only writes the page anew"
    )
    options = parser.parse_args()
    if options.rounds == 0:
        told = json.loads((RESULTS / "runtimes.json").read_text())
        PAGE.write_text(page(told["installed"], told["rounds"], told["about"]))
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    installed = {name: install(name) for name in ENVIRONMENTS}
    prepare(BUILD / "models")
    started, load, others = datetime.datetime.now(datetime.UTC), machine.load(), machine.watch()
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for system, name in SYSTEMS.items():
            if "failed" not in installed[name]:
                print(f"== {system}", file=sys.stderr)
                rounds.setdefault(system, []).append(measure(system, BUILD / "models"))
    about = {
        "started": started.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": (load, machine.load()), "others": others(),
        "rounds": options.rounds, "clang": shutil.which("clang") is not None,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "runtimes.json").write_text(
        json.dumps({"installed": installed, "rounds": rounds, "about": about}, indent=1)
    )
    PAGE.write_text(page(installed, rounds, about))
    print("docs/runtimes.md is written")


if __name__ == "__main__":
    main()
