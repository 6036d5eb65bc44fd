"""Runs a suite: each kernel at each size against everything a user would use instead.

- A cell is one interleaved run. It is in the record on disk as soon as it is measured; a second run
  skips it unless the program, its tiles, the toolchain or the suite's definition changed, or it has
  no answer for a contender asked for: then all it had take part again. A cell is a line of the
  file; without the line it is measured again.
- The clock is handed in: the judge's own, `coda_agent.agent.judge.timing`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.evals import contenders, libraries, suites
from coda_agent.evals.contenders import Case, Run, error, make_case
from coda_agent.evals.pages import write_record
from coda_agent.primitives.errors import CodaError, CompileError, MachineError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.specs.format import evaluate

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

CONTENDERS = {
    "ours": "ours",
    "ours_block": "ours, raw partials",
    "gemm": "cuBLAS GEMM",
    "quack_gemm": "quack GEMM",
    "quack": "quack epilogue",
    "compile": "torch.compile",
    "compile_max": "max-autotune",
    "liger": "Liger",
    "flashinfer": "FlashInfer",
}
# bf16 code that rounds more often than ours comes to 5e-3; a wrong or missing term to 1e-1.
LIMIT = 1e-2
_SEARCH_ROUNDS = 9
_LIBRARIES = {"liger-kernel": "liger_kernel", "flashinfer-python": "flashinfer"}


class Clock(Protocol):
    """What times: the functions of `coda_agent.agent.judge.timing`."""

    def interleave(
        self, contenders: Mapping[str, Callable[[int], Any]], rounds: int
    ) -> Mapping[str, Any]: ...

    def speedup(self, ours: Any, other: Any) -> dict[str, float]: ...

    def gpu_state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Suite:
    """A suite's definition.

    Attributes:
        kernels: Kernel name to `dims` (expressions over S; S itself where none is given) and
            `reference_ms` (size to `gemm` and `paper`).
        tiles: Configurations that quack's kernels and fixed-block runs are searched over.
    """

    name: str
    title: str
    dtype: str
    sizes: list[int]
    reduction_block: int
    reference_source: str
    kernels: dict[str, dict[str, Any]]
    tiles: list[TileConfig]

    def shape(self, kernel: Kernel, size: int) -> dict[str, int]:
        dims = self.kernels[kernel.spec.name].get("dims", {})
        return {d: int(evaluate(dims.get(d, "S"), {"S": size})) for d in kernel.spec.dims}


def load_suite(name: str) -> Suite:
    """The `[benchmark]` of a suite.

    Raises:
        CodaError: there is no such suite, or nothing to measure in it.
    """
    suite = suites.load(name)
    if suite.benchmark is None:
        raise CodaError(f"suite {name} has no [benchmark] table", hint="bench --suite paper has")
    data = {**suite.benchmark, "tiles": [TileConfig(*t) for t in suite.benchmark["tiles"]]}
    return Suite(name=suite.name, title=suite.title, **data)


def require_hopper() -> None:
    """
    Raises:
        MachineError: kernels do not run on this machine.
    """
    import torch

    from coda_agent.primitives.function import supported

    if not (torch.cuda.is_available() and supported(torch.device("cuda"))):
        raise MachineError("evaluations run kernels on a Hopper GPU, and there is none here")


def run_suite(
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
    """Measure what the record does not hold yet.

    Args:
        root: The workspace; kernels come from its generated/.
        suite: The suite.
        clock: What times.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        kernels: Some of the suite's kernels; none means all that are accepted.
        sizes: Instead of the suite's.
        names: Some of `CONTENDERS`; none means all. `ours` and `gemm` always take part.
        rounds: Timed rounds a cell.
        device: "cpu" interprets instead, for tests.
        say: Takes one line a cell.

    Returns:
        The record's file, evals/results/<suite>-<gpu>.json.

    Raises:
        CodaError: unknown kernel or contender.
        MachineError: no Hopper GPU.
    """
    from coda_agent.generated.kernel import load_kernel

    _known("kernel", kernels, suite.kernels)
    _known("contender", names, CONTENDERS)
    if device == "cuda":
        require_hopper()
    gpu = re.sub(r"\W+", "-", str(machine["gpu"].get("name", device)).lower())
    path = root / "evals" / "results" / f"{suite.name}-{gpu}.json"
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    have = [k for k in kernels or suite.kernels if (root / "generated" / k / "kernel.py").is_file()]
    packages = {**machine["packages"], **{p: _version(p, m) for p, m in _LIBRARIES.items()}}
    for kernel_name in have:
        folder = root / "generated" / kernel_name
        kernel = load_kernel(folder)
        tuned = folder / "tuned.json"
        digests = {
            "spec": kernel.spec.digest,
            "program": kernel.programs[kernel.spec.variant()].digest,
            "tuned": _sha(tuned.read_text("utf-8") if tuned.is_file() else ""),
            "toolchain": _sha(packages),
            "suite": _sha([suite.dtype, [t.label for t in suite.tiles], suite.reduction_block]),
        }
        for size in sizes or suite.sizes:
            key, started = f"{kernel_name} {size}", time.monotonic()
            held = cells.get(key, {})
            fresh = held.get("digests") == digests
            answered = {*held["times"], *held["absent"]} if fresh else set[str]()
            wanted = {"ours", "gemm", *(names or CONTENDERS), *answered}
            if answered == wanted:
                say(f"{key}: in the record")
                continue
            sizes_of = suite.shape(kernel, size)
            case = make_case(kernel, sizes_of, suite.dtype, device)
            before = clock.gpu_state()
            cells[key] = {
                "kernel": kernel_name, "size": size, "sizes": sizes_of, "digests": digests,
                "machine": {**machine, "packages": packages}, "rounds": rounds,
                **measure(case, suite, [n for n in CONTENDERS if n in wanted], clock, rounds),
                "gpu": {"before": before, "after": clock.gpu_state()},
                "seconds": round(time.monotonic() - started, 1),
            }  # fmt: skip
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            write_record(path, {"suite": suite.name, "date": date}, cells)
            ratios = ((n, r["ratio"]) for n, r in cells[key]["of_gemm"].items() if n != "gemm")
            said = ", ".join(f"{n} {ratio:.3f}" for n, ratio in ratios)
            say(f"{key}: of the GEMM's speed: {said} ({cells[key]['seconds']} s)")
    return path


def measure(
    case: Case, suite: Suite, names: Sequence[str], clock: Clock, rounds: int
) -> dict[str, Any]:
    """Build each contender, check it against the truth, and time those that are right."""
    import torch

    torch.compiler.reset()  # a reference may be compiled eight times in a process, then not again
    runs: dict[str, Run] = {}
    record: dict[str, Any] = {"tiles": {}, "errors": {}, "notes": {}, "absent": {}}
    for name in names:
        try:
            built = _build(name, case, suite, clock)
            if built is None:
                record["absent"][name] = "has nothing for this kernel"
                continue
            run, tile = built
            outputs = run(0)
            off = error(case, outputs)
        except ImportError as fault:
            record["absent"][name] = f"not installed: {fault}"
            continue
        except Exception as fault:  # foreign code: anything may come out of it
            line = (str(fault).strip().splitlines() or [""])[0]
            record["absent"][name] = f"{type(fault).__name__}: {line}"
            continue
        if off > LIMIT:
            record["absent"][name] = f"computes something else: error {off:.1e}"
            continue
        runs[name] = run
        record["errors"][name] = float(f"{off:.2e}")
        record["tiles"] |= {name: tile} if tile else {}
        record["notes"] |= {name: note} if (note := _less(case, outputs)) else {}
    samples = dict(clock.interleave(runs, rounds))
    for name in [n for n, s in samples.items() if s.fault and n != "gemm"]:
        record["absent"][name] = samples.pop(name).fault
    record["times"] = {name: s.to_dict() for name, s in samples.items()}
    record["of_gemm"] = {n: clock.speedup(s, samples["gemm"]) for n, s in samples.items()}
    if "ours" in samples:
        record["over"] = {n: clock.speedup(samples["ours"], s) for n, s in samples.items()}
    return record


def _build(name: str, case: Case, suite: Suite, clock: Clock) -> tuple[Run, str] | None:
    """A contender's call, and its tile where it has one."""
    search = partial(_fastest, case, suite.tiles, clock)
    match name:
        case "ours":
            config = case.kernel.choose(*case.mnk, suite.dtype) or DEFAULT_CONFIGS["sm_90a"]
            return contenders.ours(case, config), config.label
        case "ours_block":
            program = case.kernel.programs[case.kernel.spec.variant()]
            over_rows = {kind.over_rows for kind in program.reductions.values()}
            if len(over_rows) != 1:
                return None
            side = "tile_m" if over_rows.pop() else "tile_n"
            tiles = [t for t in suite.tiles if getattr(t, side) == suite.reduction_block]
            return _fastest(case, tiles, clock, partial(contenders.ours, case, raw=True))
        case "gemm":
            return contenders.gemm(case), ""
        case "quack_gemm":
            return search(partial(contenders.quack_gemm, case))
        case "quack":
            return search(partial(libraries.quack, case))
        case "compile":
            return contenders.compiled(case, "default"), ""
        case "compile_max":
            # With CUDA graphs (plain max-autotune) every call would copy its inputs first.
            return contenders.compiled(case, "max-autotune-no-cudagraphs"), ""
    composed = libraries.compose(case, getattr(libraries, name)())
    return composed and (composed, "")


