"""Jobs on a Dask cluster of real processes: the answers are those of this machine, objects travel,
and a worker that is killed costs its job and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent import execution, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.execution import cluster
from coda_agent.agent.judge import compile_gate, judge_candidate
from coda_agent.agent.judge.job import BuiltObject, CompileJob
from coda_agent.agent.judge.records import CompileReport
from coda_agent.evals.cells import read
from coda_agent.evals.trials import Trial, records_of
from coda_agent.primitives.errors import CodaError, MachineError, SpecError
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import SM90_CONFIGS
from coda_agent.specs import Spec, load_spec

pytest.importorskip("distributed", reason="needs coda-agent[dask]")

pytestmark = pytest.mark.sampled(0.3, "a cluster")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEXT = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()
SUITE = 'title = "T"\nspecs = ["gemm_swiglu", "gemm_rmsnorm"]\ngoal = "proved"\ntrials = 1\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the GPU worker finds: nvidia-smi, the script of its child, and a cache of its own."""
    made = tmp_path_factory.mktemp("cluster")
    (made / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *index*) echo "0, GPU-1, Fake GPU, 9.0";; '
        '*compute-apps*) ;; *) echo "Fake GPU, 1, 2, 3, 4, 5, 6, 7";; esac\n'
    )
    (made / "nvidia-smi").chmod(0o755)
    (made / "script.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def dask(folder: Path) -> Iterator[Any]:
    """A scheduler, two workers that compile and one with a GPU that is not there."""
    from distributed import Nanny, Scheduler, SpecCluster

    gpu = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{HERE}",
        "QUACK_CACHE_DIR": str(folder / "cache"),
        "XDG_CACHE_HOME": str(folder),
    }
    common = {"nthreads": 1, "local_directory": str(folder)}
    workers = {
        f"cpu{i}": {"cls": Nanny, "options": {**common, "resources": {"CPU": 1}}} for i in range(2)
    }
    preload = [str(HERE / "fake_gpu_worker.py")]
    about = {**common, "resources": {"GPU": 1}, "env": gpu, "preload": preload}
    workers["gpu"] = {"cls": Nanny, "options": about}
    scheduler = {"cls": Scheduler, "options": {"port": 0, "dashboard": False}}
    with SpecCluster(workers, scheduler) as made:
        yield made


