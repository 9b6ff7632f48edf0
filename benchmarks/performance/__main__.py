"""Measures the tables of docs/performance.md, each in a process of its own, and writes the page.

    python -m performance                        all tables on the best device
    python -m performance products attention     these anew; the others are kept
    python -m performance --only-page            only writes the page

Results are kept in results/performance-DEVICE.json, also of devices that were measured elsewhere: their files can be copied
there. A table that fails leaves its reason, and the others are measured all the same."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import RESULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="default: all")
    parser.add_argument("--device", help="of Lapilli: an index or part of a name")
    parser.add_argument("--only-page", action="store_true")
    parser.add_argument("--seconds", type=float, default=900.0, help="that one table may take")
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.tables[0], options.device, options.worker)
    RESULTS.mkdir(exist_ok=True)
    if not options.only_page:
        measure(options)
    from performance.page import write

    files = sorted(RESULTS.glob("performance-*.json"))
    write([json.loads(f.read_text()) for f in files], DOCS)
    print("docs/performance.md is written")
    return 0


def measure(options: argparse.Namespace) -> None:
    """Runs the tables and keeps their lines."""
    import lapilli
    from performance.tables import TABLES

    if unknown := set(options.tables) - set(TABLES):
        raise SystemExit(f"no table {', '.join(sorted(unknown))}: there are {', '.join(TABLES)}")
    devices = lapilli.devices()
    wanted = options.device or ""
    device = next((d for d in devices if wanted == str(d.index) or wanted.lower() in d.name.lower()), None)
    if device is None:
        raise SystemExit(
            f"no device {wanted!r}: there are {', '.join(f'{d.index} ({d.name})' for d in devices) or 'none'}"
        )
    key = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")[:40]
    file = RESULTS / f"performance-{key}.json"
    kept: dict[str, Any] = json.loads(file.read_text())["tables"] if file.exists() else {}
    for name in options.tables or TABLES:
        print(f"== {name}", file=sys.stderr, flush=True)
        lines = RESULTS / f"performance-{key}-{name}.jsonl"
        lines.unlink(missing_ok=True)
        command = [sys.executable, "-m", "performance", name, "--worker", str(lines), "--device", str(device.index)]
        try:
            done = subprocess.run(command, timeout=options.seconds).returncode
        except subprocess.TimeoutExpired:
            done = -1
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        if done:
            reason = f"not finished within {options.seconds:.0f} s" if done == -1 else f"exit code {done}"
            print(f"{name}: {reason}", file=sys.stderr, flush=True)
        if rows:
            kept[name] = rows
        lines.unlink(missing_ok=True)
        keep(file, key, device, kept)


def keep(file: Path, key: str, device: Any, tables: Mapping[str, Any]) -> None:
    """Writes what has been measured, after each table: a run that is cut loses one at most."""
    import torch

    from performance.tables import TABLES

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    told = {
        "key": key,
        "device": device.name,
        "circumstances": f"{datetime.date.today()}, driver {device.driver}, torch {torch.__version__} on {cuda}, {os.cpu_count()} "
        f"cores, load average {os.getloadavg()[0]:.1f} at the end.",
        "tables": {name: tables[name] for name in TABLES if name in tables},
    }
    file.write_text(json.dumps(told, indent=1))


def work(name: str, device: str | None, file: Path) -> int:
    """The lines of a table, written as they come."""
    import lapilli
    from performance.tables import TABLES, Options

    index = int(device or 0)
    small = lapilli.devices()[index].type == "cpu"
    failed = 0
    with file.open("a") as out:
        lines = TABLES[name].lines(Options(index, small))
        while True:
            try:
                row = next(lines)
            except StopIteration:
                return failed
            except Exception:  # what is measured so far is kept
                traceback.print_exc()
                return 1
            out.write(json.dumps(row.to_json()) + "\n")
            out.flush()
            times = ", ".join(f"{k} {v * 1e3:.3g} ms" for k, v in row.seconds.items())
            print(
                f"{row.case}: {times}; error {row.error if row.error is None else f'{row.error:.1e}'} {row.note}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
