"""docs/performance.md and its pictures, from the files of results. What they lack stays on the page: results of other devices are
on other machines.
"""

from __future__ import annotations

import re
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
_SINCE = "Measured since then: "


def write(results: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Writes the page and its pictures. results: by device; tables and devices that none of them has are kept as they are."""
    page, pictures = docs / "performance.md", docs / "performance"
    pictures.mkdir(exist_ok=True)
    _, devices = _parts(page.read_text(encoding="utf-8") if page.exists() else "", "##")
    for result in results:
        devices[result["device"]] = _section(result, devices.get(result["device"], ""), pictures)
    page.write_text(HEAD + _joined(devices, "##"), encoding="utf-8")


def _parts(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """What comes before the first heading, and what follows each."""
    before, *found = re.split(rf"^{mark} (.*)\n", text, flags=re.M)
    return before.strip(), {title: body.strip() for title, body in zip(found[::2], found[1::2], strict=True)}


def _joined(parts: Mapping[str, str], mark: str) -> str:
    return "".join(f"\n{mark} {title}\n\n{body}\n" for title, body in parts.items())


def _section(result: Mapping[str, Any], before: str, pictures: Path) -> str:
    """Of a device. before: what the page has of it; the circumstances of tables that are kept are kept, too."""
    told, tables = _parts(before, "###")
    measured = {TABLES[name].title: _body(result, name, pictures) for name in result["tables"]}
    if tables.keys() <= measured.keys():
        told = result["circumstances"]
    else:
        told = f"{told.partition(_SINCE)[0].strip()}\n\n{_SINCE}{', '.join(measured)}: {result['circumstances']}"
    tables |= measured
    order = [table.title for table in TABLES.values()]
    titles = sorted(tables, key=lambda title: order.index(title) if title in order else len(order))
    return f"{told}\n{_joined({title: tables[title] for title in titles}, '###')}".strip()


def _body(result: Mapping[str, Any], name: str, pictures: Path) -> str:
    """Of a table; draws its picture."""
    table, rows = TABLES[name], result["tables"][name]
    text = f"{table.text}\n\n{_table(rows)}"
    compared = [(r["case"], times) for r in rows if (times := _times(r)) is not None]
    if compared:
        file = f"{result['key']}-{name}.svg"
        drawn = bars(f"{table.title}, {result['device']}", compared)
        (pictures / file).write_text(drawn, encoding="utf-8")
        text += f"\n\n![{table.title}: times as fast as torch's fastest way](performance/{file})"
    return text


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
