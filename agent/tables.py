"""Tables: rows of cells, the first row the head, for a terminal, for Markdown and as JSON data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Rows = Sequence[Sequence[object]]

_ESCAPES = str.maketrans({m: f"\\{m}" for m in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;"})


def tabulate(items: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> Rows:
    """Make a row of each item, below the columns' heads."""
    return [tuple(columns), *(tuple(show(item) for show in columns.values()) for item in items)]


def columns(rows: Rows) -> str:
    """Align rows to the left, two spaces apart; the last column is as wide as it likes."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1:] = [0]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Rows) -> str:
    """Write rows as a Markdown table that shows each cell's text as it is."""
    lines = [f"| {' | '.join(escape(str(cell)) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def escape(text: str) -> str:
    """Escape what Markdown would take for marks; the text becomes one line."""
    return " ".join(text.translate(_ESCAPES).split())


def by_head(rows: Rows) -> list[dict[str, object]]:
    """Name each row's cells by the head."""
    return [dict(zip(map(str, rows[0]), row, strict=True)) for row in rows[1:]]


def ratio_text(ratio: float, low: float, high: float) -> str:
    """Write a ratio with its interval."""
    return f"{ratio:.3f} ({low:.3f}–{high:.3f})"


def shape_text(sizes: Mapping[str, int]) -> str:
    """Write extents as `4096³`, or as M×N×K; evidence has its keys in the alphabet's order."""
    extents = [sizes[dim] for dim in sorted(sizes, key="MNK".find)]
    if len(extents) == 3 and len(set(extents)) == 1:
        return f"{extents[0]}³"
    return "×".join(map(str, extents))


def machine_text(about: Mapping[str, Any]) -> str:
    """Name a machine's GPU, or its device, and the versions on it."""
    gpu = about.get("gpu") or {}
    versions = {"driver": gpu.get("driver_version"), "CUDA": about.get("cuda")}
    versions |= about.get("packages", {})
    said = (f"{name} {version}" for name, version in versions.items() if version)
    return ", ".join([gpu.get("name") or about.get("device") or "unknown", *said])


def speed(cells: Iterable[Mapping[str, Any]]) -> Rows:
    """Tabulate the performance gate's cells that hold times, steady ones where they are there."""
    timed = [cell for cell in cells if cell.get("times")]
    warm = {"of GEMM": "of_gemm", "over compile": "over_compile"}
    shown: dict[str, Callable[[Any], Any]] = {
        head: lambda cell, key=key: cell[key] for head, key in warm.items()
    }
    if any("of_gemm" in (cell.get("steady") or {}) for cell in timed):
        for head, key in warm.items():
            shown[f"{head}, steady"] = lambda cell, key=key: (cell.get("steady") or {}).get(key)
    baselines = {"this kernel": "ours", "bare cuBLAS": "gemm", "torch.compile": "compile"}
    return tabulate(timed, {
        "dtype": lambda cell: cell["dtype"],
        "shape": lambda cell: shape_text(cell["sizes"]),
        **{f"{label}, µs": lambda cell, name=name: f"{cell['times'][name]['median_us']:.1f}"
           for label, name in baselines.items()},
        **{head: lambda cell, show=show: ratio_text(**r) if (r := show(cell)) else "–"
           for head, show in shown.items()},
        "TFLOP/s": lambda cell: f"{cell['tflops']:.0f}",
        "floor, µs": lambda cell: f"{cell['floor_us']:.1f}",
        "tile": lambda cell: cell["tile"],
    })  # fmt: skip
