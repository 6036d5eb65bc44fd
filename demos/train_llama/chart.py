"""Lines over steps as an SVG file, in panels, each with a band behind its lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#8b929c", "#e0861a", "#2f7de1")
_LEFT, _RIGHT, _HEIGHT, _GAP = 64, 748, 190, 56
_STYLE = """text { font: 11px system-ui, sans-serif; fill: #24292f } .end { text-anchor: end }
.title { font-weight: 600; font-size: 13px } .grid { stroke: #8884 } .band { fill: #8b929c55 }
.line { fill: none; stroke-width: 1.3 }
@media (prefers-color-scheme: dark) { text { fill: #d7dce2 } }"""


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: Over it.
        lines: Name to lines of that name, each a value a step; a name has one colour throughout.
        band: The lowest and the highest value of each step.
    """

    title: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    band: tuple[Sequence[float], Sequence[float]] | None = None


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The file's text; values that are not finite are left out."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    parts = [_text(_LEFT, 18, title, "title")]
    for i, name in enumerate(names):
        x = _LEFT + 150 * i
        parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{_COLOURS[i % 3]}"/>')
        parts.append(_text(x + 15, 37, name))
    for at, panel in enumerate(panels):
        parts += _drawn(panel, 66 + at * (_HEIGHT + _GAP), names)
    wide, high = _RIGHT + 12, 46 + len(panels) * (_HEIGHT + _GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">'
    return "\n".join(
        [head, f"<title>{escape(title)}</title><style>{_STYLE}</style>", *parts, "</svg>\n"]
    )


def _drawn(panel: Panel, top: float, names: Sequence[str]) -> list[str]:
    every = [line for lines in panel.lines.values() for line in lines] + [*(panel.band or ())]
    values = [v for line in every for v in line if math.isfinite(v)] or [0.0]
    low, high, steps = min(values), max(values), max(map(len, every), default=1)
    if high == low:
        low, high = low - 0.5, high + 0.5

    def point(step: int, value: float) -> str:
        x = _LEFT + (_RIGHT - _LEFT) * step / max(steps - 1, 1)
        return f"{x:.1f},{top + _HEIGHT * (high - value) / (high - low):.1f}"

    def points(line: Sequence[float]) -> list[str]:
        return [point(i, v) for i, v in enumerate(line) if math.isfinite(v)]

    parts = [_text(_LEFT, top - 8, panel.title, "title")]
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    unit *= next(m for m in (5, 2, 1) if (high - low) / (m * unit) >= 2)
    for i in range(math.ceil(low / unit), math.floor(high / unit) + 1):
        _, y = point(0, i * unit).split(",")
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_RIGHT}"/>')
        parts.append(_text(_LEFT - 6, float(y) + 4, f"{i * unit:.3g}", "end"))
    parts.append(_text(_LEFT, top + _HEIGHT + 16, "step 1"))
    parts.append(_text(_RIGHT, top + _HEIGHT + 16, str(steps), "end"))
    if panel.band:
        lowest, highest = map(points, panel.band)
        parts.append(f'<polygon class="band" points="{" ".join(lowest + highest[::-1])}"/>')
    for name, lines in panel.lines.items():
        colour = _COLOURS[names.index(name) % 3]
        for line in lines:
            drawn = " ".join(points(line))
            parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
    return parts


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'
