"""docs/benchmarks.md, written from the evidence files and from nothing else."""

import json
from pathlib import Path

from coda_agent.evals import pages
from coda_agent.evals.review import Version


def write_table(root: Path) -> Path:
    """Write docs/benchmarks.md of a workspace from its evidence files; its path."""
    files = sorted(root.glob("generated/*/evidence.json"))
    found = [Version("", "", "", json.loads(file.read_text("utf-8"))) for file in files]
    timed = [version for version in found if version.cells()]
    cells = [cell for version in timed for cell in version.cells()]
    kernels = ["kernel", *(v.evidence["kernel"] for v in timed for _ in v.cells())]
    rows = [(kernel, *row) for kernel, row in zip(kernels, pages.speed(cells), strict=True)]
    return pages.write(
        root / "docs" / "benchmarks.md", "benchmarks.md", rows=rows,
        streamed=any("of_gemm" in c.get("steady", {}) for c in cells),
        rounds=sorted({c["times"]["ours"]["rounds"] for c in cells}),
        machines=dict.fromkeys(
            pages.machine(v.evidence["machines"][v.evidence["gates"]["performance"]["machine"]])
            for v in timed
        ),
        refused=dict.fromkeys(
            "{program} ({dtype}), tile {tile}: {fault}".format(**tile)
            for v in found for tile in v.evidence["refused_tiles"]
        ),
        untimed=[v.evidence for v in found if v not in timed],
    )  # fmt: skip
