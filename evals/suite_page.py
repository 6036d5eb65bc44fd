"""docs/<suite>-suite.md and .svg, written from a suite's record and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coda_agent.evals.pages import bars, geometric_mean, table
from coda_agent.evals.suite import CONTENDERS, LIMIT, Suite
from coda_agent.primitives.errors import CodaError


def write_page(root: Path, suite: Suite) -> list[Path]:
    """Write both files into docs/ of a workspace, from the latest record in evals/results/.

    Returns:
        The record, the page, the chart.

    Raises:
        CodaError: no record.
    """
    files = list((root / "evals" / "results").glob(f"{suite.name}-*.json"))
    if not files:
        hint = f"`coda-agent bench --suite {suite.name}` on a Hopper GPU makes one"
        raise CodaError(f"there is no record of suite {suite.name}", hint=hint)
    record, file = max(
        ((json.loads(f.read_text("utf-8")), f) for f in files), key=lambda pair: pair[0]["date"]
    )
    cells = [c for c in record["cells"].values() if "ours" in c["times"]]
    page, chart = (root / "docs" / f"{suite.name}-suite.{end}" for end in ("md", "svg"))
    page.parent.mkdir(exist_ok=True)
    page.write_text(render(suite, cells, file.relative_to(root).as_posix()), encoding="utf-8")
    shown = ("ours", "quack", "compile", "compile_max")
    panels = {
        f"S = {size}": {
            c["kernel"].removeprefix("gemm_"): {
                CONTENDERS[n]: c["of_gemm"][n]["ratio"] for n in shown if n in c["of_gemm"]
            }
            for c in _ordered(suite, cells, size)
        }
        for size in _sizes(cells)
    }
    title = "Speed relative to the bare cuBLAS GEMM"
    chart.write_text(bars(title, panels, base=1.0), encoding="utf-8")
    return [file, page, chart]


def render(suite: Suite, cells: list[dict[str, Any]], record: str) -> str:
    """The page's text."""
    names = [n for n in CONTENDERS if n != "gemm" and any(n in c["times"] for c in cells)]
    notes: dict[str, int] = {}
    tables, over = [], [["S", "kernels", "over torch.compile", "over max-autotune"]]
    for size in _sizes(cells):
        here = _ordered(suite, cells, size)
        rows = [
            ["kernel", "tile", "GEMM, µs", "ours, µs", *(CONTENDERS[n] for n in names)],
            *(_row(c, names, notes) for c in here),
            ["**geometric mean**", "", "", "", *(_mean(here, "of_gemm", n) for n in names)],
        ]
        tables.append(f"## S = {size}\n\n{table(rows)}")
        means = (_mean(here, "over", n) for n in ("compile", "compile_max"))
        over.append([str(size), str(len(here)), *means])
    have = {c["kernel"] for c in cells}
    missing = ", ".join(f"`{k}`" for k in suite.kernels if k not in have)
    template = Path(__file__).parent / "templates" / "suite.md"
    return template.read_text("utf-8").format(
        title=suite.title,
        name=suite.name,
        record=record,
        rounds=max(c["rounds"] for c in cells),
        dtype=suite.dtype,
        limit=LIMIT,
        block=suite.reduction_block,
        tiles=", ".join(t.label for t in suite.tiles),
        tables="\n\n".join(tables),
        notes="\n".join(f"{number}. {note}" for note, number in notes.items()) or "nothing",
        over_compile=table(over),
        source=" ".join(suite.reference_source.split()),
        paper=table(_paper_rows(suite, cells)),
        machines="\n".join(dict.fromkeys(f"- {_machine(c['machine'])}" for c in cells)),
        missing=f"Not accepted yet, or not measured: {missing}." if missing else "Nothing.",
    )


def _row(cell: dict[str, Any], names: Iterable[str], notes: dict[str, int]) -> list[str]:
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
            text += f" ({ratio['low']:.3f}–{ratio['high']:.3f})"
        if said:
            text += f" [{notes.setdefault(f'{CONTENDERS[name]}: {said}', len(notes) + 1)}]"
        row.append(text)
    return row


def _mean(cells: list[dict[str, Any]], figure: str, name: str) -> str:
    """The geometric mean of a contender's ratios, and over how many cells where some lack it."""
    ratios = [c[figure][name]["ratio"] for c in cells if name in c[figure]]
    of = f" of {len(ratios)}" * (len(ratios) < len(cells))
    return f"{geometric_mean(ratios):.3f}{of}" if ratios else "–"


def _paper_rows(suite: Suite, cells: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["kernel", "S", "paper, of its GEMM", "ours, of its GEMM", "by ratio", "paper, µs",
             "ours, µs", "by time"]]  # fmt: skip
    for cell in sorted(cells, key=lambda c: (c["size"], [*suite.kernels].index(c["kernel"]))):
        known = suite.kernels[cell["kernel"]]["reference_ms"].get(str(cell["size"]))
        if known is None:
            continue
        theirs, ours = known["gemm"] / known["paper"], cell["of_gemm"]["ours"]["ratio"]
        time, paper = cell["times"]["ours"]["median_us"], 1000 * known["paper"]
        rows.append([
            cell["kernel"], str(cell["size"]), f"{theirs:.3f}", f"{ours:.3f}",
            f"**{ours / theirs:.3f}**", f"{paper:.0f}", f"{time:.1f}", f"{paper / time:.3f}",
        ])  # fmt: skip
    return rows


def _ordered(suite: Suite, cells: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    by_name = {c["kernel"]: c for c in cells if c["size"] == size}
    return [by_name[k] for k in suite.kernels if k in by_name]


def _sizes(cells: list[dict[str, Any]]) -> list[int]:
    return sorted({c["size"] for c in cells})


def _machine(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    gpu = machine["gpu"]
    return f"{gpu.get('name')}, driver {gpu.get('driver_version')}, {packages}"
