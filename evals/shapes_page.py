"""docs/<suite>.md and .svg of a suite with models, made from its record alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from coda_agent.evals import pages, svg
from coda_agent.evals.contest import contenders
from coda_agent.evals.contest_page import FEW_ROWS
from coda_agent.evals.definitions import Suite

Cell = dict[str, Any]

RANGES = {"1 to 128": (1, 128), "256 to 1024": (256, 1024), "2048 and more": (2048, 1 << 40),
          f"up to {FEW_ROWS}": (1, FEW_ROWS), "all": (1, 1 << 40)}  # fmt: skip
"""Ranges of rows that are summed up."""


def write_page(root: Path, suite: Suite) -> list[Path]:
    """Write both files from the latest record in evals/results/; the record, the page, the chart.
    Without a record only the page, which says so."""
    benchmark, page = suite.measured(), root / "docs" / f"{suite.name}.md"
    files = list((root / "evals" / "results").glob(f"{suite.name}-*.json"))
    if not files:
        return [pages.write(page, "shapes.md", suite=suite, cells=[])]
    records = [(json.loads(file.read_text("utf-8")), file) for file in files]
    record, file = max(records, key=lambda pair: pair[0]["date"])
    places = [place.key for place in benchmark.places(sizes=sorted(benchmark.sizes))]
    known = sorted(record["cells"].items(), key=lambda item: [*places, item[0]].index(item[0]))
    cells = [cell for _, cell in known if "ours" in cell["times"]]
    unmeasured = [cell for _, cell in known if "ours" not in cell["times"]]
    sizes = sorted({cell["size"] for cell in cells})
    models = {m: [c for c in cells if c["model"] == m] for m in benchmark.models}
    heat = {
        model: {
            row.removeprefix("gemm_"): {str(c["size"]): _best(c) for c in here}
            for row, here in _rows(found).items()
        }
        for model, found in models.items() if found
    }  # fmt: skip
    chart = page.with_suffix(".svg")
    slower = [c for c in cells if "compile" in c["over"] and c["over"]["compile"]["high"] < 1]
    looped = [c for c in cells if "compile" in c.get("loop", {}).get("over", {})]
    pages.write(
        page, "shapes.md", suite=suite, cells=cells, record=file.relative_to(root).as_posix(),
        places=len(places), chart=chart.name, summary=_summary(cells),
        compared=sum("compile" in c["over"] for c in cells), slower=[_slow(c) for c in slower],
        loops=[(c["size"] <= FEW_ROWS, c["loop"]["over"]["compile"]["high"] < 1) for c in looped],
        few_rows=FEW_ROWS,
        tables={m: _tables(found, sizes) for m, found in models.items() if found},
        rounds=max((c["rounds"] for c in cells), default=0), widths=benchmark.models,
        unmeasured=[f"{_place(c)}: {c['absent'].get('ours', '')}" for c in unmeasured],
        machines=dict.fromkeys(pages.machine(c["machine"]) for c in cells),
    )  # fmt: skip
    title = "How many times as fast as the best other, warm, by rows"
    chart.write_text(svg.heat(title, heat, [str(size) for size in sizes]), encoding="utf-8")
    return [file, page, chart]


def _rows(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells by kernel and product."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(f"{cell['kernel']}, {cell['product']}", []).append(cell)
    return found


def _place(cell: Cell) -> str:
    return f"{cell['model']}, {cell['kernel']}, {cell['product']}, {cell['size']} rows"


def _best(cell: Cell) -> tuple[float, str]:
    """Our speed over that of the fastest other, and who that is."""
    labels = {name: one.label for name, one in contenders().items()}
    others = [(r["ratio"], labels[n]) for n, r in cell["over"].items() if n not in ("ours", "gemm")]
    return min(others, default=(float("nan"), ""))


def _slow(cell: Cell) -> str:
    return f"{_place(cell)}: {pages.interval(cell['over']['compile'])}, {cell['tiles']['ours']}"


def _mean(cells: Iterable[Cell], says: Callable[[Cell], float | None]) -> str:
    found = [ratio for cell in cells if (ratio := says(cell)) is not None]
    return f"{geometric_mean(found):.3f}" if found else "–"


def _ratio(figure: str, name: str, regime: str = "") -> Callable[[Cell], float | None]:
    def says(cell: Cell) -> float | None:
        found = cell.get(regime, {}) if regime else cell
        return found.get(figure, {}).get(name, {}).get("ratio")

    return says


def _summary(cells: Sequence[Cell]) -> pages.Rows:
    """Geometric means by range of rows."""

    def within(name: str) -> list[Cell]:
        low, high = RANGES[name]
        return [cell for cell in cells if low <= cell["size"] <= high]

    def mean(*which: str) -> Callable[[str], str]:
        return lambda name: _mean(within(name), _ratio(*which))

    return pages.tabulate(RANGES, {
        "rows": str, "cells": lambda name: len(within(name)),
        "over torch.compile, warm": mean("over", "compile"),
        "steady": mean("over", "compile", "steady"),
        "in a loop": mean("over", "compile", "loop"),
        "of cuBLAS, warm": mean("of_gemm", "ours"),
        "of cuBLAS, steady": mean("of_gemm", "ours", "steady"),
        "over the best other, warm": lambda name: _mean(
            within(name), lambda c: found if (found := _best(c)[0]) == found else None
        ),
    })  # fmt: skip


def _tables(cells: Sequence[Cell], sizes: Sequence[int]) -> dict[str, pages.Rows]:
    """A table for each figure: kernels down, rows across."""

    def ratio(*which: str) -> Callable[[Cell], str]:
        return lambda c: f"{found:.2f}" if (found := _ratio(*which)(c)) is not None else "–"

    def microseconds(cell: Cell) -> str:
        times = cell.get("loop", {}).get("times", {})
        return f"{times['ours']['median_us']:.0f}" if "ours" in times else "–"

    figures = {
        "Over torch.compile, warm": ratio("over", "compile"),
        "Of the bare cuBLAS product's speed, warm": ratio("of_gemm", "ours"),
        "Over torch.compile, in a loop": ratio("over", "compile", "loop"),
        "Microseconds a call in a loop": microseconds,
        "Tile": lambda cell: cell["tiles"]["ours"],
    }
    by_size = {row: {c["size"]: c for c in here} for row, here in _rows(cells).items()}

    def column(says: Callable[[Cell], str], size: int) -> Callable[[str], str]:
        return lambda row: says(by_size[row][size]) if size in by_size[row] else ""

    return {
        head: pages.tabulate(
            by_size, {"kernel": str, **{str(size): column(says, size) for size in sizes}}
        )
        for head, says in figures.items()
    }
