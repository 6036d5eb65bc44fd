"""What records and pages are made of: JSON by the line, tables, means, and bars as an SVG."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Panel = Mapping[str, Mapping[str, float]]

_COLOURS = ("#2f7de1", "#e0861a", "#8b929c", "#9a6dd7", "#2aa876", "#d2556b")
_STYLE = """text { font: 11px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 13px } .grid { stroke: #8884; stroke-width: 1 }
.one { stroke: #24292f; stroke-width: 1.2; stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) { text { fill: #d7dce2 } .one { stroke: #d7dce2 } }"""
_WIDTH, _HEIGHT, _LEFT, _GAP = 960, 170, 48, 44


def write_record(path: Path, head: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Write a record: the head's keys, then `cells`, one a line; never half a file."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items())
    text = f'{json.dumps(head).removesuffix("}")}, "cells": {{\n{lines}\n}}}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first one is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def bars(title: str, panels: Mapping[str, Panel], *, base: float) -> str:
    """The text of an SVG: one panel under another, groups of bars along each, a dashed line at 1.

    Args:
        title: Over the whole.
        panels: Panel title to group to series to value. A series keeps its colour throughout; a
            value that is missing leaves a hole.
        base: Where bars start. Lengths are read from there, so only 0 and the dashed 1 make sense.
    """
    groups = [group for panel in panels.values() for group in panel.values()]
    series = list(dict.fromkeys(name for group in groups for name in group))
    values = [value for group in groups for value in group.values()] + [base, 1.0]
    low, high = math.floor(min(values) * 20) / 20, math.ceil(max(values) * 20) / 20
    step = next(s for s in (0.05, 0.1, 0.25, 0.5, 1, 5, 25, 125) if (high - low) / s <= 8)
    labels = [label for panel in panels.values() for label in panel]
    slanted = max(map(len, labels), default=0) > 4
    below = 120 if slanted else 30
    total = 56 + len(panels) * (_HEIGHT + _GAP) + below - _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        _text(_LEFT, 18, title, 'class="title"'),
    ]
    for i, name in enumerate(series):
        x = _LEFT + 150 * i
        parts += [_bar(x, 28, 10, 10, i), _text(x + 15, 37, name)]
    for p, (heading, panel) in enumerate(panels.items()):
        top = 62 + p * (_HEIGHT + _GAP)

        def y(value: float, top: float = top) -> float:
            return top + _HEIGHT * (high - value) / (high - low)

        parts.append(_text(_LEFT, top - 4, heading, 'class="title"'))
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
            parts.append(_line(y(i * step), "grid"))
            parts.append(_text(_LEFT - 6, y(i * step) + 4, f"{i * step:g}", 'text-anchor="end"'))
        slot = (_WIDTH - _LEFT - 8) / max(len(panel), 1)
        wide = 0.8 * slot / max(len(series), 1)
        for g, (label, group) in enumerate(panel.items()):
            left = _LEFT + g * slot + 0.1 * slot
            for name, value in group.items():
                i = series.index(name)
                ends = sorted((y(value), y(base)))
                tip = f"{label}, {name}: {value:.3f}"
                parts.append(_bar(left + i * wide, ends[0], wide, ends[1] - ends[0], i, tip))
            if p == len(panels) - 1:
                x, bottom = left + 0.4 * slot, top + _HEIGHT + 14
                turn = f'text-anchor="end" transform="rotate(-25 {x:.1f} {bottom})"'
                parts.append(_text(x, bottom, label, turn if slanted else 'text-anchor="middle"'))
        parts.append(_line(y(1.0), "one"))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _line(y: float, kind: str) -> str:
    return f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'


def _bar(x: float, y: float, wide: float, high: float, colour: int, tip: str = "") -> str:
    fill = _COLOURS[colour % len(_COLOURS)]
    size = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect {size} fill="{fill}"><title>{escape(tip)}</title></rect>'