def _fastest(
    case: Case, tiles: Sequence[TileConfig], clock: Clock, make: Callable[[TileConfig], Run | None]
) -> tuple[Run, str] | None:
    """The fastest of the tiles that compile and compute rightly."""
    runs: dict[TileConfig, Run] = {}
    for tile in tiles:
        run = make(tile)
        if run is None:
            return None
        try:
            if error(case, run(0)) <= LIMIT:
                runs[tile] = run
        except Exception:  # foreign code, and not every tile carries every epilogue
            continue
    if not runs:
        raise CompileError("no tile computes the right result")
    samples = clock.interleave({t.label: run for t, run in runs.items()}, _SEARCH_ROUNDS)
    best = min(runs, key=lambda t: samples[t.label].median_us)
    fresh = make(best)  # what is accumulated in place starts anew
    return fresh and (fresh, best.label)


def _less(case: Case, outputs: Mapping[str, Any]) -> str:
    """Which of the spec's outputs a contender does not give, and what it gives instead."""
    other = [o for o in outputs if o not in case.kernel.spec.outputs]
    missing = ", ".join(o for o in case.kernel.spec.outputs if o not in outputs)
    if not missing or "product" in other:
        return ""
    return f"{', '.join(other)} for {missing}" if other else f"without {missing}"


def _known(what: str, given: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise CodaError(f"no {what} {name!r} in the suite, expected {', '.join(known)}")


def _version(package: str, module: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(module) else None


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
