"""docs/benchmarks.md, written from the evidence files and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_COLUMNS = (
    "kernel",
    "dtype",
    "M × N × K",
    "kernel, µs",
    "bare GEMM, µs",
    "torch.compile, µs",
    "of GEMM",
    "over compile",
    "TFLOP/s",
    "tile",
)
_HEAD = """# Benchmarks

Written by `coda-agent bench --table` from `generated/*/evidence.json`; do not edit.

Each row is one interleaved run on one GPU: kernel, bare cuBLAS GEMM and the reference under
`torch.compile` in random order round by round, L2 overwritten before each call, median of {rounds}
rounds. *Of GEMM* is the bare GEMM's time over the kernel's: 1 means the epilogue is free, above 1
that the mainloop beats cuBLAS too. *Over compile* is torch.compile's time over the kernel's. Both
carry a 99.8 % interval over the rounds. Times include the finalisers of reductions. Rows were
taken at different temperatures: compare ratios, not times.

"""


def write_table(workspace_root: Path) -> Path:
    """Write docs/benchmarks.md of a workspace from its evidence files.

    Returns:
        The file's path.
    """
    path = workspace_root / "docs" / "benchmarks.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(render(workspace_root), encoding="utf-8")
    return path


def render(workspace_root: Path) -> str:
    """The page's text."""
    rows, machines, missing, refused, rounds = [], {}, [], [], 0
    for file in sorted(workspace_root.glob("generated/*/evidence.json")):
        evidence = json.loads(file.read_text(encoding="utf-8"))
        cells = [c for c in _gate(evidence, "performance").get("cells", []) if "times" in c]
        if not cells:
            missing.append(f"- {evidence['kernel']}: {evidence['level']}, not benchmarked")
        for cell in cells:
            rows.append(_row(evidence["kernel"], cell))
            rounds = max(rounds, len(cell["times"]["ours"]["times_us"]))
        if cells:
            machines[_machine(evidence)] = None
        refused += list(_refused(evidence))
    if not rows:
        return "# Benchmarks\n\nNo evidence file holds a benchmark yet.\n"
    header = [_line(_COLUMNS), "|---" * len(_COLUMNS) + "|"]
    parts = [_HEAD.format(rounds=rounds) + "\n".join(header + rows)]
    parts.append("## Machines\n\n" + "\n".join(f"- {m}" for m in machines))
    if refused:
        parts.append(
            "## Tiles the judge refused\n\nCompiled, ran, and computed wrongly or not "
            "at all; they are never dispatched.\n\n" + "\n".join(dict.fromkeys(refused))
        )
    if missing:
        parts.append("## Not shown\n\n" + "\n".join(missing))
    return "\n\n".join(parts) + "\n"


def _gate(evidence: dict[str, Any], name: str) -> dict[str, Any]:
    return next((g["data"] for g in evidence["gates"] if g["name"] == name), {})


def _row(kernel: str, cell: dict[str, Any]) -> str:
    times = cell["times"]
    fields = [
        kernel,
        cell["dtype"],
        " × ".join(str(cell["sizes"][d]) for d in sorted(cell["sizes"], key="MNK".find)),
        *(f"{times[who]['median_us']:.1f}" for who in ("ours", "gemm", "compile")),
        *(_ratio(cell[r]) for r in ("of_gemm", "over_compile")),
        f"{cell['tflops']:.0f}",
        cell["tile"],
    ]
    return _line(fields)


def _line(fields: Iterable[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def _ratio(r: dict[str, float]) -> str:
    return f"{r['ratio']:.3f} ({r['low']:.3f}–{r['high']:.3f})"


def _machine(evidence: dict[str, Any]) -> str:
    environment = evidence["environment"]
    gpu, packages = environment.get("gpu", {}), environment["packages"]
    versions = ", ".join(f"{k} {v}" for k, v in packages.items())
    driver = gpu.get("driver_version")
    return f"{gpu.get('name')}, driver {driver}, CUDA {environment.get('cuda')}, {versions}"


def _refused(evidence: dict[str, Any]) -> Iterator[str]:
    for tile in _gate(evidence, "numerics").get("refused_tiles", []):
        yield f"- {tile['program']} ({tile['dtype']}), tile {tile['tile']}: {tile['fault']}"
