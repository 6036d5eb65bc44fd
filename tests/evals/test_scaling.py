"""What docs/evaluation.md says of one and two GPUs, against the records of those runs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

from coda_agent.evals.records import TrialRecord, read_records

ROOT = Path(__file__).parents[2]
RUNS = {1: "1-gpu", 2: "2-gpus"}


def trials(gpus: int) -> list[TrialRecord]:
    found = read_records(ROOT / "evals" / "results" / "scaling" / RUNS[gpus])
    assert found.problems == []
    return found.records


def seconds(gpus: int) -> float:
    """From the first trial's start to the last one's end."""
    found = trials(gpus)
    return (max(r.finished for r in found) - min(r.started for r in found)).total_seconds()


def medians(gpus: int) -> dict[tuple[str, str], float]:
    """Share of the bare GEMM's speed, by spec and type."""
    shares = defaultdict[tuple[str, str], list[float]](list)
    for record in trials(gpus):
        assert record.verdict is not None
        for cell in record.verdict.cells:
            shares[record.spec.name, cell.dtype].append(cell.of_gemm.ratio)
    return {key: median(found) for key, found in shares.items()}


def test_the_same_trials_were_run_on_one_gpu_and_on_two() -> None:
    keys = [{(r.spec.digest, r.trial, r.suite.digest) for r in trials(n)} for n in RUNS]
    assert keys[0] == keys[1] and len(keys[0]) == 36
    judges = {r.verdict and r.verdict.digests["judge"] for n in RUNS for r in trials(n)}
    assert len(judges) == 1


def test_the_table_says_what_the_records_do() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    rows = re.findall(r"^\| (\d) \| 36 \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) \|$", text, re.M)
    one, two = seconds(1), seconds(2)
    assert rows == [
        ("1", f"{one:.1f}", f"{one / 36:.2f}", ""),
        ("2", f"{two:.1f}", f"{two / 36:.2f}", f"{one / two:.2f}"),
    ]
    assert one / two >= 1.8


def test_figures_of_two_gpus_are_those_of_one() -> None:
    one, two = medians(1), medians(2)
    assert one.keys() == two.keys() and len(one) == 6
    furthest = max(abs(two[key] / one[key] - 1) for key in one)
    assert furthest <= 0.02
    assert f"within {100 * furthest:.1f} %" in (ROOT / "docs" / "evaluation.md").read_text()
