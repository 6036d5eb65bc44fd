"""Tables: rows of cells, the first the head, for people and JSON."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")
Rows = Sequence[Sequence[object]]

_NARROW = 12
"""No column is made narrower to fit a terminal."""
_ESCAPES = str.maketrans({m: f"\\{m}" for m in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;"})


def tabulate(items: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> Rows:
    """Make a row of each item, below the columns' heads."""
    return [tuple(columns), *(tuple(show(item) for show in columns.values()) for item in items)]


def filled(rows: Rows) -> Rows:
    """Leave out the columns that have dashes alone."""
    return [*zip(*(c for c in zip(*rows, strict=True) if {*c[1:]} != {"–"}), strict=True)]


def columns(rows: Rows, width: int | None = None) -> str:
    """Align rows to the left, two spaces apart.

    Args:
        width: What lines must fit, by wrapping cells of the widest columns but the first, or else
            by turning a table of more than three, which has a head; without it the last column is
            as wide as it likes.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = (width or math.inf) - 2 * (len(widths) - 1)
    if sum(widths) > room:
        while sum(widths) > room and max(widths[1:], default=0) > _NARROW:
            widths[widths.index(max(widths[1:]), 1)] -= 1
        if width and sum(widths) > room and len(widths) > 3:
            return _turned(cells, width)
        cells = [[*line] for row in cells for line in _wrapped(row, widths)]
    widths[-1:] = [0]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _turned(cells: Sequence[Sequence[str]], width: int) -> str:
    """Write the head down the left, and beside it the rows, as many as fit."""
    head, *rows = cells
    parts = list[list[Sequence[str]]]()
    left = 0
    for row in rows:
        left -= 2 + max(map(len, row))
        if left < 0:
            parts.append([])
            left = width - sum(2 + max(map(len, column)) for column in (head, row)) + 2
        parts[-1].append(row)
    return "\n\n".join(columns([*zip(head, *part, strict=True)], width) for part in parts)


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[str, ...]]:
    cells = (textwrap.wrap(cell, width or 1) for cell, width in zip(row, widths, strict=True))
    return zip_longest(*(cell or [""] for cell in cells), fillvalue="")


def markdown(rows: Rows) -> str:
    """Write rows as a Markdown table that shows texts as they are."""
    lines = [f"| {' | '.join(escape(str(cell)) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def escape(text: str) -> str:
    """Escape what Markdown would take for marks; the text becomes one line."""
    return " ".join(text.translate(_ESCAPES).split())


def by_head(rows: Rows) -> list[dict[str, object]]:
    """Name each row's cells by the head."""
    return [dict(zip(map(str, rows[0]), row, strict=True)) for row in rows[1:]]


def cell_text(value: object, form: str = "") -> str:
    """Write a cell in a form; a dash where there is nothing."""
    return "–" if value is None else f"{value:{form}}"


def ratio_text(ratio: float, low: float, high: float) -> str:
    """Write a ratio with its interval."""
    return f"{ratio:.3f} ({low:.3f}–{high:.3f})"


def shape_text(sizes: Mapping[str, int]) -> str:
    """Write extents as `4096³`, or as M×N×K, whatever their order."""
    extents = [sizes[dim] for dim in sorted(sizes, key="MNK".find)]
    if len(extents) == 3 and len(set(extents)) == 1:
        return f"{extents[0]}³"
    return "×".join(map(str, extents))
