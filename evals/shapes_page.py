"""docs/<suite>.md and .svg of a suite with models, made from its record alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coda_agent.evals import pages, svg
from coda_agent.evals.contest import contenders
from coda_agent.evals.contest_page import FEW_ROWS, Cell, mean, regime
from coda_agent.evals.definitions import Suite

_OWN = ("ours", "gemm")
RANGES = {"1 to 128": (1, 128), "256 to 1024": (256, 1024), "2048 and more": (2048, 1 << 40),
          f"up to {FEW_ROWS}": (1, FEW_ROWS), "all": (1, 1 << 40)}  # fmt: skip
"""Ranges of rows that are summed up."""


def write_page(root: Path, suite: Suite) -> list[Path]:
    """Write both files from the latest record in evals/results/; the record, the page, the chart.
    Without a record only the page, which says so."""
    benchmark, page = suite.measured(), root / "docs" / f"{suite.name}.md"
    chart = page.with_suffix(".svg")
    if not (found := pages.latest(root, suite.name)):
        return [pages.write(page, "shapes.md", suite=suite, cells=[])]
    record, file = found
    places = [place.key for place in benchmark.places(sizes=sorted(benchmark.sizes))]
    known = sorted(record["cells"].items(), key=lambda item: [*places, item[0]].index(item[0]))
    cells = [cell for _, cell in known if "ours" in cell["times"]]
    labels = {name: one.label for name, one in contenders().items()}
    for cell in cells:
        others = [(r["ratio"], labels[n]) for n, r in cell["over"].items() if n not in _OWN]
        if others:
            cell["over"]["best"] = dict(zip(("ratio", "name"), min(others), strict=True))
    sizes = sorted({cell["size"] for cell in cells})
    models = {
        m: rows for m in benchmark.models if (rows := _rows(c for c in cells if c["model"] == m))
    }
    compared = [c for c in cells if "compile" in c["over"]]
    looped = [c for c in cells if "compile" in regime(c, "loop")["over"]]
    pages.write(
        page, "shapes.md", suite=suite, cells=cells, record=file.relative_to(root).as_posix(),
        places=len(places), chart=chart.name, summary=_summary(cells),
        compared=len(compared), few_rows=FEW_ROWS, widths=benchmark.models,
        slower=[
            f"{_place(c)}: {pages.interval(c['over']['compile'])}, {c['tiles']['ours']}"
            for c in compared if c["over"]["compile"]["high"] < 1
        ],
        loops=[(c["size"] <= FEW_ROWS, c["loop"]["over"]["compile"]["high"] < 1) for c in looped],
        tables={model: _tables(rows, sizes) for model, rows in models.items()},
        rounds=max((c["rounds"] for c in cells), default=0),
        unmeasured=[f"{_place(c)}: {c['absent']['ours']}" for _, c in known if c not in cells],
        machines=dict.fromkeys(pages.machine(c["machine"]) for c in cells),
    )  # fmt: skip
    heat = {
        model: {
            row.removeprefix("gemm_"): {str(s): c["over"]["best"] for s, c in by_size.items()
                                        if "best" in c["over"]}
            for row, by_size in rows.items()
        }
        for model, rows in models.items()
    }  # fmt: skip
    title = "How many times as fast as the best other, warm, by rows"
    chart.write_text(svg.heat(title, heat, [*map(str, sizes)]), encoding="utf-8")
    return [file, page, chart]


def _rows(cells: Iterable[Cell]) -> dict[str, dict[int, Cell]]:
    """Cells by kernel and product, then by number of rows."""
    found: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        found.setdefault(f"{cell['kernel']}, {cell['product']}", {})[cell["size"]] = cell
    return found


def _place(cell: Cell) -> str:
    return f"{cell['model']}, {cell['kernel']}, {cell['product']}, {cell['size']} rows"


def _summary(cells: Sequence[Cell]) -> pages.Rows:
    """Geometric means by range of rows."""

    def within(name: str, where: str = "warm") -> list[Cell]:
        low, high = RANGES[name]
        return [regime(cell, where) for cell in cells if low <= cell["size"] <= high]

    def means(where: str, figure: str, contender: str) -> Callable[[str], str]:
        return lambda name: mean(within(name, where), figure, contender)

    return pages.tabulate(RANGES, {
        "rows": str, "cells": lambda name: len(within(name)),
        "over torch.compile, warm": means("warm", "over", "compile"),
        "steady": means("steady", "over", "compile"), "in a loop": means("loop", "over", "compile"),
        "of cuBLAS, warm": means("warm", "of_gemm", "ours"),
        "of cuBLAS, steady": means("steady", "of_gemm", "ours"),
        "over the best other, warm": means("warm", "over", "best"),
    })  # fmt: skip


def _tables(rows: dict[str, dict[int, Cell]], sizes: Sequence[int]) -> dict[str, pages.Rows]:
    """A table for each figure: kernels down, rows across."""

    def shown(where: str, figure: str, name: str, key: str, digits: int) -> Callable[[Cell], str]:
        def says(cell: Cell) -> str:
            found = regime(cell, where)[figure].get(name)
            return f"{found[key]:.{digits}f}" if found else "–"

        return says

    def column(says: Callable[[Cell], str], size: int) -> Callable[[str], str]:
        return lambda row: says(rows[row][size]) if size in rows[row] else ""

    figures = {
        "Over torch.compile, warm": shown("warm", "over", "compile", "ratio", 2),
        "Of the bare cuBLAS product's speed, warm": shown("warm", "of_gemm", "ours", "ratio", 2),
        "Over torch.compile, in a loop": shown("loop", "over", "compile", "ratio", 2),
        "Microseconds a call in a loop": shown("loop", "times", "ours", "median_us", 0),
        "Tile": lambda cell: cell["tiles"]["ours"],
    }
    return {
        head: pages.tabulate(rows, {"kernel": str, **{str(s): column(says, s) for s in sizes}})
        for head, says in figures.items()
    }
