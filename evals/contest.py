"""Each kernel of a benchmark at each size, against everything a user would use instead.

- A cell is one interleaved run. It is a line of the record on disk as soon as it is measured.
- A second run skips a cell, unless the program, its tile, the machine or the benchmark changed.
  A cell that has no answer for a contender asked for is measured again, with all it had. So is a
  cell whose line was taken out.
- Its figures are of the warm regime; under `steady` are those of the steady one, and under `loop`
  wall times of an eager loop.
- The clock is handed in: the judge's own, `coda_agent.agent.judge.timing`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from coda_agent.agent import execution
from coda_agent.agent.doctor import package_version
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.samples import Samples, speedup
from coda_agent.agent.judge.tuner import SEARCH_ROUNDS, ranked
from coda_agent.evals import contenders as own
from coda_agent.evals import libraries
from coda_agent.evals.contenders import Absent, Contender, called
from coda_agent.evals.definitions import Benchmark, Place, Suite
from coda_agent.evals.host_time import time_loops
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.evals.workloads import Outputs, Rotation, Workload, make_workload
from coda_agent.generated.kernel import Kernel, load_kernel
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig


class Clock(Protocol):
    """What times: `coda_agent.agent.judge.timing`, or what stands for it."""

    @property
    def PROTOCOL(self) -> int: ...

    def interleave(
        self, contenders: Mapping[str, Rotation], rounds: int, /
    ) -> Mapping[str, Samples]: ...

    def steady(self, contenders: Mapping[str, Rotation], /) -> Mapping[str, Samples]: ...

    def gpu_state(self) -> Mapping[str, Any]: ...


def contenders() -> dict[str, Contender]:
    """All contenders by name, in the order of pages: as their modules define them."""
    defined = (*vars(own).values(), *vars(libraries).values())
    return {found.name: found for found in defined if isinstance(found, Contender)}


@dataclass(frozen=True)
class _Task:
    """A cell that is to be measured: where, of what kernel, against whom."""

    place: Place
    kernel: Kernel
    config: TileConfig
    digests: dict[str, str]
    wanted: frozenset[str]


def run_contest(
    root: Path,
    suite: Suite,
    *,
    clock: Clock,
    machine: Mapping[str, Any],
    kernels: Sequence[str] = (),
    sizes: Sequence[int] = (),
    models: Sequence[str] = (),
    names: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float | None = None,
    device: str = "cuda",
    say: Callable[[str], None] = print,
) -> Path:
    """Measure what the record, evals/results/<suite>-<gpu>.json, does not hold yet; its path.

    Args:
        clock: What times.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        kernels: Some of the benchmark's kernels; none means all that are accepted.
        sizes: Instead of the benchmark's.
        models: Some of the benchmark's; none means all.
        names: Some of `contenders`; none means the benchmark's. `ours` and `gemm` always take part.
        rounds: Timed rounds a cell; by default the benchmark's.
        seconds: Begin no further cell after so long. The first one is measured in any case.
        device: "cpu" interprets instead, for tests.
        say: Takes one line a cell, and one of what is left.

    Raises:
        CodaError: unknown kernel, model or contender, or a suite without a benchmark.
    """
    benchmark, known, began = suite.measured(), contenders(), time.monotonic()
    _check_known("kernel", kernels, benchmark.kernels)
    _check_known("model", models, benchmark.models)
    _check_known("contender", names, known)
    path = gpu_record(root, suite.name, machine, device)
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    needed = [one.package for one in known.values() if one.package]
    packages = {**machine["packages"], **{name: package_version(name, m) for name, m in needed}}
    machine = {**machine, "packages": packages}
    # What is not installed has nothing to add to a cell; once installed, it is another machine.
    lacking = {n for n, one in known.items() if one.package and not packages[one.package[0]]}
    names = names or benchmark.contenders or tuple(known)
    accepted = _accepted(root, kernels or benchmark.kernels)
    tasks = []
    for place in benchmark.places(kernels, sizes, models):
        if not (kernel := accepted.get(place.kernel)):
            continue
        task = _task(kernel, place, benchmark, machine, names, clock)
        held = cells.get(place.key, {})
        if held.get("digests") == task.digests and "steady" in held:
            answered = {*held["times"], *held["absent"]}
            if answered >= task.wanted - lacking:
                say(f"{place.key}: in the record")
                continue
            task = replace(task, wanted=task.wanted | answered)
        tasks.append(task)
    if device == "cuda":
        within = None if seconds is None else int(seconds) + 1  # no cell takes less than a second
        _compile_ahead(tasks[:within], benchmark, say)
    after: Mapping[str, Any] = {}
    for done, task in enumerate(tasks):
        if done and seconds is not None and time.monotonic() - began > seconds:
            say(f"stopped after {seconds:g} s: {len(tasks) - done} cells are left")
            break
        key, started = task.place.key, time.monotonic()
        before = after or clock.gpu_state()
        try:
            figures = _measured(task, benchmark, clock, rounds or benchmark.rounds, device)
        except MachineError as fault:  # the clocks disagree; the next run may fare better
            say(f"{key}: not measured: {fault.message}")
            continue
        except torch.OutOfMemoryError as error:
            why = dict.fromkeys(task.wanted, str(error).splitlines()[0])
            figures: dict[str, Any] = {"tiles": {}, "errors": {}, "notes": {}}
            figures |= {**_figures("warm", {}, True), "absent": why}
            figures["steady"] = {**_figures("steady", {}, True), "absent": why}
        about = {"model": task.place.model, "product": task.place.product}
        cells[key] = {
            "kernel": task.place.kernel, "size": task.place.size,
            **{name: value for name, value in about.items() if value},
            "sizes": task.place.sizes(task.kernel.spec), "digests": task.digests,
            "machine": machine, "rounds": rounds or benchmark.rounds, **figures,
            "gpu": {"before": before, "after": (after := clock.gpu_state())},
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        write_record(path, {"suite": suite.name, "date": today()}, cells)
        ratios = {n: r["ratio"] for n, r in figures["of_gemm"].items() if n != "gemm"}
        said = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        said = f"of the GEMM's speed: {said}" if said else "; ".join(figures["absent"].values())
        say(f"{key}: {said} ({cells[key]['seconds']} s)")
    return path


def _accepted(root: Path, names: Iterable[str]) -> dict[str, Kernel]:
    """Kernels by name, without those that are not accepted. Each is read once, since that takes
    5 ms and a suite has hundreds of cells."""
    folders = {name: root / "generated" / name for name in names}
    return {n: load_kernel(f) for n, f in folders.items() if (f / "kernel.py").is_file()}


def _task(
    kernel: Kernel,
    place: Place,
    benchmark: Benchmark,
    machine: Mapping[str, Any],
    names: Iterable[str],
    clock: Clock,
) -> _Task:
    """What is to be measured of a kernel at a place, and all that its figures depend on."""
    spec, sizes = kernel.spec, place.sizes(kernel.spec)
    dtype = spec.dtype_of(spec.gemm[0], dict.fromkeys(spec.types, benchmark.dtype))
    m, n, k = (sizes[dim] for dim in spec.gemm_dims)
    config = kernel.choose(m, n, k, dtype) or DEFAULT_CONFIGS["sm_90a"]
    tiles = [tile.label for tile in benchmark.tiles]
    digests = {
        "spec": spec.digest,
        "program": kernel.programs[spec.variant()].digest,
        "tile": _sha(asdict(config)),
        "machine": _sha([machine["gpu"], machine["packages"]]),
        "protocol": str(clock.PROTOCOL),
        "suite": _sha([benchmark.dtype, tiles, benchmark.reduction_block, sizes]),
    }
    return _Task(place, kernel, config, digests, frozenset({"ours", "gemm", *names}))


def _compile_ahead(
    tasks: Iterable[_Task], benchmark: Benchmark, say: Callable[[str], None]
) -> None:
    """Compile the kernels of all tasks side by side: one after the other they take 3 s each. What
    does not compile is said of its cell."""
    jobs: dict[tuple[str, TileConfig], CompileJob] = {}
    for task in tasks:
        spec = task.kernel.spec
        program = task.kernel.programs[spec.variant()]
        job = CompileJob.of(program, task.config, "sm_90a", spec, benchmark.dtype)
        jobs[program.digest, task.config] = job
    if jobs:
        started = time.monotonic()
        execution.executor().map([*jobs.values()], lambda *_: None)
        say(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.0f} s")


def _check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise CodaError(f"no {what} {unknown[0]!r} in the suite, expected {', '.join(known)}")


def _measured(
    task: _Task, benchmark: Benchmark, clock: Clock, rounds: int, device: str
) -> dict[str, Any]:
    """Build each contender, check it against the truth, and time those that are right."""
    torch.compiler.reset()  # a reference may be compiled eight times in a process, then not again
    place = task.place
    sizes = place.sizes(task.kernel.spec)
    workload = make_workload(task.kernel, sizes, benchmark.dtype, device, place.widths)
    runs: dict[str, Rotation] = {}
    record: dict[str, Any] = {"tiles": {}, "errors": {}, "notes": {}, "absent": {}}
    for name, contender in contenders().items():
        if name not in task.wanted:
            continue
        try:
            run, tile = _built(contender, workload, benchmark, clock)
            off, outputs = _checked(run, workload)
        except Exception as fault:  # foreign code: anything may come out of it
            record["absent"][name] = _why(fault)
        else:
            runs[name] = run
            record["errors"][name] = float(f"{off:.2e}")
            record["tiles"] |= {name: tile} if tile else {}
            record["notes"] |= {name: note} if (note := _less(workload, outputs)) else {}
    samples = dict(clock.interleave(runs, rounds))
    for name in [n for n, s in samples.items() if s.fault and n != "gemm"]:
        record["absent"][name] = samples.pop(name).fault
    brief = bool(benchmark.models)  # hundreds of cells: without each round's time
    record |= _figures("warm", samples, brief)
    streams = clock.steady({name: runs[name] for name in samples})
    record["steady"] = {
        **_figures("steady", {name: s for name, s in streams.items() if not s.fault}, brief),
        "absent": {name: s.fault for name, s in streams.items() if s.fault},
    }
    if benchmark.loops:
        sound = {n: runs[n] for n, s in samples.items() if not s.fault}
        gpu_us = {n: samples[n].median_us for n in sound}
        times, absent = _looped(workload, sound, gpu_us, device)
        record["loop"] = {**_figures("loop", times, brief), "absent": absent}
    return record


def _looped(
    workload: Workload, runs: dict[str, Rotation], gpu_us: Mapping[str, float], device: str
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Wall times of eager loops, ours of the function that a user imports; and why it has none."""
    absent: dict[str, str] = {}
    if runs.pop("ours", None):
        try:
            function = called(workload)
            _checked(function, workload)
            runs["ours"] = function
        except Exception as fault:
            absent["ours"] = _why(fault)
    return time_loops(runs, gpu_us, device), absent


