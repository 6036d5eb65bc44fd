"""How an evaluation scales: the same trials on one GPU of a host and on all of them.

Each run's records are in a folder of their own, `host-of-<GPUs>/<GPUs used>-gpus/` below
evals/results/scaling/, where `eval run --out` puts them. The summary is what documentation and
tests read; the records are in the archive `scaling`.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from coda_agent.agent.judge.provenance import sha
from coda_agent.evals import archive
from coda_agent.evals.pages import write_record
from coda_agent.evals.record_files import read_records
from coda_agent.primitives.errors import CodaError

RESULTS = Path("evals", "results")
COMMAND = (
    "coda-agent eval run --suite scaling.toml --author composer --repeat --trials N --jobs N "
    "--executor dask://HOST:8786"
)
"""What makes the records of a run; the suite is in the archive, beside them."""


def summarise(root: Path) -> list[Path]:
    """Sum up the runs of a workspace, unpacked where they were published, and pack their records;
    the summary, evals/results/scaling.json, and the archive.

    Raises:
        CodaError: there are no records, or some are damaged.
    """
    folder = archive.restored("scaling", RESULTS / "scaling", root)
    if not (files := sorted(folder.rglob("*.json"))):
        raise CodaError(f"no records in {folder}", hint="eval run --out writes them")
    runs = [_summed_up(run) for run in sorted({file.parent for file in files})]
    summary = root / RESULTS / "scaling.json"
    cells = {f"{run['gpus']} of {run['host_gpus']}": run for run in runs}
    write_record(summary, {"command": COMMAND}, cells)
    return [summary, archive.publish("scaling", files, root)]


def _summed_up(folder: Path) -> dict[str, Any]:
    """A run's line of the summary.

    `digest` is of the trials, so runs that have it in common did the same. `seconds` go from the
    first start to the last end. `shares` are medians of the trials' shares of the bare GEMM's
    speed, by spec and type.
    """
    place = re.fullmatch(r"host-of-(\d+)/(\d+)-gpus?", "/".join(folder.parts[-2:]))
    records, problems = read_records(folder)
    if place is None or problems or not records:
        why = problems[0] if problems else f"{folder} is no host-of-<GPUs>/<GPUs used>-gpus"
        raise CodaError(f"not a run to sum up: {why}")
    shares = defaultdict[str, list[float]](list)
    for record in records:
        if judged := record.verdict:
            for cell in judged.cells:
                if cell.of_gemm:
                    shares[f"{record.spec.name} {cell.dtype}"].append(cell.of_gemm.ratio)
    trials = sorted((r.suite.digest, r.spec.digest, r.trial) for r in records)
    seconds = max(r.finished for r in records) - min(r.started for r in records)
    return {
        "host_gpus": int(place[1]), "gpus": int(place[2]),
        "machine": ", ".join(sorted({r.machine.gpu or "" for r in records})),
        "trials": len(records),
        "digest": sha(json.dumps(trials)), "seconds": round(seconds.total_seconds(), 3),
        "shares": {key: round(median(ratios), 5) for key, ratios in sorted(shares.items())},
    }  # fmt: skip
