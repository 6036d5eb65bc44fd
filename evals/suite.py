"""Runs a suite: each kernel at each size against everything a user would use instead.

- A cell is one interleaved run. It is in the record on disk as soon as it is measured; a second run
  skips it unless the program, its tiles, the toolchain or the suite's definition changed, or it has
  no answer for a contender asked for: then all it had take part again. A cell is a line of the
  file; without the line it is measured again.
- Its figures are of the warm regime; under `steady` are those of the steady one.
- The clock is handed in: the judge's own, `coda_agent.agent.judge.timing`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.doctor import package_version
from coda_agent.evals import contenders, definitions, libraries
from coda_agent.evals.contenders import Absent, Case, Run, error, make_case
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.primitives.errors import CodaError, MachineError
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


@dataclass(frozen=True)
class Suite:
    """A suite's definition.

    Attributes:
        kernels: Kernel name to `dims` (expressions over S; S itself where none is given).
        tiles: Configurations that quack's kernels and fixed-block runs are searched over.
    """

    name: str
    title: str
    dtype: str
    sizes: list[int]
    reduction_block: int
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
    suite = definitions.load(name)
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
    clock: Any,
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
        clock: The module `coda_agent.agent.judge.timing`, or what stands for it.
        machine: `gpu` (name, driver) and `packages`, kept with each cell.
        kernels: Some of the suite's kernels; none means all that are accepted.
        sizes: Instead of the suite's.
        names: Some of `CONTENDERS`; none means all. `ours` and `gemm` always take part.
        rounds: Timed rounds a cell.
        device: "cpu" interprets instead, for tests.
        say: Takes one line a cell.

    Raises:
        CodaError: unknown kernel or contender.
        MachineError: no Hopper GPU.
    """
    from coda_agent.generated.kernel import load_kernel

    known_of = {"kernel": (kernels, suite.kernels), "contender": (names, CONTENDERS)}
    for what, (given, known) in known_of.items():
        if unknown := [name for name in given if name not in known]:
            expected = ", ".join(known)
            raise CodaError(f"no {what} {unknown[0]!r} in the suite, expected {expected}")
    if device == "cuda":
        require_hopper()
    path = gpu_record(root, suite.name, machine, device)
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    have = [k for k in kernels or suite.kernels if (root / "generated" / k / "kernel.py").is_file()]
    packages = {**machine["packages"], **{p: package_version(p, m) for p, m in _LIBRARIES.items()}}
    for kernel_name in have:
        folder = root / "generated" / kernel_name
        kernel = load_kernel(folder)
        tuned = folder / "tuned.json"
        digests = {
            "spec": kernel.spec.digest,
            "program": kernel.programs[kernel.spec.variant()].digest,
            "tuned": _sha(tuned.read_text("utf-8") if tuned.is_file() else ""),
            "toolchain": _sha(packages),
            "protocol": str(clock.PROTOCOL),
            "suite": _sha([suite.dtype, [t.label for t in suite.tiles], suite.reduction_block]),
        }
        for size in sizes or suite.sizes:
            key, started = f"{kernel_name} {size}", time.monotonic()
            held = cells.get(key, {})
            fresh = held.get("digests") == digests and "steady" in held
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
            write_record(path, {"suite": suite.name, "date": today()}, cells)
            ratios = cells[key]["of_gemm"]
            said = ", ".join(f"{n} {ratios[n]['ratio']:.3f}" for n in ratios if n != "gemm")
            say(f"{key}: of the GEMM's speed: {said} ({cells[key]['seconds']} s)")
    return path


def measure(
    case: Case, suite: Suite, names: Sequence[str], clock: Any, rounds: int
) -> dict[str, Any]:
    """Build each contender, check it against the truth, and time those that are right."""
    import torch

    torch.compiler.reset()  # a reference may be compiled eight times in a process, then not again
    runs: dict[str, Run] = {}
    record: dict[str, Any] = {"tiles": {}, "errors": {}, "notes": {}, "absent": {}}
    for name in names:
        try:
            run, tile = _build(name, case, suite, clock)
            outputs = run(0)
            if (off := error(case, outputs)) > LIMIT:
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
            record["notes"] |= {name: note} if (note := _less(case, outputs)) else {}
    samples = dict(clock.interleave(runs, rounds))
    for name in [n for n, s in samples.items() if s.fault and n != "gemm"]:
        record["absent"][name] = samples.pop(name).fault
    record |= _figures(samples, clock)
    streams = clock.steady({name: runs[name] for name in samples})
    sound = {name: s for name, s in streams.items() if not s.fault}
    record["steady"] = {
        **_figures(sound, clock),
        "absent": {name: s.fault for name, s in streams.items() if s.fault},
    }
    return record


def _figures(samples: Mapping[str, Any], clock: Any) -> dict[str, Any]:
    """Times, and each contender's speed as a share of cuBLAS's, and ours over each; without ratios
    to one that has no times."""
    found = {"times": {name: s.to_dict() for name, s in samples.items()}, "of_gemm": {}, "over": {}}
    if gemm := samples.get("gemm"):
        found["of_gemm"] = {name: clock.speedup(s, gemm) for name, s in samples.items()}
    if ours := samples.get("ours"):
        found["over"] = {name: clock.speedup(ours, s) for name, s in samples.items()}
    return found


def _build(name: str, case: Case, suite: Suite, clock: Any) -> tuple[Run, str]:
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
                raise Absent
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
    return libraries.compose(case, getattr(libraries, name)()), ""


def _fastest(
    case: Case, tiles: Sequence[TileConfig], clock: Any, make: Callable[[TileConfig], Run]
) -> tuple[Run, str]:
    """The fastest of the tiles that compile and compute rightly."""
    runs: dict[TileConfig, Run] = {}
    for tile in tiles:
        run = make(tile)
        try:
            if error(case, run(0)) <= LIMIT:
                runs[tile] = run
        except Exception:  # foreign code, and not every tile carries every epilogue
            continue
    if not runs:
        raise Absent("no tile computes the right result")
    samples = clock.interleave({t.label: run for t, run in runs.items()}, _SEARCH_ROUNDS)
    best = min(runs, key=lambda t: samples[t.label].median_us)
    return make(best), best.label  # anew, as what is accumulated in place


def _less(case: Case, outputs: Mapping[str, Any]) -> str:
    """Which of the spec's outputs a contender does not give, and what it gives instead."""
    other = [o for o in outputs if o not in case.kernel.spec.outputs]
    missing = ", ".join(o for o in case.kernel.spec.outputs if o not in outputs)
    if not missing or "product" in other:
        return ""
    return f"{', '.join(other)} for {missing}" if other else f"without {missing}"


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
