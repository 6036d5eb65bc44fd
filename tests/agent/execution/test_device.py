"""The supervisor of a GPU against a child that fails on purpose, and against a driver that does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from coda_agent.agent.execution import device, faulted_tiles, sanitize
from coda_agent.agent.execution.device import Device, exclusive, find_gpus, is_free
from coda_agent.agent.execution.device_worker import Watch, named
from coda_agent.agent.judge.job import NumericsJob, read_job
from coda_agent.agent.judge.machine import Gpu
from coda_agent.primitives import Program, Tile, epilogue
from coda_agent.primitives.errors import CodaError, MachineError, SpecError
from coda_agent.primitives.tiles import SM90_CONFIGS, TileConfig
from coda_agent.runtime.launch import Arguments, launcher
from coda_agent.specs import Spec, load_spec

HERE = Path(__file__).parent
GPU = Gpu("GPU-1234", "Fake GPU", "9.0")
# One tile of each name the script knows; the first is the default one.
TILES = [SM90_CONFIGS[i] for i in (0, 3, 4, 5, 8)]
NAMES = [f"{c.tile_m}x{c.tile_n}" for c in TILES]
SMI = """#!/bin/sh
case "$*" in
*compute-apps*) ;;
*memory.used*) cat "${PYTHONPATH%%:*}/used" ;;
*index*) echo "0, GPU-0abc, Other, 8.0"; echo "1, GPU-1234, Fake GPU, 9.0" ;;
*) echo "Fake GPU, 1, 1, 1, 1, 1, 1, 1" ;;
esac
"""


@epilogue(D=Tile)
def gemm_swiglu(acc):
    return {"D": acc}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the child's script, its journal and nvidia-smi's answers are."""
    made = tmp_path / "cache"
    made.mkdir()
    for name, text in (("nvidia-smi", SMI), ("cache/used", "100, 0"), ("cache/script.json", "{}")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{made}:{HERE}")
    monkeypatch.setenv("QUACK_CACHE_DIR", str(made))  # which a child may write
    monkeypatch.setattr(device, "LOCKS", tmp_path)
    monkeypatch.setattr(device, "HANG_S", 0.4)
    monkeypatch.setattr(device, "SETTLE_S", 0.3)
    return made


@pytest.fixture
def gpu(folder: Path) -> Iterator[Device]:
    made = Device(GPU, "scripted_device")
    yield made
    made.close()


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(HERE.parents[2] / "specs" / "gemm_swiglu.md")


def write(folder: Path, **script: Any) -> None:
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "journal").unlink(missing_ok=True)


def grade(
    gpu: Device,
    spec: Spec,
    kind: str = "numerics",
    types: tuple[str, ...] = ("bfloat16",),
    said: list[str] | None = None,
) -> Any:
    """The outcome."""
    tiles = {("gemm_swiglu", element): tuple(TILES) for element in types}
    given = {"spec": spec, "programs": {"gemm_swiglu": gemm_swiglu}, "tiles": tiles}
    given |= {"seed": 1} if kind == "numerics" else {}
    notes = said if said is not None else []
    return gpu.grade(read_job({"kind": kind, **given}), lambda *told: notes.append(told[2]))


def launched(folder: Path, element: str = "bfloat16") -> list[str]:
    lines = (folder / "journal").read_text().splitlines()
    return [line.split()[2] for line in lines if line.startswith(f"gemm_swiglu {element} ")]


def admitted(outcome: Any) -> list[str]:
    return [f"{c.tile_m}x{c.tile_n}" for kept in outcome.admitted.values() for c in kept]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", "hangs: no sign of life for 0.4 s"),
        ("crash", "the device child died: killed by SIGSEGV"),
        ("illegal address", "illegal address: CUDA error: illegal address"),
    ],
)
def test_a_tile_that_faults_is_refused_and_the_gate_goes_on_without_it(
    gpu: Device, folder: Path, spec: Spec, fault: str, said: str
) -> None:
    write(folder, **{NAMES[2]: fault})
    notes: list[str] = []
    record = grade(gpu, spec, types=("bfloat16", "float16"), said=notes)
    assert not record.findings
    assert admitted(record) == [*NAMES[:2], *NAMES[3:]] * 2
    (first, second) = record.report.refused_tiles
    assert first.fault == said and first.tile == TILES[2].label
    assert first.where["sizes"] == {"m": 8, "n": 16, "k": 32}
    assert (first.dtype, second.dtype) == ("bfloat16", "float16")
    assert record.report.worst.keys() == {"gemm_swiglu bfloat16", "gemm_swiglu float16"}
    assert any("looking after Fake GPU" in note for note in notes)
    # The type that was through is not run again for the fault of the next one.
    assert launched(folder) == [*NAMES[:3], *NAMES[:2], *NAMES[3:]]


