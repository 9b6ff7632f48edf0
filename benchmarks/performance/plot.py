"""Bars as SVG: how many times as fast as torch. They follow the reader's light or dark scheme, and can be read in grey: bars that
do not reach torch's line are hollow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """<style>
text { fill: #1d2329 } .paper { fill: #ffffff } .line { stroke: #4b5560 } .torch { fill: #4b5560 }
.faster { fill: #2a7f62; stroke: #2a7f62 } .slower { fill: none; stroke: #b3611a; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ec } .paper { fill: #1e2129 } .line { stroke: #aab4bf } .torch { fill: #aab4bf }
.faster { fill: #57b794; stroke: #57b794 } .slower { stroke: #e39a55 }
}
</style>"""
_WIDTH, _LINE, _LEFT, _RIGHT = 760, 26, 300, 70


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """An SVG document. values: labels, and how many times as fast as torch; the line at 1 is torch."""
    most = max([1.25, *(v for _, v in values)])
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = 44 + _LINE * len(values) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        _STYLE,
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text x="12" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for k, (label, value) in enumerate(values):
        y = 44 + k * _LINE
        kind = "faster" if value >= 1 else "slower"
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{max(1.0, value * scale):.1f}" height="18" rx="2"/>',
            f'<text x="{_LEFT + value * scale + 6:.1f}" y="{y + 14}">{value:.2f} ×</text>',
        ]
    x = _LEFT + scale
    bottom = 44 + _LINE * len(values)
    lines += [
        f'<line class="line" x1="{x:.1f}" y1="38" x2="{x:.1f}" y2="{bottom}" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" class="torch">torch</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
