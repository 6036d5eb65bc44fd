"""The judge: four gates in order, the first failure ends the trial. An author cannot touch it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.records import Finding, GateResult, Level, Observer, Verdict

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec

__all__ = ["Finding", "GateResult", "Level", "Observer", "Verdict", "judge_candidate"]

GATES = ("static", "compile", "numerics", "performance")


def judge_candidate(
    spec: Spec,
    text: str,
    *,
    device: str = "auto",
    gates: tuple[str, ...] = GATES,
    observer: Observer = lambda *_: None,
    types: list[str] | None = None,
) -> Verdict:
    """Judge a candidate's text against a spec.

    Args:
        spec: The spec.
        text: The candidate, a complete kernel.py.
        device: "auto" uses a Hopper GPU where there is one; "cuda" demands it; "cpu" interprets.
        gates: Which gates to run, in `GATES` order; "static" and what a gate needs always run.
        observer: Told of each gate's start, progress and end.
        types: Element types to check; all the spec declares by default.

    Returns:
        The verdict; passed when no gate that ran found a fault.

    Raises:
        MachineError: `device` is "cuda" and no Hopper GPU is usable.
    """
    return _Trial(spec, text, _resolve(device), observer, types).run(gates)


def tune_candidate(
    spec: Spec, text: str, *, observer: Observer = lambda *_: None
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The fastest right configurations at the spec's bench shapes, for each element type.

    Returns:
        What tuned.json holds: GPU name to dtype of A to one entry a shape.

    Raises:
        MachineError: no Hopper GPU is usable.
        CompileError: the program does not compile, or is wrong in every configuration at a shape.
    """
    return _Trial(spec, text, _resolve("cuda"), observer, None).tune()


def _resolve(device: str) -> str:
    from coda_agent.primitives.errors import MachineError

    if device == "cpu":
        return "cpu"
    import torch

    usable = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
    if device == "cuda" and not usable:
        raise MachineError("no Hopper GPU is usable here", hint="use --device cpu to interpret")
    return "cuda" if usable else "cpu"