def test_what_faulted_once_is_not_launched_again_until_a_digest_changes(
    gpu: Device, folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, **{NAMES[1]: "hang"})
    grade(gpu, spec)
    write(folder)
    (folder.parent / "faults.jsonl").open("a").write('{"key": "torn')
    another = Device(GPU, "scripted_device")
    try:
        record = grade(another, spec, kind="performance")
    finally:
        another.close()
    assert launched(folder) == [NAMES[0], *NAMES[2:]]
    (refused,) = record.report.refused_tiles
    assert refused.tile == TILES[1].label and "faults.jsonl" in refused.fault
    assert [cell.dtype for cell in record.report.cells] == ["performance"]

    def known(gpu: str, program: Program, element: str) -> list[TileConfig]:
        return list(faulted_tiles.FaultMemory(gpu, program, element).known(TILES))

    @epilogue(D=Tile)
    def other(acc):
        return {"D": acc + 1}

    assert known("Fake GPU", gemm_swiglu, "bfloat16") == [TILES[1]]
    assert known("Fake GPU", other, "bfloat16") == []
    assert known("Fake GPU", gemm_swiglu, "float16") == []
    assert known("Another GPU", gemm_swiglu, "bfloat16") == []
    monkeypatch.setattr(faulted_tiles, "version", lambda _: "another release")
    assert known("Fake GPU", gemm_swiglu, "bfloat16") == []


def test_a_fault_of_the_default_tile_refuses_the_program_at_once(
    gpu: Device, folder: Path, spec: Spec
) -> None:
    write(folder, **{NAMES[0]: "illegal address"})
    record = grade(gpu, spec, types=("bfloat16", "float16"))
    (finding,) = record.findings
    assert finding.where["tile"] == TILES[0].label and "illegal address" in finding.message
    assert launched(folder) == NAMES[:1] and launched(folder, "float16") == []


def test_many_tiles_that_fault_refuse_the_program(
    gpu: Device, folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "MAX_FAULTS", 2)
    write(folder, **dict.fromkeys(NAMES[1:], "illegal address"))
    record = grade(gpu, spec)
    assert [f.where["tile"] for f in record.findings] == [c.label for c in TILES[1:3]]


def test_a_rasterisation_order_that_faults_is_its_tile(
    spec: Spec,
) -> None:
    about = {"program": "gemm_swiglu", "dtype": "float16"}
    launch = {**about, "config": replace(TILES[2], swizzle=2), "m": 8, "n": 16, "k": 32}
    left = {("gemm_swiglu", element): tuple(TILES) for element in ("bfloat16", "float16")}
    found = device._culprit(spec, faulted_tiles.Launch(**launch), left)
    assert found == (("gemm_swiglu", "float16"), TILES[2])


def test_short_memory_is_no_tile_s_fault_and_the_next_job_runs(
    gpu: Device, folder: Path, spec: Spec
) -> None:
    write(folder, **{NAMES[1]: "out of memory"})
    with pytest.raises(MachineError, match="lost twice on Fake GPU: out of memory; CUDA error"):
        grade(gpu, spec)
    assert launched(folder) == NAMES[:2] * 2
    assert not (folder.parent / "faults.jsonl").exists()
    write(folder)
    assert admitted(grade(gpu, spec)) == NAMES


def test_a_job_lost_to_nobody_s_fault_is_tried_once_more(
    gpu: Device, folder: Path, spec: Spec
) -> None:
    write(folder, once=True)
    assert admitted(grade(gpu, spec)) == NAMES
    assert (folder / "journal").read_text().splitlines()[:3] == ["numerics", "probe", "numerics"]


def test_what_a_job_raises_is_raised_here(gpu: Device, folder: Path, spec: Spec) -> None:
    write(folder, **{NAMES[0]: "error"})
    with pytest.raises(SpecError, match="the baseline disagrees") as caught:
        grade(gpu, spec)
    assert caught.value.hint == "mend it"
    write(folder, **{NAMES[0]: "bug"})
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        grade(gpu, spec)


