"""How does a table become a picture, without a plotting library?

A log-log line chart as one SVG text: axes with decades, a legend, one line a series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 250, 50, 60
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b8860b", "#444444", "#0a9396", "#d1495b")


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), both over 0."""
    dashed: bool = False


def log_log(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """The chart as SVG. Needs at least one point."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_axis, y_axis = _decades(xs), _decades(ys)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + _share(x, x_axis) * inner_width,
            TOP + (1 - _share(y, y_axis)) * inner_height,
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="15">{escape(title)}</text>',
    ]
    for decade in range(x_axis[0], x_axis[1] + 1):
        x, y = at(10.0**decade, 10.0 ** y_axis[0])
        out.append(_line(x, TOP, x, y, "#dddddd"))
        out.append(_text(x, y + 18, f"1e{decade}", "middle"))
    for decade in range(y_axis[0], y_axis[1] + 1):
        x, y = at(10.0 ** x_axis[0], 10.0**decade)
        out.append(_line(x, y, WIDTH - RIGHT, y, "#dddddd"))
        out.append(_text(x - 6, y + 4, f"{10.0**decade:g}", "end"))
    out.append(_text(LEFT + inner_width / 2, HEIGHT - 18, x_label, "middle"))
    middle = TOP + inner_height / 2
    out.append(
        f'<text x="22" y="{middle:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 22 {middle:.1f})">{escape(y_label)}</text>'
    )
    for i, one in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        places = [at(*point) for point in sorted(one.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        if not one.dashed:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 10 + 20 * i
        x = WIDTH - RIGHT + 15
        out.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" '
            f'stroke-width="2"{dash}/>'
        )
        out.append(_text(x + 30, y + 4, one.name, "start"))
    return "\n".join([*out, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _share(value: float, axis: tuple[int, int]) -> float:
    return (math.log10(value) - axis[0]) / (axis[1] - axis[0])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
