"""A kernel that hangs, writes astray or finds no memory, on a real GPU: what is said, and that the
GPU serves the next job as before."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coda_agent.agent.execution import faulted_tiles, hopper, sanitize
from coda_agent.agent.execution.device import Device
from coda_agent.agent.judge.job import NumericsJob
from coda_agent.agent.judge.records import NumericsReport
from coda_agent.primitives import Program
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import SM90_CONFIGS, TileConfig
from coda_agent.specs import Spec, load_spec

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
KEY = ("gemm_swiglu", "bfloat16")
TILES = [SM90_CONFIGS[i] for i in (0, 2, 5)]


def loaded() -> tuple[Spec, dict[str, Program]]:
    spec = load_spec(ROOT / "specs" / "gemm_swiglu.md")
    smallest = min(spec.check_shapes, key=lambda sizes: sizes["M"] * sizes["N"] * sizes["K"])
    text = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()
    programs = read_programs(text)
    return spec.model_copy(update={"check_shapes": (smallest,)}), programs


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "script.json"
    path.write_text("{}")
    folders = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setattr(faulted_tiles, "cache_directory", lambda: tmp_path / "cache")
    return path


@pytest.fixture
def gpu(script: Path) -> Iterator[Device]:
    made = Device(hopper(), "faulty_worker")
    made.start()
    yield made
    made.close()


def timing(gpu: Device) -> float:
    return gpu._tried({"kind": "timing", "tiles": []}, lambda *_: None)


def grade(
    gpu: Device,
) -> tuple[NumericsReport, tuple[TileConfig, ...], float | None]:
    """The numerics gate of a right kernel: its report, what it admits, and the seconds from a fault to the next tile."""
    told: list[tuple[float, str]] = []
    spec, programs = loaded()

    def say(done: int, total: int, note: str) -> None:
        told.append((time.monotonic(), note))

    job = NumericsJob(spec=spec, programs=programs, tiles={KEY: tuple(TILES)}, seed=1)
    outcome = gpu.grade(job, say)
    assert outcome.report and not outcome.findings
    lost = [i for i, (_, note) in enumerate(told) if "looking after" in note]
    seconds = told[lost[0] + 1][0] - told[lost[0]][0] if lost else None
    return outcome.report, outcome.admitted[KEY], seconds


@pytest.mark.parametrize(("fault", "said"), [("hang", "hangs: "), ("stray", "illegal address: ")])
def test_the_tile_is_refused_and_the_next_job_runs_as_before(
    gpu: Device, script: Path, fault: str, said: str
) -> None:
    before = timing(gpu)
    script.write_text(json.dumps({TILES[1].label: fault}))
    report, kept, seconds = grade(gpu)
    (refused,) = report.refused_tiles
    assert refused.tile == TILES[1].label and refused.fault.startswith(said)
    assert kept == (TILES[0], TILES[2])
    assert seconds is not None and seconds < 30
    assert timing(gpu) == pytest.approx(before, rel=0.05)
    # Remembered: its tile is not launched again, so nothing is lost.
    report, _, seconds = grade(gpu)
    assert seconds is None and [t.tile for t in report.refused_tiles] == [TILES[1].label]


def test_short_memory_is_one_line_and_the_next_job_runs_as_before(
    gpu: Device, script: Path
) -> None:
    before = timing(gpu)
    script.write_text(json.dumps({TILES[1].label: "memory"}))
    with pytest.raises(MachineError, match=r"lost twice on .*: out of memory; CUDA out of memory"):
        grade(gpu)
    script.write_text("{}")
    start = time.monotonic()
    after = timing(gpu)
    assert time.monotonic() - start < 30
    assert after == pytest.approx(before, rel=0.05)
    report, *_ = grade(gpu)
    assert not report.refused_tiles


def test_the_gpu_has_the_name_torch_gives_it() -> None:
    import torch

    assert hopper().name == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("fault", [None, "stray"])
def test_memcheck_finds_a_stray_write_and_nothing_in_a_right_kernel(
    script: Path, fault: str | None
) -> None:
    try:
        sanitize.tools("memcheck")
    except MachineError as error:
        pytest.skip(str(error))
    script.write_text(json.dumps({TILES[0].label: fault} if fault else {}))
    spec, programs = loaded()
    job = NumericsJob(
        spec=spec, programs=programs, tiles={KEY: (TILES[0],)}, tool="memcheck", seed=1
    )
    findings = sanitize.sanitize(hopper(), job, lambda *_: None, "faulty_worker").findings
    if fault is None:
        assert findings == ()
    else:
        assert findings[0].message == "memcheck: Invalid __global__ write of size 4 bytes"
        assert "_stray" in findings[0].where["at"]