def test_a_gpu_that_does_not_recover_is_one_clear_error(
    gpu: Device, folder: Path, spec: Spec
) -> None:
    gpu.start()
    write(folder, **{NAMES[1]: "hang"}, probe=False)
    with pytest.raises(MachineError, match=r"after a fault \(hangs\) .* it multiplies wrongly"):
        grade(gpu, spec)
    for used, said in (("9100, 0", "9000 MiB more in use"), ("100, 100", "100 % busy")):
        write(folder, **{NAMES[1]: "hang"})
        (folder / "used").write_text(used)
        with pytest.raises(MachineError, match=f"stays .*{said}.*no process on it"):
            grade(gpu, spec)


def test_a_child_that_never_starts_is_one_clear_error(folder: Path, spec: Spec) -> None:
    broken = Device(GPU, "no_such_module_at_all")
    with pytest.raises(MachineError, match=r"does not answer: exit status 1: .*no_such_module"):
        grade(broken, spec)


HOLDER = """
import sys, time
from pathlib import Path
from coda_agent.agent.execution import device
device.LOCKS = Path(sys.argv[1])
with device.exclusive([device.Gpu("GPU-1234", "Fake GPU", "9.0")]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_two_processes_never_have_one_gpu_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder.parent), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        monkeypatch.setattr(device, "LOCK_S", 0.2)
        held = pytest.raises(MachineError, match="another coda-agent process has held Fake GPU")
        with held, exclusive([GPU]):
            raise AssertionError("two have it")
        monkeypatch.setattr(device, "LOCK_S", 60)
        other = Gpu("GPU-0abc", "Other", "8.0")
        with exclusive([GPU, other]) as free:
            assert free == other
        assert is_free(other) and not is_free(GPU)
        notes: list[str] = []
        with exclusive([GPU], lambda *told: notes.append(told[2])):
            assert holder.wait() == 0
        assert notes and "another coda-agent process uses Fake GPU" in notes[0]


# A shell has what it starts in the background ignore interrupts, which the tests' own child inherits.
INTERRUPTED = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
import test_device as t
t.device.LOCKS = Path(sys.argv[1])
gpu = t.Device(t.GPU, "scripted_device")
spec = t.load_spec(t.HERE.parents[2] / "specs" / "gemm_swiglu.md")
t.grade(gpu, spec)
"""


def test_an_interrupt_leaves_no_child(folder: Path) -> None:
    write(folder, **{NAMES[0]: "hang"})
    text = INTERRUPTED.format(here=str(HERE))
    with subprocess.Popen(
        [sys.executable, "-c", text, str(folder.parent)], stderr=subprocess.DEVNULL
    ) as command:
        # No bound of time: a command that heeds no interrupt gives the tile up, and ends without.
        while not ((folder / "journal").exists() and launched(folder)):
            assert command.poll() is None
            time.sleep(0.05)
        assert children(folder)
        command.send_signal(signal.SIGINT)
        assert command.wait() != 0
    assert not children(folder)


