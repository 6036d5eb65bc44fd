"""Evidence: what generated/<kernel>/evidence.json says of a kernel, for a person to read.

- Each gate stands by itself: by which versions of the rules, when and on which machine it passed.
  So one gate can be given again while the others keep what they measured.
- Summaries are here: worst errors, medians with intervals, tiles that are not dispatched. Every
  round, tile and report is in the raw records, which are named by their SHA-256 and kept in
  logs/raw/ until `coda-agent archive pack` takes them into evals/archive/.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from coda_agent.agent.judge import provenance, rules
from coda_agent.agent.judge.records import (
    GATES,
    CompileReport,
    Failure,
    GateResult,
    Level,
    NumericsReport,
    PerformanceReport,
    Ratio,
    Record,
    RefusedTile,
    Sizes,
    Verdict,
    WorstError,
    rank,
)
from coda_agent.agent.plain import plain, utc_now
from coda_agent.primitives.errors import WorkspaceError

RAW = Path("logs", "raw")
"""Where raw records are until they are packed, in a workspace; git ignores it."""
Standing = Level | Literal["revoked"]
"""Every level that evidence can have."""


class GpuDriver(Record, extra="ignore"):
    """The GPU of a machine, and its driver."""

    name: str
    driver_version: str | None = None


class SandboxTier(Record, extra="ignore"):
    """The tier that candidates were compiled in."""

    tier: str


class Machine(Record, extra="ignore"):
    """Where a gate ran: what may move a figure, and nothing that changes from minute to minute."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpu: GpuDriver | None = None
    cuda: str | None = None
    python: str = ""
    system: str = ""
    sandbox: SandboxTier | None = None
    packages: dict[str, str | None] = Field(default_factory=dict)

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Self:
        """The lasting part of a verdict's environment."""
        return cls.model_validate({key: found for key, found in environment.items() if found})


class GateEvidence(Record):
    """One gate's word, and what it rests on.

    Attributes:
        seconds, date, machine: How long it took, when, and which of the evidence's machines.
        rules: The versions of the rules, by name.
        raw: Digest of its raw record; None where it reported nothing.
        findings: Why it refused.
    """

    passed: bool
    seconds: float
    date: str
    machine: str
    rules: dict[str, str]
    raw: str | None = None
    findings: tuple[str, ...] | None = None

    @classmethod
    def of(cls, gate: GateResult, verdict: Verdict, date: str, machine: str) -> Self:
        """One gate of a verdict."""
        return cls(
            passed=gate.passed, seconds=gate.seconds, date=date, machine=machine, rules=gate.rules,
            raw=digest(raw_record(gate, verdict)) if gate.data else None,
            findings=tuple(finding.message for finding in gate.findings) or None,
        )  # fmt: skip


class Compiled(Record):
    """How many kernels were compiled, for which architectures, and how many of them were dropped.
    Of those for sm_90a, the least and most registers of a thread, the most stores to local memory,
    and how many there are by tile, where there are any."""

    kernels: int
    archs: tuple[str, ...]
    dropped: int
    registers: tuple[int, int] | None = None
    local_stores: int | None = None
    spills: dict[str, int] | None = None

    @classmethod
    def of(cls, report: CompileReport) -> Self:
        """The summary of a report."""
        ours = [k for k in report.kernels if k.arch == "sm_90a" and not k.error]
        registers = [k.registers for k in ours if k.registers is not None]
        spills = dict[str, int]()
        for k in ours:
            if k.local_stores:
                spills[k.tile] = max(k.local_stores, spills.get(k.tile, 0))
        return cls(
            kernels=len(report.kernels),
            archs=tuple(dict.fromkeys(k.arch for k in report.kernels)),
            dropped=sum(k.error is not None for k in report.kernels),
            registers=(min(registers), max(registers)) if registers else None,
            local_stores=max((k.local_stores or 0 for k in ours), default=None),
            spills=spills or None,
        )


class Median(Record, from_attributes=True):
    """A contender's median time in microseconds, its 95 % interval, and the rounds that count."""

    median_us: float
    interval_us: tuple[float, float]
    rounds: int


class Ratios(Record, from_attributes=True):
    """How many times faster the kernel is than both baselines."""

    of_gemm: Ratio
    over_compile: Ratio


class Cell(Record, from_attributes=True):
    """A `Timed` or `Untimed` in short: its times, or the error that stands for them.

    Attributes:
        program: Its name, where it is not the default program.
        tile: The label of the fastest configuration.
        floor_us: What the GPU's own best rates allow.
        of_gemm, over_compile, times: Of `ours` beside the bare GEMM and the reference under
            torch.compile, in the warm regime, which decides.
        steady: The two ratios in the steady regime, or why there are none.
    """

    program: str | None = None
    dtype: str
    sizes: Sizes
    error: str | None = None
    tile: str | None = None
    tflops: float | None = None
    floor_us: float | None = None
    of_gemm: Ratio | None = None
    over_compile: Ratio | None = None
    times: dict[str, Median] | None = None
    steady: Ratios | Failure | None = None


