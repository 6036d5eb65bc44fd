"""Pages and charts of suites, written from a benchmark's record and from nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from coda_agent.evals import pages, svg
from coda_agent.evals.contest import contenders
from coda_agent.evals.definitions import Suite
from coda_agent.evals.workloads import LIMIT
from coda_agent.primitives.errors import CodaError

Cell = dict[str, Any]

REGIMES = ("idle", "warm", "steady")
FEW_ROWS = 512
"""Up to so many rows a shape has few."""
_DRAWN = ("ours", "quack", "compile", "compile_max")

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
    """Write docs/<suite>-suite.md and .svg from the latest record; the record, the page, the chart.

    Raises:
        CodaError: no record.
    """
    benchmark = suite.measured()
    if not (found := pages.latest(root, suite.name)):
        hint = f"`coda-agent bench --suite {suite.name}` on a Hopper GPU makes one"
        raise CodaError(f"there is no record of suite {suite.name}", hint=hint)
    record, file = found
    order = [*benchmark.kernels]
    cells = [c for c in record["cells"].values() if "ours" in c["times"]]
    cells.sort(key=lambda c: (c["size"], order.index(c["kernel"])))
    sizes = dict.fromkeys(c["size"] for c in cells)
    by_size = {size: [c for c in cells if c["size"] == size] for size in sizes}
    labels = {name: one.label for name, one in contenders().items()}
    shown = {n: labels[n] for n in labels if n != "gemm" and any(n in c["times"] for c in cells)}
    streamed = any(c.get("steady", {}).get("of_gemm") for c in cells)
    said = (_note(cell, name, label) for cell in cells for name, label in shown.items())
    notes = {note: i for i, note in enumerate(dict.fromkeys(filter(None, said)), 1)}
    over = {"over torch.compile": "over compile", "over max-autotune": "over compile_max"}
    over |= {"over torch.compile, steady": "steady over compile"} if streamed else {}
    page = pages.write(
        root / "docs" / f"{suite.name}-suite.md", "contest.md",
        suite=suite, benchmark=benchmark, record=file.relative_to(root).as_posix(), limit=LIMIT,
        rounds=max(c["rounds"] for c in cells),
        tables={size: _table(here, shown, notes, streamed) for size, here in by_size.items()},
        streamed=streamed, notes=notes, over_compile=means(("S", "kernels"), by_size, over),
        independent=_independent(root, suite), few_rows=FEW_ROWS,
        machines=dict.fromkeys(pages.machine(c["machine"]) for c in cells),
        missing=[k for k in benchmark.kernels if k not in {c["kernel"] for c in cells}],
    )  # fmt: skip
    panels = {
        f"S = {size}": {
            c["kernel"].removeprefix("gemm_"): {
                labels[n]: c["of_gemm"][n]["ratio"] for n in _DRAWN if n in c["of_gemm"]
            }
            for c in here
        }
        for size, here in by_size.items()
    }
    chart = page.with_suffix(".svg")
    title = "Speed relative to the bare cuBLAS GEMM, warm"
    chart.write_text(svg.bars(title, panels, base=1.0), encoding="utf-8")
    return [file, page, chart]


def _note(cell: Cell, name: str, label: str) -> str:
    """How a contender does less than ours, or why nothing."""
    said = cell["notes"].get(name) or cell["absent"].get(name)
    return f"{label}: {said}" if said else ""


def _table(
    cells: Sequence[Cell], shown: dict[str, str], notes: dict[str, int], streamed: bool
) -> pages.Rows:
    """A row for each kernel: each contender's speed as a share of cuBLAS's; then their means."""

    def kernel(cell: Cell) -> str:
        odd = ", ".join(f"{d} = {v}" for d, v in cell["sizes"].items() if v != cell["size"])
        return f"{cell['kernel']} ({odd})" if odd else cell["kernel"]

    def share(cell: Cell, name: str, label: str) -> str:
        field, note = f"of_gemm[{name}]", _note(cell, name, label)
        text = pages.interval(field) if name == "ours" else f"{{{field}[ratio]:.3f}}"
        return pages.filled(text, cell) + (f" [{notes[note]}]" if note else "")

    rows = pages.tabulate(cells, {
        "kernel": kernel, "tile": "{tiles[ours]}",
        "GEMM, µs": "{times[gemm][median_us]:.1f}", "ours, µs": "{times[ours][median_us]:.1f}",
        **{label: lambda c, n=name, x=label: share(c, n, x) for name, label in shown.items()},
        **({"ours, steady": pages.interval("steady[of_gemm][ours]")} if streamed else {}),
    })  # fmt: skip
    of_gemm = [mean(cells, "of_gemm", name) for name in shown]
    of_gemm += [mean(cells, "steady", "of_gemm", "ours")] * streamed
    return [*rows, ["**geometric mean**", "", "", "", *of_gemm]]


def means(
    head: Sequence[str], groups: Mapping[Any, Sequence[Cell]], fields: Mapping[str, str]
) -> pages.Rows:
    """A row for each group of cells: its name, how many there are, and the mean of each field, as
    "steady over compile"."""
    return [(*head, *fields), *(
        (name, len(cells), *(mean(cells, *field.split()) for field in fields.values()))
        for name, cells in groups.items()
    )]  # fmt: skip


def mean(cells: Sequence[Cell], *field: str) -> str:
    """The geometric mean of the ratios that cells have in a field, and over how many of them where
    some lack it."""
    found = (functools.reduce(lambda part, key: part.get(key, {}), field, c) for c in cells)
    ratios = [ratio["ratio"] for ratio in found if ratio]
    of = f" of {len(ratios)}" * (len(ratios) < len(cells))
    return f"{geometric_mean(ratios):.3f}{of}" if ratios else "–"


def _independent(root: Path, suite: Suite) -> dict[str, Any]:
    """What another clock measured, from evals/results/independent-<suite>.json; nothing where there
    is no such file."""
    file = root / "evals" / "results" / f"independent-{suite.name}.json"
    if not file.is_file():
        return {}
    found = json.loads(file.read_text("utf-8"))
    beside: pages.Rows = [("kernel", "S", *REGIMES)]
    ahead: pages.Rows = [
        ("S", "regime", "raw partials: mean", "least", "most", "final results: mean")
    ]
    for size in dict.fromkeys(row["size"] for row in found["beside_paper"]):
        rows = [row for row in found["beside_paper"] if row["size"] == size]
        means = {
            g: [geometric_mean(c) for c in zip(*(r[g] for r in rows), strict=True)] for g in REGIMES
        }
        beside += [(r["kernel"], size, *(_shares(r[g]) for g in REGIMES)) for r in rows]
        beside.append(("**geometric mean**", size, *(f"**{_shares(means[g])}**" for g in REGIMES)))
        for g in REGIMES:
            ratios = sorted((r[g][0] / r[g][2], r["kernel"]) for r in rows)
            (raw, final, paper), ends = means[g], (ratios[0], ratios[-1])
            said = (f"{ratio:.3f} ({kernel})" for ratio, kernel in ends)
            ahead.append((size, g, f"{raw / paper:.3f}", *said, f"{final / paper:.3f}"))
    shapes = pages.tabulate(found["shapes"], {
        "kernel": "{kernel}",
        "M×N×K": lambda c: pages.label(c["sizes"]),
        "tile": "{tile}",
        "cuBLAS, µs": "{gemm_us}",
        "of cuBLAS, idle": "{of_gemm:.3f}",
        "over torch.compile, idle": "{over_compile[idle]:.2f}",
        "warm": "{over_compile[warm]:.2f}",
        "host µs a call: ours / compile / torch.mm":
            lambda c: " / ".join(map(str, c["host_us"] or ["–"])),
    })  # fmt: skip
    few = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] <= FEW_ROWS]
    many = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] > FEW_ROWS]
    return {**found, "beside": beside, "ahead": ahead, "rows": shapes, "few": few, "many": many}


def _shares(ratios: Iterable[float]) -> str:
    return " / ".join(f"{ratio:.3f}" for ratio in ratios)


def write_shapes(root: Path, suite: Suite) -> list[Path]:
    """Write docs/<suite>.md and .svg of a suite with models from the latest record; the record, the
    page, the chart. Without a record only the page, which says so."""
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
