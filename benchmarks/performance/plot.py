"""Bars as SVG: how many times as fast as torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _LINE, _LEFT, _RIGHT = 760, 26, 300, 70


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """An SVG document. values: labels, and how many times as fast as torch; the line at 1 is torch."""
    most = max([1.25, *(v for _, v in values)])
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = 44 + _LINE * len(values) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for k, (label, value) in enumerate(values):
        y = 44 + k * _LINE
        colour = "#2a7f62" if value >= 1 else "#c9762b"
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, value * scale):.1f}" height="18" rx="2" fill="{colour}"/>',
            f'<text x="{_LEFT + value * scale + 6:.1f}" y="{y + 14}">{value:.2f} ×</text>',
        ]
    x = _LEFT + scale
    bottom = 44 + _LINE * len(values)
    lines += [
        f'<line x1="{x:.1f}" y1="38" x2="{x:.1f}" y2="{bottom}" stroke="#444" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#444">torch</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
