"""Draws the pictures of the documentation: how Lapilli is built. They follow the reader's light or dark scheme, and kinds of boxes
are told apart by their outlines as well as by colours, so that they can be read in grey.

    python tools/pictures.py

Writes docs/pictures/*.svg; a test compares what is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

STYLE = """<style>
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1d2329; text-anchor: middle }
.title { font-weight: 600 } .small { font-size: 11px; fill: #4b5560 } .left { text-anchor: start }
.paper { fill: #ffffff }
.box { fill: #eef2f6; stroke: #66727f; stroke-width: 1.2 } .file { fill: #dbe9dc; stroke: #2f6b45; stroke-width: 2.4 }
.device { fill: #f3e6d8; stroke: #8a5a22; stroke-width: 1.2; stroke-dasharray: 5 3 }
.frame { fill: none; stroke: #98a2ad; stroke-width: 1 }
.way { fill: none; stroke: #4b5560; stroke-width: 1.5 } .head { fill: #4b5560 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ec } .small { fill: #aab4bf }
.paper { fill: #1e2129 } .box { fill: #2b323b; stroke: #8b97a4 } .file { fill: #20402c; stroke: #7fbf95 }
.device { fill: #43321d; stroke: #d0a268 } .frame { stroke: #56606c } .way { stroke: #aab4bf } .head { fill: #aab4bf }
}
</style>"""


@dataclass(frozen=True)
class Box:
    """A box with a name, and lines of what it does below the name."""

    x: float
    y: float
    width: float
    height: float
    name: str
    lines: Sequence[str] = ()
    kind: str = "box"

    def drawn(self) -> str:
        middle, count = self.x + self.width / 2, len(self.lines)
        top = self.y + self.height / 2 + 5 - 7.5 * count
        shape = (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"/>'
        )
        texts = [f'<text class="title" x="{middle}" y="{top}">{escape(self.name)}</text>']
        texts += [
            f'<text class="small" x="{middle}" y="{top + 15 * (k + 1)}">{escape(line)}</text>'
            for k, line in enumerate(self.lines)
        ]
        return "\n".join([shape, *texts])


def way(*points: tuple[float, float]) -> str:
    """Straight lines from point to point, with an arrow at the end."""
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="way" d="{path}" marker-end="url(#head)"/>'


def frame(x: float, y: float, width: float, height: float, name: str) -> str:
    return (
        f'<rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>\n'
        f'<text class="small left" x="{x + 10}" y="{y + 17}">{escape(name)}</text>'
    )


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG document. The title is read aloud by those that read pages."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 Z"/></marker></defs>',
        f'<rect class="paper" width="{width}" height="{height}"/>',
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def overview() -> str:
    """A model, one file, any device: for the README."""
    sources = ("PyTorch", "TorchScript", "ONNX", "GGUF")
    users = ("from Python, C, C++,", "Java and Kotlin")
    devices = ("GPUs of desktops", "GPUs of servers", "phones", "a CPU")
    boxes = [Box(20, 34 + 46 * k, 110, 34, name) for k, name in enumerate(sources)]
    boxes += [
        Box(170, 80, 130, 80, "compiler", ("fused kernels,", "in Python")),
        Box(340, 70, 120, 100, "model.lap", ("kernels, weights,", "a plan"), "file"),
        Box(500, 80, 130, 80, "player", ("no torch,", "no compiler")),
    ]
    boxes += [Box(670, 34 + 46 * k, 140, 34, name, kind="device") for k, name in enumerate(devices)]
    ways = [way((130, 51 + 46 * k), (150, 51 + 46 * k), (150, 120), (168, 120)) for k in range(4)]
    ways += [way((300, 120), (338, 120)), way((460, 120), (498, 120))]
    ways += [way((630, 120), (650, 120), (650, 51 + 46 * k), (668, 51 + 46 * k)) for k in range(4)]
    notes = [f'<text class="small" x="565" y="{184 + 15 * k}">{line}</text>' for k, line in enumerate(users)]
    vulkan = '<text class="small" x="740" y="224">by Vulkan</text>'
    return picture(830, 236, "A model of PyTorch, TorchScript, ONNX or GGUF becomes one file, which runs on any Vulkan device",
                   [*ways, *(box.drawn() for box in boxes), *notes, vulkan])  # fmt: skip


def architecture() -> str:
    """The stages, what goes from one to the next, and the ways in."""
    inside = [
        Box(40, 196, 118, 62, "capture", ("any source →", "ExportedProgram")),
        Box(188, 196, 118, 62, "legalize", ("functional calls,", "passes")),
        Box(336, 196, 118, 62, "lower", ("kernel IR:", "functions of indices")),
        Box(484, 196, 118, 62, "schedule", ("fusion, layouts,", "order")),
        Box(632, 196, 118, 62, "codegen", ("kernels: Slang", "→ SPIR-V")),
        Box(780, 196, 118, 62, "program", ("the writer of", "the file")),
    ]
    doors = [
        Box(40, 40, 148, 62, "lapilli.compile", ("a model,", "ahead of time")),
        Box(214, 40, 148, 62, "backend", ("torch.compile", '(backend="vulkan")')),
        Box(388, 40, 148, 62, "eager", ('the device "vulkan"', "of PyTorch")),
        Box(562, 40, 148, 62, "llm", ("language models", "from files to text")),
        Box(736, 40, 162, 62, "mobile, export", ("optimize_for_mobile,", "to_vulkan")),
    ]
    below = [
        Box(632, 330, 266, 46, "model.lap", ("kernels, constants, plans",), "file"),
        Box(
            632,
            420,
            266,
            62,
            "native player",
            ("C++20, the C interface lapilli.h;", "verifies, plans memory, records, runs"),
        ),
        Box(336, 420, 214, 62, "runtime", ("Program, Pool; scripts of", "what the GPU cannot do")),
        Box(40, 420, 236, 62, "C, C++, Java, Kotlin", ("lapilli.hpp, org.lapilli",)),
        Box(632, 530, 266, 40, "any Vulkan device", kind="device"),
    ]
    ways = [
        way((x + w / 2, 102), (x + w / 2, 160)) for x, w in ((40, 148), (214, 148), (388, 148), (562, 148), (736, 162))
    ]
    ways += [way((a.x + a.width, 227), (b.x - 2, 227)) for a, b in itertools.pairwise(inside)]
    ways += [
        way((632, 246), (604, 246)),
        way((839, 258), (839, 328)),
        way((765, 376), (765, 418)),
        way((550, 451), (630, 451)),
        way((158, 482), (158, 508), (700, 508), (700, 484)),
        way((765, 482), (765, 528)),
    ]
    frames = [
        frame(20, 14, 898, 106, "ways in"),
        frame(20, 164, 898, 124, "compiler.py calls the stages, each a folder of src/lapilli"),
        frame(20, 394, 898, 108, "what runs a file: no compiler, and no torch but for what the GPU cannot do"),
    ]
    said = "ir: the language of lower, schedule and codegen; graph: passes of legalize"
    remark = f'<text class="small left" x="40" y="278">{said}</text>'
    return picture(938, 590, "The stages of the compiler from a source to one file, the ways in, and what runs the file",
                   [*frames, *ways, *(box.drawn() for box in (*doors, *inside, *below)), remark])  # fmt: skip


PICTURES = {"overview.svg": overview, "architecture.svg": architecture}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
