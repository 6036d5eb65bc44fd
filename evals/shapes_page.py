"""docs/<suite>.md and .svg of a suite with models, made from its record alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coda_agent.evals import pages, svg
from coda_agent.evals.contest import contenders
from coda_agent.evals.contest_page import FEW_ROWS, Cell, means
from coda_agent.evals.definitions import Suite

_OWN = ("ours", "gemm")
RANGES = {"1 to 128": (1, 128), "256 to 1024": (256, 1024), "2048 and more": (2048, 1 << 40),
          f"up to {FEW_ROWS}": (1, FEW_ROWS), "all": (1, 1 << 40)}  # fmt: skip
"""Ranges of rows that are summed up."""
_MEANS = {
    "over torch.compile, warm": "over compile", "steady": "steady over compile",
    "in a loop": "loop over compile", "of cuBLAS, warm": "of_gemm ours",
    "of cuBLAS, steady": "steady of_gemm ours", "over the best other, warm": "over best",
}  # fmt: skip
_FIGURES = {
    "Over torch.compile, warm": "{over[compile][ratio]:.2f}",
    "Of the bare cuBLAS product's speed, warm": "{of_gemm[ours][ratio]:.2f}",
    "Over torch.compile, in a loop": "{loop[over][compile][ratio]:.2f}",
    "Microseconds a call in a loop": "{loop[times][ours][median_us]:.0f}",
    "Tile": "{tiles[ours]}",
}
"""A table each: kernels down, rows across."""
_PLACE = "{model}, {kernel}, {product}, {size} rows"
_SLOWER = f"{_PLACE}: {pages.interval('over[compile]')}, {{tiles[ours]}}"
_ABSENT = f"{_PLACE}: {{absent[ours]}}"


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
    looped = [c for c in cells if "compile" in c.get("loop", {}).get("over", {})]
    within = {
        n: [c for c in cells if low <= c["size"] <= high] for n, (low, high) in RANGES.items()
    }
    pages.write(
        page, "shapes.md", suite=suite, cells=cells, record=file.relative_to(root).as_posix(),
        places=len(places), chart=chart.name, summary=means(("rows", "cells"), within, _MEANS),
        compared=len(compared), few_rows=FEW_ROWS, widths=benchmark.models,
        slower=[pages.filled(_SLOWER, c) for c in compared if c["over"]["compile"]["high"] < 1],
        loops=[(c["size"] <= FEW_ROWS, c["loop"]["over"]["compile"]["high"] < 1) for c in looped],
        tables={model: _tables(rows, sizes) for model, rows in models.items()},
        rounds=max((c["rounds"] for c in cells), default=0),
        unmeasured=[pages.filled(_ABSENT, c) for _, c in known if c not in cells],
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


def _tables(rows: dict[str, dict[int, Cell]], sizes: Iterable[int]) -> dict[str, pages.Rows]:
    """A table for each figure."""

    def across(text: str, by_size: dict[int, Cell]) -> list[str]:
        return [pages.filled(text, by_size[s]) if s in by_size else "" for s in sizes]

    return {
        head: [("kernel", *sizes), *((row, *across(text, rows[row])) for row in rows)]
        for head, text in _FIGURES.items()
    }
