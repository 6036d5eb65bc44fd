"""What docs/evaluation.md says of one, two and four GPUs, against the records of those runs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from coda_agent.evals.record_files import read_records
from coda_agent.evals.records import TrialRecord

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "evaluation.md").read_text()
# Of a host's two runs, on one of its GPUs and on all.
COUNT = {2: 36, 4: 72}
WANTED = {2: 1.8, 4: 3.4}  # times as fast
hosts = pytest.mark.parametrize("gpus", COUNT)


def trials(host: int, gpus: int) -> list[TrialRecord]:
    folder = f"{gpus}-gpu" if gpus == 1 else f"{gpus}-gpus"
    found = read_records(ROOT / "evals" / "results" / "scaling" / f"host-of-{host}" / folder)
    assert found.problems == []
    return found.records


def seconds(found: list[TrialRecord]) -> float:
    """From the first trial's start to the last one's end."""
    return (max(r.finished for r in found) - min(r.started for r in found)).total_seconds()


def medians(found: list[TrialRecord]) -> dict[tuple[str, str], float]:
    """Share of the bare GEMM's speed, by spec and type."""
    shares = defaultdict[tuple[str, str], list[float]](list)
    for record in found:
        assert record.verdict is not None
        for cell in record.verdict.cells:
            shares[record.spec.name, cell.dtype].append(cell.of_gemm.ratio)
    return {key: median(found) for key, found in shares.items()}


@hosts
def test_the_same_trials_were_run_on_one_gpu_and_on_all(gpus: int) -> None:
    one, all_ = trials(gpus, 1), trials(gpus, gpus)
    keys = [{(r.spec.digest, r.trial, r.suite.digest) for r in found} for found in (one, all_)]
    assert keys[0] == keys[1]
    assert len(one) == len(all_) == len(keys[0]) == COUNT[gpus]
    assert len({r.verdict and r.verdict.digests["judge"] for r in one + all_}) == 1


@hosts
def test_the_table_says_what_the_records_do(gpus: int) -> None:
    count = COUNT[gpus]
    rows = re.findall(
        rf"^\| {gpus} \| (\d) \| {count} \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) \|$", TEXT, re.M
    )
    one, all_ = seconds(trials(gpus, 1)), seconds(trials(gpus, gpus))
    assert rows == [
        ("1", f"{one:.1f}", f"{one / count:.2f}", ""),
        (f"{gpus}", f"{all_:.1f}", f"{all_ / count:.2f}", f"{one / all_:.2f}"),
    ]
    assert one / all_ >= WANTED[gpus]


def test_the_readme_says_how_far_two_hosts_differ() -> None:
    two, four = (medians(trials(host, 1) + trials(host, host)) for host in COUNT)
    assert two.keys() == four.keys()
    furthest = max(abs(four[key] / two[key] - 1) for key in two)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"share of cuBLAS's speed differed by up to {100 * furthest:.1f} %" in text


@hosts
def test_figures_of_all_gpus_are_those_of_one(gpus: int) -> None:
    one, all_ = medians(trials(gpus, 1)), medians(trials(gpus, gpus))
    assert one.keys() == all_.keys() and len(one) == 6
    furthest = max(abs(all_[key] / one[key] - 1) for key in one)
    assert furthest <= 0.02
    assert f"within {100 * furthest:.1f} % on the host with {gpus}" in TEXT
