"""docs/<suite>-suite.md and .svg, written from a suite's record and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from coda_agent.evals import pages, svg
from coda_agent.evals.suite import CONTENDERS, LIMIT, Suite
from coda_agent.primitives.errors import CodaError

Cell = dict[str, Any]


def write_page(root: Path, suite: Suite) -> list[Path]:
    """Write both files from the latest record in evals/results/; the record, the page, the chart.

    Raises:
        CodaError: no record.
    """
    files = list((root / "evals" / "results").glob(f"{suite.name}-*.json"))
    if not files:
        hint = f"`coda-agent bench --suite {suite.name}` on a Hopper GPU makes one"
        raise CodaError(f"there is no record of suite {suite.name}", hint=hint)
    records = [(json.loads(file.read_text("utf-8")), file) for file in files]
    record, file = max(records, key=lambda pair: pair[0]["date"])
    order = [*suite.kernels]
    cells = [c for c in record["cells"].values() if "ours" in c["times"]]
    cells.sort(key=lambda c: (c["size"], order.index(c["kernel"])))
    sizes = dict.fromkeys(c["size"] for c in cells)
    by_size = {size: [c for c in cells if c["size"] == size] for size in sizes}
    names = [n for n in CONTENDERS if n != "gemm" and any(n in c["times"] for c in cells)]
    notes: dict[str, int] = {}
    page = pages.write(
        root / "docs" / f"{suite.name}-suite.md", "suite.md",
        suite=suite, record=file.relative_to(root).as_posix(), limit=LIMIT,
        rounds=max(c["rounds"] for c in cells),
        tables={size: [
            ["kernel", "tile", "GEMM, µs", "ours, µs", *(CONTENDERS[n] for n in names)],
            *(_row(c, names, notes) for c in here),
            ["**geometric mean**", "", "", "", *(_mean(here, "of_gemm", n) for n in names)],
        ] for size, here in by_size.items()},
        notes=notes,
        over_compile=[["S", "kernels", "over torch.compile", "over max-autotune"], *(
            [size, len(here), *(_mean(here, "over", n) for n in ("compile", "compile_max"))]
            for size, here in by_size.items()
        )],
        paper=_paper_rows(suite, cells),
        machines=dict.fromkeys(pages.machine(c["machine"]) for c in cells),
        missing=[k for k in suite.kernels if k not in {c["kernel"] for c in cells}],
    )  # fmt: skip
    shown = ("ours", "quack", "compile", "compile_max")
    panels = {
        f"S = {size}": {
            c["kernel"].removeprefix("gemm_"): {
                CONTENDERS[n]: c["of_gemm"][n]["ratio"] for n in shown if n in c["of_gemm"]
            }
            for c in here
        }
        for size, here in by_size.items()
    }
    chart = page.with_suffix(".svg")
    title = "Speed relative to the bare cuBLAS GEMM"
    chart.write_text(svg.bars(title, panels, base=1.0), encoding="utf-8")
    return [file, page, chart]


def _row(cell: Cell, names: Iterable[str], notes: dict[str, int]) -> list[str]:
    odd = ", ".join(f"{d} = {v}" for d, v in cell["sizes"].items() if v != cell["size"])
    row = [
        f"{cell['kernel']}{f' ({odd})' * bool(odd)}",
        cell["tiles"]["ours"],
        *(f"{cell['times'][n]['median_us']:.1f}" for n in ("gemm", "ours")),
    ]
    for name in names:
        ratio = cell["of_gemm"].get(name)
        said = cell["notes"].get(name) or cell["absent"].get(name)
        text = f"{ratio['ratio']:.3f}" if ratio else "–"
        if ratio and name == "ours":
            text = pages.interval(ratio)
        if said:
            text += f" [{notes.setdefault(f'{CONTENDERS[name]}: {said}', len(notes) + 1)}]"
        row.append(text)
    return row


def _mean(cells: list[Cell], figure: str, name: str) -> str:
    """The geometric mean of a contender's ratios, and over how many cells where some lack it."""
    ratios = [c[figure][name]["ratio"] for c in cells if name in c[figure]]
    of = f" of {len(ratios)}" * (len(ratios) < len(cells))
    return f"{geometric_mean(ratios):.3f}{of}" if ratios else "–"


def _paper_rows(suite: Suite, cells: list[Cell]) -> pages.Rows:
    rows: pages.Rows = [["kernel", "S", "paper, of its GEMM", "ours, of its GEMM", "by ratio",
                         "paper, µs", "ours, µs", "by time"]]  # fmt: skip
    for cell in cells:
        known = suite.kernels[cell["kernel"]]["reference_ms"].get(str(cell["size"]))
        if known is None:
            continue
        theirs, ours = known["gemm"] / known["paper"], cell["of_gemm"]["ours"]["ratio"]
        time, paper = cell["times"]["ours"]["median_us"], 1000 * known["paper"]
        rows.append([
            cell["kernel"], cell["size"], f"{theirs:.3f}", f"{ours:.3f}",
            f"**{ours / theirs:.3f}**", f"{paper:.0f}", f"{time:.1f}", f"{paper / time:.3f}",
        ])  # fmt: skip
    return rows