def _checked(run: Rotation, workload: Workload) -> tuple[float, Outputs]:
    """The error of a contender's outputs, and the outputs.

    Raises:
        Absent: it computes something else.
    """
    outputs = run(0)
    if (off := workload.error(outputs)) > workload.limit:
        raise Absent(f"computes something else: error {off:.1e}")
    run(1)  # what fails on the other set fails here, and not while others are timed
    return off, outputs


def _why(fault: Exception) -> str:
    """Why a contender takes no part, in one line."""
    if isinstance(fault, Absent):
        return fault.message
    what = "not installed" if isinstance(fault, ImportError) else type(fault).__name__
    return f"{what}: {(str(fault).strip().splitlines() or [''])[0]}"


def _figures(regime: str, samples: Mapping[str, Samples], brief: bool) -> dict[str, Any]:
    """Times in a regime, each contender's speed as a share of cuBLAS's, and ours over each. A
    contender without times has no ratios."""
    kept = {"median_us", "interval_us"} if brief else None
    times = {name: s.timing().model_dump(include=kept) for name, s in samples.items()}
    found: dict[str, Any] = {"regime": regime, "times": times, "of_gemm": {}, "over": {}}
    if gemm := samples.get("gemm"):
        found["of_gemm"] = {name: speedup(s, gemm).model_dump() for name, s in samples.items()}
    if ours := samples.get("ours"):
        found["over"] = {name: speedup(ours, s).model_dump() for name, s in samples.items()}
    return found


