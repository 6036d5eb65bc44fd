"""docs/<suite>-suite.md and .svg, written from a benchmark's record and from nothing else."""

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
