"""Each kernel of a benchmark at each size, against everything a user would use instead.

- A cell is one interleaved run. It is a line of the record on disk as soon as it is measured.
- A second run skips a cell, unless the program, its tiles, the toolchain or the benchmark changed.
  A cell that has no answer for a contender asked for is measured again, with all it had. So is a
  cell whose line was taken out.
- Its figures are of the warm regime; under `steady` are those of the steady one.
- The clock is handed in: the judge's own, `coda_agent.agent.judge.timing`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.agent.doctor import package_version
from coda_agent.agent.judge.samples import Samples, speedup
from coda_agent.agent.judge.tuner import SEARCH_ROUNDS, ranked
from coda_agent.evals import contenders as own
from coda_agent.evals import libraries
from coda_agent.evals.contenders import Absent, Contender
from coda_agent.evals.definitions import Benchmark, Suite
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.evals.workloads import Outputs, Rotation, Workload, make_workload
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

# bf16 code that rounds more often than ours errs by 5e-3. A wrong or missing term comes to 1e-1.
LIMIT = 1e-2


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


def require_hopper() -> None:
    """
    Raises:
        MachineError: kernels do not run on this machine.
    """
    import torch

    from coda_agent.primitives.function import supported

    if not (torch.cuda.is_available() and supported(torch.device("cuda"))):
        raise MachineError("evaluations run kernels on a Hopper GPU, and there is none here")


def run_contest(
    root: Path,
    suite: Suite,
    *,
    clock: Clock,
    machine: Mapping[str, Any],
    kernels: Sequence[str] = (),
    sizes: Sequence[int] = (),
    names: Sequence[str] = (),
    rounds: int = 50,
    device: str = "cuda",
    say: Callable[[str], None] = print,
) -> Path:
    """Measure what the record, evals/results/<suite>-<gpu>.json, does not hold yet; its path.

    Args:
        clock: What times.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        kernels: Some of the benchmark's kernels; none means all that are accepted.
        sizes: Instead of the benchmark's.
        names: Some of `contenders`; none means all. `ours` and `gemm` always take part.
        rounds: Timed rounds a cell.
        device: "cpu" interprets instead, for tests.
        say: Takes one line a cell.

    Raises:
        CodaError: unknown kernel or contender, or a suite without a benchmark.
        MachineError: no Hopper GPU.
    """
    from coda_agent.generated.kernel import load_kernel

    benchmark, known = suite.measured(), contenders()
    _check_known("kernel", kernels, benchmark.kernels)
    _check_known("contender", names, known)
    if device == "cuda":
        require_hopper()
    path = gpu_record(root, suite.name, machine, device)
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    needed = [one.package for one in known.values() if one.package]
    packages = {**machine["packages"], **{name: package_version(name, m) for name, m in needed}}
    for kernel_name in kernels or benchmark.kernels:
        folder = root / "generated" / kernel_name
        if not (folder / "kernel.py").is_file():
            continue
        kernel = load_kernel(folder)
        digests = _digests(kernel, folder / "tuned.json", packages, benchmark, clock)
        for size in sizes or benchmark.sizes:
            key, started = f"{kernel_name} {size}", time.monotonic()
            held = cells.get(key, {})
            fresh = held.get("digests") == digests and "steady" in held
            answered = {*held["times"], *held["absent"]} if fresh else set[str]()
            wanted = {"ours", "gemm", *(names or known), *answered}
            if answered == wanted:
                say(f"{key}: in the record")
                continue
            extents = benchmark.shape(kernel.spec, size)
            workload = make_workload(kernel, extents, benchmark.dtype, device)
            before = clock.gpu_state()
            chosen = [one for name, one in known.items() if name in wanted]
            cells[key] = {
                "kernel": kernel_name, "size": size, "sizes": extents, "digests": digests,
                "machine": {**machine, "packages": packages}, "rounds": rounds,
                **measure(workload, benchmark, chosen, clock, rounds),
                "gpu": {"before": before, "after": clock.gpu_state()},
                "seconds": round(time.monotonic() - started, 1),
            }  # fmt: skip
            write_record(path, {"suite": suite.name, "date": today()}, cells)
            ratios = cells[key]["of_gemm"]
            said = ", ".join(f"{n} {ratios[n]['ratio']:.3f}" for n in ratios if n != "gemm")
            say(f"{key}: of the GEMM's speed: {said} ({cells[key]['seconds']} s)")
    return path


def _check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise CodaError(f"no {what} {unknown[0]!r} in the suite, expected {', '.join(known)}")


def _digests(
    kernel: Kernel, tuned: Path, packages: Mapping[str, Any], benchmark: Benchmark, clock: Clock
) -> dict[str, str]:
    """All that the figures of a kernel depend on."""
    tiles = [tile.label for tile in benchmark.tiles]
    return {
        "spec": kernel.spec.digest,
        "program": kernel.programs[kernel.spec.variant()].digest,
        "tuned": _sha(tuned.read_text("utf-8") if tuned.is_file() else ""),
        "toolchain": _sha(packages),
        "protocol": str(clock.PROTOCOL),
        "suite": _sha([benchmark.dtype, tiles, benchmark.reduction_block]),
    }


def measure(
    workload: Workload,
    benchmark: Benchmark,
    chosen: Iterable[Contender],
    clock: Clock,
    rounds: int,
) -> dict[str, Any]:
    """Build each contender, check it against the truth, and time those that are right."""
    import torch

    torch.compiler.reset()  # a reference may be compiled eight times in a process, then not again
    runs: dict[str, Rotation] = {}
    record: dict[str, Any] = {"tiles": {}, "errors": {}, "notes": {}, "absent": {}}
    for contender in chosen:
        name = contender.name
        try:
            run, tile = _built(contender, workload, benchmark, clock)
            outputs = run(0)
            if (off := workload.error(outputs)) > LIMIT:
                raise Absent(f"computes something else: error {off:.1e}")
        except Absent as fault:
            record["absent"][name] = fault.message
        except Exception as fault:  # foreign code: anything may come out of it
            what = "not installed" if isinstance(fault, ImportError) else type(fault).__name__
            line = (str(fault).strip().splitlines() or [""])[0]
            record["absent"][name] = f"{what}: {line}"
        else:
            runs[name] = run
            record["errors"][name] = float(f"{off:.2e}")
            record["tiles"] |= {name: tile} if tile else {}
            record["notes"] |= {name: note} if (note := _less(workload, outputs)) else {}
    samples = dict(clock.interleave(runs, rounds))
    for name in [n for n, s in samples.items() if s.fault and n != "gemm"]:
        record["absent"][name] = samples.pop(name).fault
    record |= _figures(samples)
    streams = clock.steady({name: runs[name] for name in samples})
    record["steady"] = {
        **_figures({name: s for name, s in streams.items() if not s.fault}),
        "absent": {name: s.fault for name, s in streams.items() if s.fault},
    }
    return record


def _figures(samples: Mapping[str, Samples]) -> dict[str, Any]:
    """Times, each contender's speed as a share of cuBLAS's, and ours over each. A contender without
    times has no ratios."""
    times = {name: s.timing().model_dump() for name, s in samples.items()}
    found = {"times": times, "of_gemm": {}, "over": {}}
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
            if workload.error(run(0)) <= LIMIT:
                runs[tile] = run
        except Exception:  # foreign code, and not every tile carries every epilogue
            continue
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