def _built(
    contender: Contender, workload: Workload, benchmark: Benchmark, clock: Clock
) -> tuple[Rotation, str]:
    """A contender's call, and where it has a choice of tiles the one it is fastest in."""
    if contender.tiles is None:
        return contender(workload), ""
    tiles = contender.tiles(workload, benchmark)
    if len(tiles) == 1:
        return contender(workload, tiles[0]), tiles[0].label
    runs: dict[TileConfig, Rotation] = {}
    for tile in tiles:
        run = contender(workload, tile)
        try:
            _checked(run, workload)
        except Exception:  # foreign code, and not every tile carries every epilogue
            continue
        runs[tile] = run
    if not runs:
        raise Absent("no tile computes the right result")
    best, _ = ranked(runs, SEARCH_ROUNDS, clock.interleave)[0]
    return contender(workload, best), best.label  # anew, as what is accumulated in place


def _less(workload: Workload, outputs: Outputs) -> str:
    """Which of the spec's outputs a contender does not give, and what it gives instead."""
    other = [o for o in outputs if o not in workload.kernel.spec.outputs]
    missing = ", ".join(o for o in workload.kernel.spec.outputs if o not in outputs)
    if not missing or "product" in other:
        return ""
    return f"{', '.join(other)} for {missing}" if other else f"without {missing}"


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
