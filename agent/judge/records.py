"""The judge's data: a report for each gate, and what it holds.

All of it is data that JSON can carry and that reads itself back. A field that is None is left out
of the JSON, so a record without times has no key for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.tuning import TunedShape

VERSIONS = {"static": 3, "compile": 4, "numerics": 13, "performance": 2}
"""Which version of each gate decides. The commit that changes what a gate decides raises its number
by hand: what an earlier version decided is stale then. Meaning and the call of the public function
are parts of numerics. A change of the language, of its lowering or of a pinned compiler raises
every gate that decides otherwise by it."""
GATES = (*VERSIONS,)
Tool = Literal["memcheck", "racecheck", "initcheck"]
SANITIZERS: tuple[Tool, ...] = ("memcheck", "racecheck", "initcheck")
"""Gates beside the usual ones: tools of compute-sanitizer."""
Level = Literal["proved", "verified", "accepted"]
LEVELS: tuple[Level, ...] = ("proved", "verified", "accepted")
"""What a kernel can be shown to be, from the least to the most."""
JsonObject = dict[str, Any]
"""JSON data by name."""
Inputs = Mapping[str, Any]
"""What a spec's reference takes, by name: tensors, and numbers."""
Observer = Callable[[str, JsonObject], None]
Progress = Callable[[int, int, str], None]
"""Called as (done, total, note)."""
Key = tuple[str, str]
"""A program's name and an element type."""
Sizes = dict[str, int]
"""Dims by name."""
GpuState = dict[str, str | int]
"""What `machine.gpu_state` saw."""


class Record(BaseModel):
    """Frozen data that crosses processes and is kept as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @model_serializer(mode="wrap")
    def _without_none(self, written: SerializerFunctionWrapHandler) -> JsonObject:
        return {key: value for key, value in written(self).items() if value is not None}


def _read_tiles(value: Any) -> Any:
    return value if isinstance(value, Mapping) else {(p, e): found for p, e, found in value}


def _write_tiles(tiles: Mapping[Key, tuple[TileConfig, ...]]) -> list[list[object]]:
    return [[*key, [c.to_dict() for c in configs]] for key, configs in tiles.items()]


Tiles = Annotated[
    Mapping[Key, tuple[TileConfig, ...]],
    BeforeValidator(_read_tiles),
    PlainSerializer(_write_tiles),
]
"""Configurations by (program, element type); in JSON a list of [program, type, configurations]."""


def rank(level: str | None) -> int:
    """Place a level in `LEVELS`; -1 for none, or revoked."""
    return LEVELS.index(level) if level in LEVELS else -1


class Finding(BaseModel):
    """One thing wrong with a candidate: what, where, and what to try."""

    message: str
    where: JsonObject = {}
    hint: str = ""


class RefusedTile(Record):
    """A configuration that computed wrongly, faulted, spills or did not compile; never
    dispatched."""

    program: str
    dtype: str
    tile: str
    """The configuration's label."""
    fault: str
    where: JsonObject = {}

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """Take the tile that a finding names."""
        about = {key: finding.where[key] for key in ("program", "dtype", "tile")}
        where = {k: v for k, v in finding.where.items() if k not in ("there", "rows", "outputs")}
        return cls(**about, fault=finding.message, where=where)


class Resources(Record):
    """What the compiler made of a kernel, as far as known."""

    registers: int | None = None
    stack_bytes: int | None = None
    local_stores: int | None = None
    shared_bytes: int | None = None
    mma_instructions: int | None = None
    instructions: dict[str, int] | None = None
    """How often each instruction that says how the kernel works stands in its SASS."""


class CompiledKernel(Resources):
    """One program on one architecture, in one element type and configuration."""

    program: str
    arch: str
    dtype: str
    tile: str
    error: str | None = None
    """Why this configuration is not tried further."""


class CompileReport(Record):
    """What the compile gate saw: kernels, and digests of programs."""

    kernels: tuple[CompiledKernel, ...]
    programs: dict[str, str]

    @property
    def refused_tiles(self) -> tuple[RefusedTile, ...]:
        """Those that did not compile on SM90, or spill too much."""
        return tuple(
            RefusedTile(program=k.program, dtype=k.dtype, tile=k.tile, fault=k.error)
            for k in self.kernels
            if k.error and k.arch == "sm_90a"
        )


class WorstError(Record):
    """The largest error of a program in one type, over its cases.

    Attributes:
        ratio: Error over bound, in norm or worst tile.
        element: The same of any single element.
        seed: What all draws followed from; `check_numerics` takes it.
        output, sizes, config: Where the ratio was seen.
    """

    seed: int
    ratio: float = 0.0
    element: float = 0.0
    output: str | None = None
    sizes: Sizes | None = None
    config: str | None = None


class NumericsReport(Record):
    """What the numerics gate saw; `worst` by "program dtype".

    `approximated` is the most that an approximation is off by in float64, as a share of elements,
    by "program output"; None where the program is the reference itself.
    """

    ran: Literal["compiled kernel", "interpreter"]
    shapes: tuple[Sizes, ...]
    worst: dict[str, WorstError] = {}
    approximated: dict[str, float] | None = None
    refused_tiles: tuple[RefusedTile, ...] = ()


