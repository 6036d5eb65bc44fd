"""A verdict in short, as logs, trial records and evidence keep it.

The whole verdict, with every tile and round, is the run's artifact `verdict-NUMBER.json`.
"""

import statistics
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, model_validator

from coda_agent.agent.judge.records import (
    VERSIONS,
    CompileReport,
    Failure,
    JsonObject,
    Level,
    NumericsReport,
    PerformanceReport,
    Ratio,
    Record,
    RefusedTile,
    Sizes,
    WorstError,
)
from coda_agent.agent.judge.verdict import GateResult, Verdict

DIGESTS = ("spec", "candidate")
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Figure = Literal["roofline", "over_compile", "of_gemm"]


class Kept(BaseModel):
    """What logs and records keep: no unknown field, finite, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(Kept):
    """Where the judge worked: what may move a figure.

    Attributes:
        gpu, driver: The GPU's name, and the version of its driver.
        sandbox: What confined a candidate, in records of when its Python was run.
    """

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    python: str = ""
    system: str = ""
    sandbox: str | None = None
    packages: dict[str, str | None] = {}

    @classmethod
    def of(cls, about: JsonObject) -> Self:
        """Take the machine of a verdict's environment."""
        gpu = about.get("gpu") or {}
        keys = ("device", "cuda", "python", "system", "packages")
        kept = {"device": "cpu"} | {key: about[key] for key in keys if about.get(key)}
        kept |= {"gpu": gpu.get("name"), "driver": gpu.get("driver_version")}
        return cls.model_validate(kept)

    @property
    def name(self) -> str:
        """The GPU's name, or CPU."""
        return self.gpu or "CPU"

    @property
    def versions(self) -> str:
        """The name, and the versions of what is on it."""
        numbers = {"driver": self.driver, "CUDA": self.cuda, **self.packages}
        return ", ".join([self.name, *(f"{name} {v}" for name, v in numbers.items() if v)])


class Gate(Record, extra="ignore"):
    """What a gate said, by which version; `passed` None: it was skipped."""

    passed: bool | None = None
    version: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, gate: GateResult) -> Self:
        """Shorten a gate's result."""
        passed = None if gate.skipped else gate.passed
        return cls(passed=passed, version=gate.version, seconds=gate.seconds)


def _read_gate(value: object) -> object:
    """Read a gate that an earlier log has as one word."""
    words = {"passed": True, "failed": False, "skipped": None}
    return {"passed": words[value]} if isinstance(value, str) and value in words else value


class Compiled(Record):
    """What was compiled, and for sm_90a the extremes of registers and spills.

    `registers` are the least and most of a thread, `spills` stores to local memory by tile.
    """

    kernels: int
    archs: tuple[str, ...]
    dropped: int
    registers: tuple[int, int] | None = None
    local_stores: int | None = None
    spills: dict[str, int] | None = None

    @classmethod
    def of(cls, report: CompileReport) -> Self:
        """Summarise a report."""
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
    """A contender's median time, its 95 % interval, and the rounds counted."""

    median_us: PositiveFloat
    interval_us: tuple[float, float] | None = None
    rounds: int | None = None


class Ratios(Record, from_attributes=True):
    """How many times faster the kernel is than both baselines."""

    of_gemm: Ratio
    over_compile: Ratio


