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

REGIMES = ("idle", "warm", "steady")
FEW_ROWS = 512
"""Up to so many rows a shape has few."""


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
    streamed = any(_steady(c)["of_gemm"] for c in cells)
    notes: dict[str, int] = {}
    page = pages.write(
        root / "docs" / f"{suite.name}-suite.md", "suite.md",
        suite=suite, record=file.relative_to(root).as_posix(), limit=LIMIT,
        rounds=max(c["rounds"] for c in cells),
        tables={size: [
            ["kernel", "tile", "GEMM, µs", "ours, µs", *(CONTENDERS[n] for n in names),
             *["ours, steady"] * streamed],
            *([*_row(c, names, notes), *[_stream(c)] * streamed] for c in here),
            ["**geometric mean**", "", "", "", *(_mean(here, "of_gemm", n) for n in names),
             *[_mean([*map(_steady, here)], "of_gemm", "ours")] * streamed],
        ] for size, here in by_size.items()},
        streamed=streamed,
        notes=notes,
        over_compile=[["S", "kernels", "over torch.compile", "over max-autotune",
                       *["over torch.compile, steady"] * streamed], *(
            [size, len(here), *(_mean(here, "over", n) for n in ("compile", "compile_max")),
             *[_mean([*map(_steady, here)], "over", "compile")] * streamed]
            for size, here in by_size.items()
        )],
        independent=_independent(root, suite), few_rows=FEW_ROWS,
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
    title = "Speed relative to the bare cuBLAS GEMM, warm"
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


def _steady(cell: Cell) -> Cell:
    """A cell's figures of the steady regime, as it has those of the warm one."""
    return cell.get("steady", {"of_gemm": {}, "over": {}})


def _stream(cell: Cell) -> str:
    ratio = _steady(cell)["of_gemm"].get("ours")
    return pages.interval(ratio) if ratio else "–"


def _mean(cells: list[Cell], figure: str, name: str) -> str:
    """The geometric mean of a contender's ratios, and over how many cells where some lack it."""
    ratios = [c[figure][name]["ratio"] for c in cells if name in c[figure]]
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
    shapes: pages.Rows = [
        ("kernel", "M×N×K", "tile", "cuBLAS, µs", "of cuBLAS, idle", "over torch.compile, idle",
         "warm", "host µs a call: ours / compile / torch.mm")
    ]  # fmt: skip
    shapes += [
        (c["kernel"], pages.label(c["sizes"]), c["tile"], c["gemm_us"], f"{c['of_gemm']:.3f}",
         *(f"{c['over_compile'][g]:.2f}" for g in ("idle", "warm")),
         " / ".join(map(str, c["host_us"] or ["–"])))
        for c in found["shapes"]
    ]  # fmt: skip
    few = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] <= FEW_ROWS]
    many = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] > FEW_ROWS]
    return {**found, "beside": beside, "ahead": ahead, "rows": shapes, "few": few, "many": many}


def _shares(ratios: Iterable[float]) -> str:
    return " / ".join(f"{ratio:.3f}" for ratio in ratios)
