"""What the documentation says of one, two and four GPUs, against the summary of those runs, and the
summary against their records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from coda_agent.evals import archive
from coda_agent.evals.scaling import summarise
from coda_agent.primitives.errors import CodaError

ROOT = Path(__file__).parents[2]
SUMMARY = ROOT / "evals" / "results" / "scaling.json"
TEXT = (ROOT / "docs" / "evaluation.md").read_text()
# Of a host's two runs, on one of its GPUs and on all.
COUNT = {2: 36, 4: 72}
WANTED = {2: 1.8, 4: 3.4}  # times as fast
hosts = pytest.mark.parametrize("gpus", COUNT)


def runs(host: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A host's run on one GPU, and on all."""
    cells = json.loads(SUMMARY.read_text())["cells"].values()
    found = {cell["gpus"]: SimpleNamespace(**cell) for cell in cells if cell["host_gpus"] == host}
    assert sorted(found) == [1, host]
    return found[1], found[host]


def furthest(one: SimpleNamespace, other: SimpleNamespace) -> float:
    """How far the speeds of a spec and type lie apart at most, as a share."""
    assert one.shares.keys() == other.shares.keys() and len(one.shares) == 6
    return max(abs(other.shares[key] / one.shares[key] - 1) for key in one.shares)


@hosts
def test_the_same_trials_were_run_on_one_gpu_and_on_all(gpus: int) -> None:
    one, all_ = runs(gpus)
    assert one.digest == all_.digest
    assert one.machine == all_.machine == "NVIDIA H200"
    assert one.trials == all_.trials == COUNT[gpus]


@hosts
def test_the_table_says_what_the_summary_does(gpus: int) -> None:
    count = COUNT[gpus]
    rows = re.findall(
        rf"^\| {gpus} \| (\d) \| {count} \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) \|$", TEXT, re.M
    )
    one, all_ = (run.seconds for run in runs(gpus))
    assert rows == [
        ("1", f"{one:.1f}", f"{one / count:.2f}", ""),
        (f"{gpus}", f"{all_:.1f}", f"{all_ / count:.2f}", f"{one / all_:.2f}"),
    ]
    assert one / all_ >= WANTED[gpus]


def test_the_readme_says_how_far_two_hosts_differ() -> None:
    both = [runs(host) for host in COUNT]
    apart = max(furthest(two, four) for two, four in zip(*both, strict=True))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"share of cuBLAS's speed differed by up to {100 * apart:.1f} %" in text


def test_figures_of_all_gpus_are_those_of_one() -> None:
    apart = max(furthest(*runs(gpus)) for gpus in COUNT)
    assert apart <= 0.02
    assert f"agrees within {100 * apart:.1f} %" in TEXT


def test_the_summary_is_that_of_the_records(tmp_path: Path) -> None:
    published = archive.found("scaling", ROOT / archive.FOLDER)
    if not published:
        pytest.skip("the archive of the scaling records was not fetched")
    shutil.copytree(ROOT / archive.FOLDER, tmp_path / archive.FOLDER)
    summary, packed = summarise(tmp_path)
    assert summary.read_bytes() == SUMMARY.read_bytes()
    assert packed.name == published[0].name  # and equal content, which is what the name says
    broken = next((tmp_path / "evals" / "results" / "scaling").rglob("gemm_*.json"))
    broken.write_text("{")
    with pytest.raises(CodaError, match=r"not a run to sum up: .* truncated"):
        summarise(tmp_path)