class Cell(Record, from_attributes=True, extra="ignore"):
    """A `Timed` or `Untimed` in short: times, or why there are none.

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

    @property
    def roofline(self) -> float | None:
        """Share of the ceiling, floor over time; None where not timed."""
        ours = (self.times or {}).get("ours")
        return self.floor_us / ours.median_us if self.floor_us is not None and ours else None


class Refused(Record):
    """A tile that computes wrongly, or faulted, and is never dispatched."""

    gate: str
    tile: str
    program: str
    dtype: str
    fault: str

    @classmethod
    def of(cls, gate: str, tile: RefusedTile) -> Self:
        """Shorten a refused tile; the whole verdict says where it went wrong."""
        about = tile.model_dump(include={"tile", "program", "dtype", "fault"})
        return cls(gate=gate, **about)


class Judgement(Record, extra="ignore"):
    """The judge's verdict on a candidate, in short.

    Fields of earlier versions are not read: what they said of rules, no gate stands by.

    Attributes:
        level: The most that was shown; None of what was refused.
        gates: What each gate said, by name, in order.
        digests: Those of spec and candidate.
        finding: The first thing that was wrong; the judge's words.
        compiled, ran, worst, approximated, refused_tiles, cells, variants: What the gates saw.
        not_shown: Sentences: what the machine could not show.
    """

    passed: bool
    level: Level | None = None
    gates: dict[str, Annotated[Gate, BeforeValidator(_read_gate)]]
    digests: dict[str, Digest]
    finding: str = ""
    compiled: Compiled | None = None
    ran: str | None = None
    worst: dict[str, WorstError] = Field(default_factory=dict)
    approximated: dict[str, float] = Field(default_factory=dict)
    refused_tiles: tuple[Refused, ...] = ()
    cells: tuple[Cell, ...] = ()
    variants: tuple[Cell, ...] = ()
    not_shown: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Self:
        """Shorten a verdict; `more` fields go before its own."""
        findings = [finding.message for gate in verdict.gates for finding in gate.findings]
        saw: JsonObject = {}
        if report := verdict.report(CompileReport):
            saw["compiled"] = Compiled.of(report)
        if report := verdict.report(NumericsReport):
            saw |= {"ran": report.ran, "worst": {k: _rounded(w) for k, w in report.worst.items()}}
            saw["approximated"] = {
                x: float(f"{y:.1g}") for x, y in (report.approximated or {}).items()
            }
        if report := verdict.report(PerformanceReport):
            saw["cells"] = tuple(map(Cell.model_validate, report.cells))
            saw["variants"] = tuple(map(Cell.model_validate, report.variants))
        about = {
            "passed": verdict.passed, "level": verdict.level,
            "gates": {gate.name: Gate.of(gate) for gate in verdict.gates},
            "digests": {key: verdict.digests[key] for key in DIGESTS},
            "finding": findings[0] if findings else "",
            "refused_tiles": tuple(
                Refused.of(gate.name, tile) for gate in verdict.gates for tile in gate.refused_tiles
            ),
            "not_shown": tuple(verdict.not_shown),
        }  # fmt: skip
        return cls(**about | saw | more)

    @property
    def failed(self) -> list[str]:
        """The gates that refused."""
        return [name for name, gate in self.gates.items() if gate.passed is False]

    @property
    def stale(self) -> list[str]:
        """The gates whose word was given by another version than decides now."""
        ran = ((name, gate) for name, gate in self.gates.items() if gate.passed is not None)
        return [name for name, gate in ran if gate.version != VERSIONS.get(name, gate.version)]

    def mean(self, figure: Figure) -> float | None:
        """Take a geometric mean over the cells; None where nothing was timed."""
        shares = (getattr(cell, figure) for cell in self.cells if cell.times)
        return geometric_mean(x.ratio if isinstance(x, Ratio) else x for x in shares)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.passed == bool(self.failed):
            raise ValueError(f"passed is {self.passed}, the gates that failed are {self.failed}")
        return self


def _rounded(worst: WorstError) -> WorstError:
    """To four places: another draw of inputs differs in the second."""
    places = {"ratio": round(worst.ratio, 4), "element": round(worst.element, 4)}
    return worst.model_copy(update=places)


def gpu_seconds(verdict: Verdict) -> float:
    """Sum the seconds of gates that ran on a GPU, without compiling."""
    if verdict.environment.get("device") != "cuda":
        return 0.0
    timed = ("numerics", "performance")  # what has no report did not reach the GPU
    return sum(gate.seconds for gate in verdict.gates if gate.name in timed and gate.data)


def geometric_mean(values: Iterable[float]) -> float | None:
    """Take the geometric mean; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None
