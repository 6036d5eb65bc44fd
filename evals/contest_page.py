"""docs/<suite>-suite.md and .svg, written from a benchmark's record and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
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


def write_page(root: Path, suite: Suite) -> list[Path]:
    """Write both files from the latest record in evals/results/; the record, the page, the chart.

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
    streamed = any(regime(c, "steady")["of_gemm"] for c in cells)
    notes = _notes(cells, shown)
    page = pages.write(
        root / "docs" / f"{suite.name}-suite.md", "contest.md",
        suite=suite, benchmark=benchmark, record=file.relative_to(root).as_posix(), limit=LIMIT,
        rounds=max(c["rounds"] for c in cells),
        tables={size: _table(here, shown, notes, streamed) for size, here in by_size.items()},
        streamed=streamed, notes=notes, over_compile=_over_compile(by_size, streamed),
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


def _notes(cells: Iterable[Cell], shown: dict[str, str]) -> dict[str, int]:
    """Notes on contenders that do less or nothing, numbered in the order of the tables."""
    said = (_note(cell, name, label) for cell in cells for name, label in shown.items())
    return {note: i for i, note in enumerate(dict.fromkeys(filter(None, said)), 1)}


def _note(cell: Cell, name: str, label: str) -> str:
    said = cell["notes"].get(name) or cell["absent"].get(name)
    return f"{label}: {said}" if said else ""


def _table(
    cells: Sequence[Cell], shown: dict[str, str], notes: dict[str, int], streamed: bool
) -> pages.Rows:
    """A row for each kernel: each contender's speed as a share of cuBLAS's; then their means."""

    def kernel(cell: Cell) -> str:
        odd = ", ".join(f"{d} = {v}" for d, v in cell["sizes"].items() if v != cell["size"])
        return f"{cell['kernel']} ({odd})" if odd else cell["kernel"]

    def median(name: str) -> Callable[[Cell], str]:
        return lambda cell: f"{cell['times'][name]['median_us']:.1f}"

    def share(name: str) -> Callable[[Cell], str]:
        def says(cell: Cell) -> str:
            ratio, note = cell["of_gemm"].get(name), _note(cell, name, shown[name])
            text = f"{ratio['ratio']:.3f}" if ratio else "–"
            if ratio and name == "ours":
                text = pages.interval(ratio)
            return f"{text} [{notes[note]}]" if note else text

        return says

    def stream(cell: Cell) -> str:
        ratio = regime(cell, "steady")["of_gemm"].get("ours")
        return pages.interval(ratio) if ratio else "–"

    rows = pages.tabulate(cells, {
        "kernel": kernel, "tile": lambda c: c["tiles"]["ours"],
        "GEMM, µs": median("gemm"), "ours, µs": median("ours"),
        **{label: share(name) for name, label in shown.items()},
        "ours, steady": stream if streamed else None,
    })  # fmt: skip
    means = [mean(cells, "of_gemm", name) for name in shown]
    means += [mean([regime(c, "steady") for c in cells], "of_gemm", "ours")] * streamed
    return [*rows, ["**geometric mean**", "", "", "", *means]]


def _over_compile(by_size: dict[int, list[Cell]], streamed: bool) -> pages.Rows:
    def over(name: str, where: str = "warm") -> Callable[[int], str]:
        return lambda size: mean([regime(c, where) for c in by_size[size]], "over", name)

    return pages.tabulate(by_size, {
        "S": int, "kernels": lambda size: len(by_size[size]),
        "over torch.compile": over("compile"), "over max-autotune": over("compile_max"),
        "over torch.compile, steady": over("compile", "steady") if streamed else None,
    })  # fmt: skip


def regime(cell: Cell, name: str) -> Cell:
    """A cell's figures of a regime, as it has those of the warm one itself."""
    return cell if name == "warm" else cell.get(name, {"times": {}, "of_gemm": {}, "over": {}})


def mean(cells: Sequence[Cell], figure: str, name: str) -> str:
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
    shapes = pages.tabulate(found["shapes"], {
        "kernel": itemgetter("kernel"),
        "M×N×K": lambda c: pages.label(c["sizes"]),
        "tile": itemgetter("tile"),
        "cuBLAS, µs": itemgetter("gemm_us"),
        "of cuBLAS, idle": lambda c: f"{c['of_gemm']:.3f}",
        "over torch.compile, idle": lambda c: f"{c['over_compile']['idle']:.2f}",
        "warm": lambda c: f"{c['over_compile']['warm']:.2f}",
        "host µs a call: ours / compile / torch.mm":
            lambda c: " / ".join(map(str, c["host_us"] or ["–"])),
    })  # fmt: skip
    few = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] <= FEW_ROWS]
    many = [c["over_compile"]["idle"] < 1 for c in found["shapes"] if c["sizes"]["M"] > FEW_ROWS]
    return {**found, "beside": beside, "ahead": ahead, "rows": shapes, "few": few, "many": many}


def _shares(ratios: Iterable[float]) -> str:
    return " / ".join(f"{ratio:.3f}" for ratio in ratios)
