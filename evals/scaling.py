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

from pydantic import BaseModel, ConfigDict

from coda_agent.agent.judge.provenance import sha
from coda_agent.evals import archive
from coda_agent.evals.pages import write_record
from coda_agent.evals.record_files import read_records
from coda_agent.evals.records import TrialRecord
from coda_agent.primitives.errors import CodaError

RESULTS = Path("evals", "results")
COMMAND = (
    "coda-agent eval run --suite scaling.toml --author composer --repeat --trials N --jobs N "
    "--executor dask://HOST:8786"
)
"""What makes the records of a run; the suite is in the archive, beside them."""


class ScalingRun(BaseModel):
    """One run of trials on some GPUs of a host.

    Attributes:
        host_gpus: How many the host has.
        gpus: How many were used.
        machine: The GPU's name.
        judge: The digest of the judge's sources.
        trials: How many there were.
        digest: Of the trials: suites, specs and numbers. Runs that have it in common did the same.
        seconds: From the first trial's start to the last one's end.
        shares: The median of the trials' shares of the bare GEMM's speed, by spec and type.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_gpus: int
    gpus: int
    machine: str
    judge: str
    trials: int
    digest: str
    seconds: float
    shares: dict[str, float]


def write_summary(root: Path) -> list[Path]:
    """Sum up the runs of a workspace, unpacked where they were published, and pack their records;
    the summary, evals/results/scaling.json, and the archive.

    Raises:
        CodaError: there are no records, or some are damaged.
    """
    folder = archive.restored("scaling", RESULTS / "scaling", root)
    if not (files := sorted(folder.rglob("*.json"))):
        raise CodaError(f"no records in {folder}", hint="eval run --out writes them")
    found = [_summed_up(run) for run in sorted({file.parent for file in files})]
    cells = {f"{run.gpus} of {run.host_gpus}": run.model_dump() for run in found}
    summary = root / RESULTS / "scaling.json"
    write_record(summary, {"command": COMMAND}, cells)
    return [summary, archive.publish("scaling", files, root)]


def read_summary(root: Path) -> list[ScalingRun]:
    """The runs that the summary of a workspace tells of."""
    text = (root / RESULTS / "scaling.json").read_text("utf-8")
    return [ScalingRun(**cell) for cell in json.loads(text)["cells"].values()]


def _summed_up(folder: Path) -> ScalingRun:
    place = re.fullmatch(r"host-of-(\d+)/(\d+)-gpus?", "/".join(folder.parts[-2:]))
    records, problems = read_records(folder)
    if place is None or problems or not records:
        why = problems[0] if problems else f"{folder} is no host-of-<GPUs>/<GPUs used>-gpus"
        raise CodaError(f"not a run to sum up: {why}")
    trials = sorted((r.suite.digest, r.spec.digest, r.trial) for r in records)
    judges = {r.verdict.digests["judge"] for r in records if r.verdict}
    started, finished = min(r.started for r in records), max(r.finished for r in records)
    return ScalingRun(
        host_gpus=int(place[1]), gpus=int(place[2]), trials=len(records),
        machine=", ".join(sorted({r.machine.gpu or "" for r in records})),
        judge=", ".join(sorted(judges)), digest=sha(json.dumps(trials)),
        seconds=round((finished - started).total_seconds(), 3), shares=_shares(records),
    )  # fmt: skip


def _shares(records: list[TrialRecord]) -> dict[str, float]:
    found = defaultdict[str, list[float]](list)
    for record in records:
        for cell in record.verdict.cells if record.verdict else ():
            found[f"{record.spec.name} {cell.dtype}"].append(cell.of_gemm.ratio)
    return {key: round(median(ratios), 5) for key, ratios in sorted(found.items())}