class Refused(Record):
    """A tile that computes wrongly, or faulted, and is never dispatched; the gate that found it."""

    gate: str
    tile: str
    program: str
    dtype: str
    fault: str

    @classmethod
    def of(cls, gate: str, tile: RefusedTile) -> Self:
        """A tile without where it went wrong, which is in the raw record."""
        about = tile.model_dump(include={"tile", "program", "dtype", "fault"})
        return cls(gate=gate, **about)


class Evidence(Record):
    """All that stands behind a kernel.

    Attributes:
        level: "revoked", or the most that was shown.
        digests: Those of spec and candidate, and of the judge and toolchain that the last change
            came from.
        author: Who wrote the program.
        run, date: The run of the last change, and when that was.
        gates: What each gate said, by name, in order.
        machines: Where gates ran, by the names that they give.
        compiled, ran, worst, refused_tiles, cells, variants: What the gates saw, in short.
        not_shown: Sentences: what the machine could not show.
    """

    schema_version: Literal[2] = 2
    kernel: str
    level: Standing
    author: str
    run: str
    date: str
    digests: dict[str, str]
    machines: dict[str, Machine]
    gates: dict[str, GateEvidence]
    compiled: Compiled | None = None
    ran: str | None = None
    worst: dict[str, WorstError] = Field(default_factory=dict)
    refused_tiles: tuple[Refused, ...] = ()
    cells: tuple[Cell, ...] = ()
    variants: tuple[Cell, ...] = ()
    not_shown: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, verdict: Verdict, *, kernel: str, level: Standing, author: str, run: str,
        date: str | None = None,
    ) -> Self:  # fmt: skip
        """The evidence of one verdict; now, unless another `date` is given."""
        date, machine = date or utc_now(), Machine.of(verdict.environment)
        name = machine.gpu.name if machine.gpu else "CPU"
        ran = [gate for gate in verdict.gates if not gate.skipped]
        reports = {gate.name: gate.data for gate in ran}
        saw: dict[str, Any] = {}
        if isinstance(report := reports.get("compile"), CompileReport):
            saw["compiled"] = Compiled.of(report)
        if isinstance(report := reports.get("numerics"), NumericsReport):
            saw |= {"ran": report.ran, "worst": {k: _rounded(w) for k, w in report.worst.items()}}
        if isinstance(report := reports.get("performance"), PerformanceReport):
            saw["cells"] = tuple(map(Cell.model_validate, report.cells))
            saw["variants"] = tuple(map(Cell.model_validate, report.variants))
        return cls(
            kernel=kernel, level=level, author=author, run=run, date=date,
            digests=dict(sorted(verdict.digests.items())), machines={name: machine},
            gates={gate.name: GateEvidence.of(gate, verdict, date, name) for gate in ran},
            refused_tiles=tuple(Refused.of(g.name, tile) for g in ran for tile in g.refused_tiles),
            not_shown=tuple(verdict.not_shown), **saw,
        )  # fmt: skip

    def raw(self, gate: str) -> str | None:
        """The name of a gate's raw record."""
        return self.gates[gate].raw if gate in self.gates else None

    def of_program(self, now: Mapping[str, str]) -> bool:
        """Whether it is of the spec and candidate of these digests."""
        return all(self.digests.get(key) == now.get(key) for key in ("spec", "candidate"))

    def stale(self, now: Mapping[str, str]) -> dict[str, list[str]]:
        """What each gate's word no longer stands by: spec and candidate, toolchain, rules; `now`
        are today's digests (`provenance.digests`)."""
        edited = [key for key in ("spec", "candidate") if self.digests.get(key) != now.get(key)]
        found: dict[str, list[str]] = {}
        for name, gate in self.gates.items():
            packages = self.machines[gate.machine].packages
            another = provenance.toolchain(packages) != now.get("toolchain")
            tools = ["toolchain"] if another and name != "static" else []
            found[name] = [*edited, *tools, *rules.moved(gate.rules, name)]
        return {name: others for name, others in found.items() if others}

    def due(self, now: Mapping[str, str], *, gpu: bool) -> tuple[str, ...]:
        """The gates to run, so that every word stands and shows what the machine at hand can.

        They are those that are stale or were never shown, and the gates before them, on whose
        results they build."""
        stale = self.stale(now)
        wanted = [
            name for name in GATES
            if name in stale or self.level == "revoked" or (gpu and not self._on_gpu(name))
            or (name != "performance" and name not in self.gates)
        ]  # fmt: skip
        return GATES[: GATES.index(wanted[-1]) + 1] if wanted else ()

    def _on_gpu(self, name: str) -> bool:
        """Whether a gate showed what a GPU can show; the static gate shows all anywhere."""
        gate = self.gates.get(name)
        return gate is not None and (
            name == "static" or self.machines[gate.machine].device == "cuda"
        )

    def renewed(self, new: Self) -> Self | None:
        """This with what a later verdict adds; None where it adds nothing.

        A verdict on another program, and one that refuses, takes the place of all. Else each gate's
        word is renewed where it was stale or had not been given on a GPU. A machine without one
        renews nothing that a GPU showed: it contradicts nothing, and shows less.
        """
        stale = self.stale(new.digests)
        if not self.of_program(new.digests) or self.level != new.level == "revoked":
            return new
        if self.level == "revoked":
            return new if stale or new.level != "revoked" else None
        replaced = [
            name for name in new.gates
            if (name in stale or not self._on_gpu(name))
            and (new._on_gpu(name) or not self._on_gpu(name))
            and (name in stale or name not in self.gates or new._on_gpu(name))
        ]  # fmt: skip
        risen = rank(new.level) > rank(self.level)
        if not replaced and not risen:
            return None
        if set(replaced) >= self.gates.keys():
            return new.model_copy(update={"level": new.level if risen else self.level})
        return self._with(new, replaced)

    def _with(self, new: Self, gates: Iterable[str]) -> Self:
        """This with some gates of `new`, and what they saw."""
        chosen, machines = set(gates), dict(self.machines)
        ((name, machine),) = new.machines.items()
        while machines.setdefault(name, machine) != machine:
            name += " too"
        merged = {**self.gates}
        for gate in chosen:
            merged[gate] = new.gates[gate].model_copy(update={"machine": name})
        saw = {"compile": ("compiled",), "numerics": ("ran", "worst"),
               "performance": ("cells", "variants")}  # fmt: skip
        taken = {field: getattr(new, field) for gate in chosen for field in saw.get(gate, ())}
        refused = [tile for tile in self.refused_tiles if tile.gate not in chosen]
        refused += [tile for tile in new.refused_tiles if tile.gate in chosen]
        risen = rank(new.level) > rank(self.level)
        used = {gate.machine for gate in merged.values()}
        return self.model_copy(update={
            **taken, "refused_tiles": tuple(refused),
            "gates": {gate: merged[gate] for gate in GATES if gate in merged},
            "machines": {key: machine for key, machine in machines.items() if key in used},
            "level": new.level if risen else self.level,
            "not_shown": new.not_shown if risen else self.not_shown,
            "digests": new.digests, "run": new.run, "date": new.date,
        })  # fmt: skip

    def text(self) -> str:
        """As JSON, two levels deep by lines: each gate, cell and tile is one."""
        record = self.model_dump(mode="json")
        lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in record.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON of a value, each of its entries on a line."""

    def one(entry: Any) -> str:
        return json.dumps(plain(entry), ensure_ascii=False, allow_nan=False)

    if not value or not isinstance(value, dict | list):
        return one(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {one(entry)}" for entry in value) + "\n ]"
    return (
        "{\n" + ",\n".join(f"  {one(key)}: {one(entry)}" for key, entry in value.items()) + "\n }"
    )


def _rounded(worst: WorstError) -> WorstError:
    """To four places: another draw of inputs differs in the second."""
    places = {"ratio": round(worst.ratio, 4), "element": round(worst.element, 4)}
    return worst.model_copy(update=places)


def raw_record(gate: GateResult, verdict: Verdict) -> bytes:
    """All that a gate saw, and the state of the machine, as JSON."""
    whole = {"gate": gate.model_dump(mode="json"), "environment": verdict.environment}
    return (json.dumps(whole, sort_keys=True, default=str) + "\n").encode()


def digest(record: bytes) -> str:
    """The name of a raw record."""
    return f"sha256:{hashlib.sha256(record).hexdigest()}"


def raw_path(root: Path, name: str) -> Path:
    """The file of a raw record in a workspace, until it is packed."""
    return root / RAW / f"{name.removeprefix('sha256:')}.json"


def keep_raw(root: Path, verdict: Verdict, evidence: Evidence) -> None:
    """Writes the raw records of a verdict that some evidence names below logs/raw/.

    Raises:
        WorkspaceError: the disk is full, or the place cannot be written to.
    """
    named = {gate.raw for gate in evidence.gates.values()}
    try:
        for gate in verdict.gates:
            record = raw_record(gate, verdict)
            if (name := digest(record)) in named:
                path = raw_path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(record)
    except OSError as error:
        raise WorkspaceError(f"raw records could not be written: {error}") from error