class _Trial:
    """One candidate on its way through the gates."""

    def __init__(
        self, spec: Spec, text: str, device: str, observer: Observer, types: list[str] | None
    ) -> None:
        self.spec, self.text, self.device, self.observer = spec, text, device, observer
        first = next(iter(spec.types.values()), ["bfloat16"])
        self.types = types or list(first)
        self.results: list[GateResult] = []
        self.programs: dict[str, Program] = {}
        self.admitted: dict[tuple[str, str], list[Any]] = {}
        self.tuned: dict[str, Any] | None = None

    def run(self, gates: tuple[str, ...]) -> Verdict:
        from coda_agent.agent.judge.pool import CompilePool

        with CompilePool() as pool:
            steps = {
                "static": self._static,
                "compile": lambda result: self._compile(result, pool),
                "numerics": self._numerics,
                "performance": self._performance,
            }
            for name in GATES:
                if name not in gates and name != "static":
                    continue
                with self._gate(name) as result:
                    steps[name](result)
                if not result.passed:
                    break
        return self._verdict()

    def tune(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        from coda_agent.agent.judge.pool import CompilePool
        from coda_agent.agent.judge.tuner import Cell
        from coda_agent.primitives.errors import CompileError
        from coda_agent.primitives.target import use_cache

        with CompilePool() as pool:
            for name, step in (
                ("static", self._static),
                ("compile", lambda result: self._compile(result, pool)),
            ):
                with self._gate(name) as result:
                    step(result)
                if not result.passed:
                    raise CompileError(result.findings[0].message)
        use_cache()
        binding, name = self.spec.bindings()[0], self._variants()[0]
        found: dict[str, list[dict[str, Any]]] = {}
        for element in self.types:
            for sizes in self.spec.bench_shapes:
                cell = Cell(self.spec, self.programs[name], binding, sizes, element)
                search = cell.search(self.admitted[name, element])
                if not search:
                    raise CompileError(f"{name}: no tile computes the right result at {sizes}")
                found.setdefault(cell.gemm_type, []).append(cell.entry(search, search[0][1]))
        return {gpu_name(): found}

    @contextmanager
    def _gate(self, name: str) -> Iterator[GateResult]:
        self.observer("gate.started", {"gate": name})
        result, start = GateResult(name=name, passed=True), time.monotonic()
        yield result
        result.passed = not result.findings
        result.seconds = round(time.monotonic() - start, 3)
        self.results.append(result)
        self.observer(
            "gate.finished", {**result.model_dump(exclude={"data", "name"}), "gate": name}
        )

    def _progress(self, gate: str) -> Any:
        def tell(done: int, total: int, note: str) -> None:
            self.observer(
                "gate.progress", {"gate": gate, "done": done, "total": total, "note": note}
            )

        return tell

    def _static(self, result: GateResult) -> None:
        from coda_agent.agent.judge.static import check_source

        result.findings = check_source(self.text, self._variants())

    def _variants(self) -> list[str]:
        return [self.spec.variant(b) for b in self.spec.bindings()]

    def _compile(self, result: GateResult, pool: Any) -> None:
        from coda_agent.agent.judge import compile_gate
        from coda_agent.primitives.errors import CompileError
        from coda_agent.primitives.tiles import TileConfig

        try:
            self.programs = compile_gate.load(pool, self.text)
        except CompileError as error:
            result.findings = [Finding(message=error.message, hint=error.hint)]
            return
        result.findings = compile_gate.check_signature(self.spec, self.programs)
        if result.findings:
            return
        m, n, k = self.spec.gemm_dims
        jobs = compile_gate.jobs_for(
            self.spec,
            self.programs,
            self.types,
            all_tiles=self.device == "cuda",
            shapes=[(s[m], s[n], s[k]) for s in self.spec.bench_shapes],
        )
        result.findings, reports = compile_gate.compile_all(pool, jobs, self._progress("compile"))
        result.data = {
            "kernels": reports,
            "programs": {n: p.digest for n, p in sorted(self.programs.items())},
        }
        for job, line in zip(jobs, reports, strict=True):
            if line["arch"] == "sm_90a" and "error" not in line:
                key = line["program"], line["dtype"]
                self.admitted.setdefault(key, []).append(TileConfig(**job["config"]))

    def _numerics(self, result: GateResult) -> None:
        from coda_agent.agent.judge.numerics import check_numerics
        from coda_agent.primitives.target import use_cache
        from coda_agent.primitives.tiles import TileConfig

        tiles = self.admitted
        if self.device == "cuda":
            use_cache()
        else:
            # Two block widths: one that divides the common shapes and one that leaves a ragged
            # block.
            blocks = [TileConfig(128, 128, 2, 1, True), TileConfig(128, 192, 2, 1, True)]
            tiles = {(v, e): blocks for v in self._variants() for e in self.types}
        report = check_numerics(
            self.spec, self.programs, tiles, device=self.device, progress=self._progress("numerics")
        )
        result.findings = report.findings
        ran = "compiled kernel" if self.device == "cuda" else "interpreter"
        result.data = {
            "ran": ran, "shapes": [dict(s) for s in self.spec.check_shapes],
            "worst": report.worst, "refused_tiles": report.refused_tiles,
        }  # fmt: skip
        self.admitted = report.admitted

    def _performance(self, result: GateResult) -> None:
        from coda_agent.agent.judge.performance import check_performance

        if self.device != "cuda":
            result.skipped = "needs a Hopper GPU"
            return
        result.findings, result.data, tuned = check_performance(
            self.spec, self.programs, self.admitted, progress=self._progress("performance")
        )
        self.tuned = {gpu_name(): tuned}

    def _verdict(self) -> Verdict:
        from coda_agent.agent.judge.provenance import digests, environment

        passed = all(r.passed for r in self.results)
        ran = {r.name for r in self.results if r.skipped is None and r.passed}
        level: Level | None = None
        if {"compile", "numerics"} <= ran and not any(
            not r.passed for r in self.results if r.name != "performance"
        ):
            level = "proved"
            if self.device == "cuda":
                level = "accepted" if "performance" in ran else "verified"
        missing = []
        if self.device != "cuda":
            missing = [
                "numerics of the compiled kernels: no Hopper GPU here, the interpreter stood in "
                "for them",
                "performance: no Hopper GPU here",
            ]
        elif "performance" in ran and len(self._variants()) > 1:
            first, *others = self._variants()
            missing = [f"performance of {', '.join(others)}: only {first} is timed"]
        return Verdict(
            passed=passed,
            level=level,
            gates=self.results,
            tuned=self.tuned,
            environment=environment(self.device),
            digests=digests(self.spec, self.text),
            not_shown=missing,
        )


def gpu_name() -> str:
    """The GPU that kernels run on here.

    Raises:
        MachineError: it is no Hopper GPU.
    """
    import torch

    _resolve("cuda")
    return torch.cuda.get_device_name(0)