@pytest.fixture
def address(dask: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    found = dask.scheduler_address.removeprefix("tcp://")
    monkeypatch.setenv(execution.VARIABLE, f"dask://{found}")
    execution._executor.cache_clear()
    yield found
    made = execution.executor()
    assert isinstance(made, cluster.Cluster)
    made.close()
    execution._executor.cache_clear()


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(ROOT / "specs" / "gemm_swiglu.md")


def test_a_trial_on_a_gpu_elsewhere(
    address: str, folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gate, "offered", lambda *_: SM90_CONFIGS[:4:3])
    (folder / "script.json").write_text('{"128x160": "illegal address"}')
    told: list[str] = []

    def observer(type: str, data: dict[str, Any]) -> None:
        if type == "gate.progress":
            told.append(f"{data['gate']} {data['note']}")

    verdict = judge_candidate(
        spec, TEXT, execution.executor(), device="cuda", types=["bfloat16"], observer=observer
    )
    assert verdict.level == "accepted", verdict.gates
    assert verdict.environment["gpu"]["name"] == "Fake GPU"
    (refused,) = verdict.gates[2].refused_tiles
    assert refused.tile == SM90_CONFIGS[3].label
    # The objects were compiled elsewhere, and came along.
    compiled = verdict.report(CompileReport)
    assert compiled
    kept = list((folder / "cache").glob("*/*.o"))
    # One more than is reported: the default tile for transposed operands.
    assert len(kept) == len(compiled.kernels) + 1 > 2 and all(
        path.stat().st_size > 1000 for path in kept
    )
    assert any(line.startswith("compile sm_90a") for line in told)
    assert "numerics 128x128" in told
    (folder / "script.json").write_text('{"128x128": "error"}')
    with pytest.raises(SpecError, match="the baseline disagrees") as caught:
        judge_candidate(spec, TEXT, execution.executor(), device="cuda", types=["bfloat16"])
    assert caught.value.hint == "mend it"


def test_a_job_compiled_before_is_not_compiled_again(address: str, spec: Spec) -> None:
    made = execution.executor()
    programs = read_programs(TEXT)
    job = CompileJob.of(programs["gemm_swiglu"], SM90_CONFIGS[0], "sm_90a", spec, "bfloat16")
    first = made.map([job], lambda *_: None)
    begun = time.monotonic()
    assert made.map([job], lambda *_: None) == first
    assert isinstance(first[0], BuiltObject) and first[0].registers
    assert time.monotonic() - begun < 0.5  # compiling takes seconds
    broken = replace(job.program, outputs={})
    (error,) = made.map([job.model_copy(update={"program": broken})], lambda *_: None)
    assert isinstance(error, compile_gate.CompileError)


def test_a_busy_gpu_holds_up_no_compile_job(address: str, spec: Spec, tmp_path: Path) -> None:
    made = execution.executor()
    assert isinstance(made, cluster.Cluster)
    programs = read_programs(TEXT)
    job = CompileJob.of(programs["gemm_swiglu"], SM90_CONFIGS[0], "sm_90a", spec, "bfloat16")
    made.map([job], lambda *_: None)
    # As a gate leaves it: the worker with the GPU has the objects, too, and works. The others have
    # more to do, by the scheduler's reckoning.
    made._client.replicate(made._built, workers=made._workers("GPU"))
    over = tmp_path / "over"

    def work() -> None:
        until = time.monotonic() + 60
        while not over.exists() and time.monotonic() < until:
            time.sleep(0.05)

    busy = made._client.submit(work, resources={"GPU": 1}, pure=False)
    others = [
        made._client.submit(time.sleep, 0.2, resources={"CPU": 1}, pure=False) for _ in range(20)
    ]
    time.sleep(0.5)
    made.map([job], lambda *_: None)
    assert not busy.done()
    over.touch()
    assert all(future.result() is None for future in [*others, busy])


def test_an_evaluation_survives_the_loss_of_workers(
    address: str, dask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client

    made, _ = workspace.init(tmp_path / "w")
    monkeypatch.chdir(made.root)
    (made.root / "evals" / "suites").mkdir(parents=True)
    (made.root / "evals" / "suites" / "mine.toml").write_text(SUITE)
    over, killed = threading.Event(), list[int]()
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)

    def kill() -> None:
        with Client(dask.scheduler_address, set_as_default=False) as client:
            for name in draw.sample(["cpu0", "cpu1"], 2):
                if over.wait(draw.uniform(0.5, 2)):
                    break
                known = client.scheduler_info(n_workers=-1)["workers"]
                where = [a for a, worker in known.items() if worker["name"] == name]
                found: Any = client.run(os.getpid, workers=where, on_error="ignore")
                for pid in found.values():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    # Where every worker happens to be gone, a command is refused before it has any job to lose.
    execution.executor()
    killer = threading.Thread(target=kill)
    killer.start()
    command = ["eval", "run", "--suite", "mine", "--author", "composer", "--json"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu"])
    over.set()
    killer.join()
    assert result.exit_code == 0, f"seed {seed}: {result.output}"
    assert len(killed) >= 1, f"seed {seed}"
    path = records_of(made.root, "mine")
    found = [*read(path, Trial).values()]
    assert len(path.read_text("utf-8").splitlines()) == 2
    assert len({(r.spec, r.trial) for r in found}) == 2
    assert {r.outcome for r in found} == {"proved"}, f"seed {seed}"


def test_a_cluster_that_cannot_be_used_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "fingerprint", lambda *_: "other")
        with pytest.raises(MachineError, match=r"worker tcp://.* has another judge"):
            cluster.Cluster(address)
    with pytest.raises(MachineError, match="has another judge"):
        cluster._require("other")
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_gpu", lambda: 1 / 0)
        with pytest.raises(MachineError, match=r"on worker tcp://.*: division by zero"):
            execution.executor().gpu()
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    with pytest.raises(MachineError, match=r"no Dask scheduler answers at 127\.0\.0\.1:9"):
        cluster.Cluster("127.0.0.1:9")
    for name in ("ray://host:1", "dask://host"):
        with pytest.raises(CodaError, match=f"no executor '{name}'"):
            execution._executor(name)


def test_a_worker_lost_while_the_cluster_is_asked_is_left_out(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, first = cluster._judge(), tmp_path / "first"

    def lost() -> str:
        with contextlib.suppress(FileExistsError):
            first.touch(exist_ok=False)
            os._exit(1)
        return digest

    monkeypatch.setattr(cluster, "_judge", lost)
    cluster.Cluster(address).close()
    assert first.exists()