class Ratio(Record):
    """How many times faster one is: median ratio, 99.8 % interval."""

    ratio: float
    low: float
    high: float


class Clock(Record):
    """How times were measured, and what each clock said; times in microseconds.

    Attributes:
        regime: What preceded each call; see `timing.py`.
        method: The clocks that were asked.
        hidden_us: What the host saw beyond the events, in the median.
        products: Matrix products before each call.
        left_out: Calls that do not count.
        persisting_l2: Whether what a kernel pinned in the cache was released.
        busy_us, traced_us: How long kernels ran by CUPTI, and what the events of those calls said.
        launches: How many launches CUPTI saw in a call.
        kernels: Their names.
        calls: Calls of a stream.
    """

    regime: Literal["idle", "warm", "steady"]
    method: str
    hidden_us: float | None = None
    products: int | None = None
    left_out: int | None = None
    persisting_l2: str | None = None
    busy_us: float | None = None
    traced_us: float | None = None
    launches: tuple[int, ...] | None = None
    kernels: tuple[str, ...] | None = None
    calls: int | None = None


class Timing(Record):
    """A contender's times in microseconds: median, 95 % interval, all that count."""

    median_us: float
    interval_us: tuple[float, float]
    times_us: tuple[float, ...]
    clock: Clock | None = None


class Figures(Record):
    """The kernel, as `ours`, beside bare GEMM and torch.compile."""

    of_gemm: Ratio
    over_compile: Ratio
    times: dict[str, Timing]


class Failure(Record):
    """Why there are no figures."""

    error: str


class Rates(Record):
    """The best that was measured on a GPU, with slack."""

    tflops: float
    gbytes_s: float


class Timed(Figures):
    """A program in one element type at one shape, timed warm.

    Attributes:
        program: Its name, where it is not the report's.
        config, tile: The fastest configuration, and its label.
        floor_us: What the ceiling allows at best.
        launches: What the program declares.
        mismatches: Timed outputs that were wrong.
        finalists_us, search_us: Medians of the configurations that were tried, by label.
        gpu: The GPU before and after.
        steady: The same in the steady regime.
    """

    program: str | None = None
    dtype: str
    sizes: Sizes
    config: TileConfig
    tile: str
    tflops: float
    floor_us: float
    ceiling: Rates
    launches: tuple[int, ...]
    mismatches: int
    finalists_us: dict[str, float]
    search_us: dict[str, float] | None = None
    gpu: dict[Literal["before", "after"], GpuState]
    steady: Figures | Failure | None = None


class Untimed(Failure):
    """A program without times in one element type and shape."""

    program: str | None = None
    dtype: str
    sizes: Sizes
    clocks: dict[str, Clock] | None = None
    search_us: dict[str, float] | None = None
    gpu: dict[Literal["before", "after"], GpuState] | None = None


class PerformanceReport(Record):
    """What the performance gate saw: default program, and variants at one shape."""

    program: str
    cells: tuple[Timed | Untimed, ...]
    variants: tuple[Timed | Untimed, ...] = ()
    refused_tiles: tuple[RefusedTile, ...] = ()

    @property
    def timed(self) -> list[Timed]:
        """The cells that hold times."""
        return [cell for cell in self.cells if isinstance(cell, Timed)]


Tuned = dict[str, tuple[TunedShape, ...]]
"""The best configurations on one GPU, by dtype of A."""


class SurveyedShape(Record):
    """Median microseconds at (M, N, K), by a configuration's label."""

    m: int
    n: int
    k: int
    us: dict[str, float]


class Survey(Record):
    """Times of right configurations over shapes; `dtype` is A's."""

    sms: int
    dtype: str
    configs: dict[str, TileConfig]
    shapes: tuple[SurveyedShape, ...]


ReportT = TypeVar("ReportT", CompileReport, NumericsReport, PerformanceReport)


class Outcome(Record, Generic[ReportT]):
    """What a gate's job found.

    Attributes:
        findings: Faults that refuse the candidate.
        report: What the gate saw; None where it did not get as far, or only calls or tunes.
        admitted: Configurations that may be dispatched.
        tuned: The best configurations.
        survey: Times over shapes.
    """

    findings: tuple[Finding, ...] = ()
    report: ReportT | None = None
    admitted: Tiles = {}
    tuned: Tuned = {}
    survey: Survey | None = None

    def refusing(self, tiles: Iterable[RefusedTile]) -> Self:
        """Add refused tiles to the report, if there is one."""
        if self.report is None or isinstance(self.report, CompileReport):
            return self
        refused = (*self.report.refused_tiles, *tiles)
        report = self.report.model_copy(update={"refused_tiles": refused})
        return self.model_copy(update={"report": report})

    def joined(self, other: Self) -> Self:
        """Join outcomes of numerics of other programs or types."""
        report = self.report or other.report
        if isinstance(report, NumericsReport) and isinstance(other.report, NumericsReport):
            worst = report.worst | other.report.worst
            refused = (*report.refused_tiles, *other.report.refused_tiles)
            report = report.model_copy(update={"worst": worst, "refused_tiles": refused})
        found = {
            "findings": (*self.findings, *other.findings),
            "report": report,
            "admitted": {**self.admitted, **other.admitted},
        }
        return self.model_copy(update=found)
