"""Whole trials on a cluster of two workers, which are real processes on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent import workspace
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.log import read_events
from coda_agent.evals import cluster, suites, trials
from coda_agent.evals.cluster import Cluster
from coda_agent.primitives.errors import CodaError, MachineError

SUITE = 'title = "T"\nspecs = ["gemm_haar"]\ngoal = "proved"\ntrials = 1\n'
"""A spec that the composer refuses, which takes no judge."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler with two workers."""
    import dask
    from distributed import LocalCluster

    folder = str(tmp_path_factory.mktemp("dask"))
    about: JsonObject = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),  # type: ignore[attr-defined]
        LocalCluster(**about, local_directory=folder) as made,
    ):
        local: Any = made
        yield local.scheduler_address.removeprefix("tcp://")


@pytest.fixture
def where(tmp_path: Path) -> workspace.Workspace:
    made, _ = workspace.init(tmp_path / "w")
    (made.root / "evals" / "suites").mkdir(parents=True)
    (made.root / "evals" / "suites" / "mine.toml").write_text(SUITE)
    return made


def test_trials_go_to_two_workers(address: str, where: workspace.Workspace) -> None:
    suite = suites.load("mine", where.root / "evals" / "suites")
    with Cluster(address, where.root) as pool:
        assert suite.device("auto", pool.gpu) == "cpu"
        plan = trials.plan(where, suite, trials.Choice(["composer"]), device="cpu")
        records = trials.run(plan, pool, width=2)
        both = [pool.submit(os.getpid) for _ in range(8)]
        assert os.getpid() not in {future.result() for future in both}
    assert [(r.spec, r.outcome) for r in records] == [("gemm_haar", "gave_up")]
    for record in records:
        log = read_events(where.root / "logs" / "runs" / record.run / "events.jsonl")
        assert (log[0].data["spec"], log[-1].type) == (record.spec, "run.failed")


def test_a_lost_worker_is_one_error(address: str, where: workspace.Workspace) -> None:
    suite = suites.load("mine", where.root / "evals" / "suites")
    plan = trials.plan(where, suite, trials.Choice(["composer"], specs=["gemm_haar"]), device="cpu")
    with pytest.MonkeyPatch.context() as patch, Cluster(address, where.root) as pool:
        patch.setattr(trials, "run_trial", _die)
        with pytest.raises(CodaError, match="a worker died: the cluster lost a trial") as caught:
            trials.run(plan, pool, width=1)
    assert "the same command goes on" in caught.value.hint


def _die(task: object) -> None:
    os._exit(1)


def test_what_cannot_do_trials_is_refused(
    address: str, where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="does not see /"):
        Cluster(address, where.root / "elsewhere")
    monkeypatch.setattr(cluster, "fingerprint", lambda *_: "another")
    with pytest.raises(MachineError, match="has another program"):
        Cluster(address, where.root)
    monkeypatch.setattr(cluster, "CONNECT_S", 0.2)
    with pytest.raises(MachineError, match=r"no Dask scheduler answers at 127\.0\.0\.1:1"):
        Cluster("127.0.0.1:1", where.root)