def children(folder: Path) -> list[str]:
    """Processes of the scripted device that were started with this test's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if (
                b"scripted_device" in command
                and bytes(folder) in (process / "environ").read_bytes()
            ):
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ["Other", "Fake GPU"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["Fake GPU", "Other"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-12"}, ["Fake GPU"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0", "CODA_AGENT_GPU": "1"}, ["Fake GPU"]),
    ],
)
def test_the_gpus_are_those_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], names: list[str]
) -> None:
    for key in ("CUDA_VISIBLE_DEVICES", "CODA_AGENT_GPU"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert [gpu.name for gpu in find_gpus()] == names


def test_a_gpu_asked_for_that_is_not_there_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODA_AGENT_GPU", "7")
    with pytest.raises(MachineError, match=r"CODA_AGENT_GPU=7 names no GPU here; .*1 \(GPU-1234\)"):
        find_gpus()


class Operand:
    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, "bf16"

    def stride(self) -> tuple[int, ...]:
        return (self.shape[1], 1)


def watched(every: bool) -> tuple[Watch, list[Any], Callable[[TileConfig], Any]]:
    events: list[Any] = []

    def launch(given: Arguments, *, run: bool = True) -> str:
        events.append(("launch" if run else "compile", given.config.label))
        return "plan"

    # With the real one's parameters: a call that it would refuse fails here.
    watch = Watch(
        create_autospec(launcher.get(), side_effect=launch), lambda: events.append("wait")
    )
    watch.begin(lambda told: events.append(told["launch"] and told["launch"]["n"]), every=every)
    a, b = cast("Any", Operand(8, 32)), cast("Any", Operand(16, 32))
    return watch, events, lambda config: watch(Arguments(gemm_swiglu, a, b, {}, {}, config))


def test_a_kernel_is_compiled_first_then_told_then_launched() -> None:
    config = TILES[1]
    compiled, ran = ("compile", config.label), ("launch", config.label)
    _, events, call = watched(every=True)
    assert call(config) == call(config) == "plan"
    assert events == [None, compiled, 16, ran] * 2
    _, events, call = watched(every=False)
    assert call(config) == call(config) == "plan"
    assert events == [None, compiled, 16, ran, "wait", None, ran]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel", "illegal address"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS (700)", "illegal address"),
        ("CUDA Error Code: 700", "illegal address"),
        ("CUDA Error Code: 719", "launch failure"),
        ("CUDA out of memory. Tried to allocate 200.00 GiB.", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "out of memory"),
        ("CUDA error: misaligned address", "misaligned address"),
        ("CUDA error: unspecified launch failure", "launch failure"),
        ("CUDA error: device-side assert triggered", "CUDA error"),
        ("Found no NVIDIA driver on your system.", "CUDA error"),
        ("all tensors must be on one device, found cuda:0 and cpu", None),
    ],
)
def test_what_an_error_says_of_the_gpu(said: str, name: str | None) -> None:
    assert named(RuntimeError(said)) == name


REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at kernel_cutlass_gemm_sm90+0x1230
=========     by thread (5,0,0) in block (3,0,0)
=========     Address 0x7f2a10000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2a10000000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x2f2a1e] in libcuda.so.1
=========
========= Invalid __global__ write of size 2 bytes
=========     at kernel_cutlass_gemm_sm90+0x1230
=========     by thread (6,0,0) in block (3,0,0)
=========     Address 0x7f2a10000202 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure".
=========     Saved host backtrace up to driver entry point at error
=========
========= Error: Race reported between Write access at kernel_cutlass_gemm_sm90+0x40
=========     and Read access at kernel_cutlass_gemm_sm90+0x90 [128 hazards]
=========
========= ERROR SUMMARY: 4 errors
"""


def test_a_sanitizer_s_report_becomes_findings() -> None:
    write, race = sanitize.parse("memcheck", REPORT)
    assert write.message == "memcheck: Invalid __global__ write of size 2 bytes"
    assert write.where == {
        "tool": "memcheck", "at": "kernel_cutlass_gemm_sm90+0x1230", "times": 2,
        "address": "0x7f2a10000200", "thread": "(5,0,0)", "block": "(3,0,0)",
    }  # fmt: skip
    assert race.where["at"] == "kernel_cutlass_gemm_sm90+0x40"
    many = "".join(REPORT.replace("0x1230", hex(i)) for i in range(20))
    assert len(sanitize.parse("memcheck", many)) == sanitize.MAX_FINDINGS


SANITIZER = """#!/bin/sh
log=$4; shift 6
"$@"
cp "${PYTHONPATH%%:*}/report" "$log"
"""


def test_the_sanitizer_wraps_the_child_and_an_absent_one_is_said(
    folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[str]:
        tiles = {("gemm_swiglu", "bfloat16"): (TILES[0],)}
        job = NumericsJob(
            spec=spec, programs={"gemm_swiglu": gemm_swiglu}, tiles=tiles, tool="memcheck", seed=1
        )
        found = sanitize.sanitize(GPU, job, lambda *_: None, "scripted_device")
        return [f.message for f in found.findings]

    with pytest.raises(CodaError, match="no sanitizer tool 'leakcheck'"):
        sanitize.tools("memcheck,leakcheck")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    with pytest.raises(MachineError, match="compute-sanitizer is not installed"):
        sanitize.tools("memcheck")
    tool = folder.parent / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    assert sanitize.tools("racecheck,memcheck") == ("memcheck", "racecheck")
    (folder / "report").write_text(REPORT)
    write(folder)
    assert len(run()) == 2
    assert launched(folder) == NAMES[:1]
    (folder / "report").write_text(
        "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    )
    assert run() == []
    (folder / "report").write_text("========= COMPUTE-SANITIZER\n")
    with pytest.raises(MachineError, match="memcheck left no report: exit status 0"):
        run()
