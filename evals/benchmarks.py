"""docs/benchmarks.md, written from the evidence files and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from coda_agent.evals import pages
from coda_agent.evals.review import Version


def write_table(root: Path) -> Path:
    """Write docs/benchmarks.md of a workspace from its evidence files; its path."""
    files = sorted(root.glob("generated/*/evidence.json"))
    found = [Version("", "", "", json.loads(file.read_text("utf-8"))) for file in files]
    timed = [version for version in found if version.cells()]
    head, *_ = pages.speed([])
    rows: pages.Rows = [("kernel", *head)]
    for version in timed:
        rows += [(version.evidence["kernel"], *row) for row in pages.speed(version.cells())[1:]]
    return pages.write(
        root / "docs" / "benchmarks.md", "benchmarks.md", rows=rows,
        rounds=sorted({len(c["times"]["ours"]["times_us"]) for v in timed for c in v.cells()}),
        machines=dict.fromkeys(pages.machine(v.evidence["environment"]) for v in timed),
        refused=dict.fromkeys(
            "{program} ({dtype}), tile {tile}: {fault}".format(**tile)
            for v in found for tile in v.gate("numerics").get("refused_tiles", [])
        ),
        untimed=[v.evidence for v in found if v not in timed],
    )  # fmt: skip
