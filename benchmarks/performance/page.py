"""docs/performance.md and its pictures, from the files of results: every number on the page comes from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from performance.plot import bars
from performance.tables import TABLES

HEAD = """# How fast Lapilli is

Made by `make performance` (on a software driver) or `python -m performance` (on any device): every table has torch in the same
process, and how far Lapilli's results are from float64's (relative to their norm). Times are medians in milliseconds. A bar
says how many times as fast Lapilli is as the fastest of torch's ways in the table. A token of language models, and encoders,
beside CUDA graphs: `benchmarks/tokens.py`.
"""


def write(results: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Writes the page and its pictures. results: by device, in the order of the page."""
    pictures = docs / "performance"
    pictures.mkdir(exist_ok=True)
    parts = [HEAD]
    for result in results:
        parts.append(f"\n## {result['device']}\n\n{result['circumstances']}\n")
        for name, rows in result["tables"].items():
            table = TABLES[name]
            parts.append(f"\n### {table.title}\n\n{table.text}\n\n{_table(rows)}\n")
            compared = [(r["case"], _times(r)) for r in rows if _times(r) is not None]
            if compared:
                file = f"{result['key']}-{name}.svg"
                title = f"{table.title}, {result['device']}"
                (pictures / file).write_text(bars(title, [(c, t) for c, t in compared if t is not None]))
                parts.append(f"\n![{table.title}: times as fast as torch's fastest way](performance/{file})\n")
    (docs / "performance.md").write_text("".join(parts))


def _times(row: Mapping[str, Any]) -> float | None:
    """How many times as fast as the fastest of torch's ways."""
    theirs = [t for system, t in row["seconds"].items() if not system.startswith("lapilli")]
    ours = row["seconds"].get("lapilli")
    return min(theirs) / ours if ours and theirs and "torch" in row["seconds"] else None


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns that no line has are left out."""
    systems = list(dict.fromkeys(s for r in rows for s in r["seconds"]))
    rates = any(r["flops"] for r in rows)
    errors = any(r["error"] is not None for r in rows)
    notes = any(r["note"] for r in rows)
    head = ["", *(f"{s}, ms" for s in systems), *(f"{s}, TFLOP/s" for s in systems if rates)]
    head += ["error"] * errors + [""] * notes
    lines = [head, ["---"] * len(head)]
    for r in rows:
        cells = [r["case"], *(_milliseconds(r["seconds"].get(s)) for s in systems)]
        if rates:
            cells += [_rate(r["flops"], r["seconds"].get(s)) for s in systems]
        cells += [f"{r['error']:.1e}" if r["error"] is not None else ""] * errors + [r["note"]] * notes
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _rate(flops: float | None, seconds: float | None) -> str:
    return "" if flops is None or seconds is None else f"{flops / seconds * 1e-12:.3g}"
