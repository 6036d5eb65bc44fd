"""A verdict in short: what a run's log keeps of it, and all that scores and boards read."""

import statistics
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from coda_agent.agent.judge.records import Level, PerformanceReport, Verdict

DIGESTS = ("spec", "candidate", "judge", "toolchain")
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Figure = Literal["roofline", "over_compile", "of_gemm"]
FIGURES: tuple[Figure, ...] = ("roofline", "over_compile", "of_gemm")


class Kept(BaseModel):
    """What logs and trial records keep: no unknown field, no NaN or infinity, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Ratio(Kept):
    """The median of the rounds' ratios with its 99.8 % interval."""

    ratio: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Cell(Kept):
    """One element type at one shape, as the judge's performance gate timed it."""

    dtype: str
    sizes: dict[str, PositiveInt]
    ours_us: PositiveFloat
    floor_us: PositiveFloat
    """The roofline floor: no kernel can be faster."""
    of_gemm: Ratio
    """Speed as a share of the bare cuBLAS GEMM's."""
    over_compile: Ratio
    """How many times faster than the reference under torch.compile."""
    tile: str = ""

    @property
    def roofline(self) -> float:
        """Share of the ceiling: floor over time."""
        return self.floor_us / self.ours_us


class Judgement(Kept):
    """The judge's verdict on the candidate that counts, in short."""

    passed: bool
    level: Level | None
    gates: dict[str, Literal["passed", "failed", "skipped"]]
    digests: dict[str, Digest]
    """Those of spec, candidate, judge and toolchain; logs of before 0.1 lack some."""
    rules: dict[str, dict[str, str]] = {}
    """The versions of the rules that each gate that ran was given by."""
    cells: tuple[Cell, ...] = ()
    finding: str = ""
    """The first thing that was wrong; the judge's words."""

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """A verdict in short."""
        found = [finding.message for gate in verdict.gates for finding in gate.findings]
        performance = verdict.report(PerformanceReport)
        keys = {"dtype", "sizes", "floor_us", "of_gemm", "over_compile", "tile"}
        return cls(
            passed=verdict.passed, level=verdict.level,
            gates={
                g.name: "skipped" if g.skipped else "passed" if g.passed else "failed"
                for g in verdict.gates
            },
            digests={key: verdict.digests[key] for key in DIGESTS},
            rules={g.name: g.rules for g in verdict.gates if g.rules and not g.skipped},
            cells=tuple(
                Cell(ours_us=c.times["ours"].median_us, **c.model_dump(include=keys))
                for c in (performance.timed if performance else ())
            ),
            finding=found[0] if found else "",
        )  # fmt: skip

    def mean(self, figure: Figure) -> float | None:
        """Its geometric mean over the cells; None where nothing was timed."""
        return geometric_mean(
            cell.roofline if figure == "roofline" else getattr(cell, figure).ratio
            for cell in self.cells
        )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.passed == ("failed" in self.gates.values()):
            raise ValueError(f"passed is {self.passed}, the gates say {dict(self.gates)}")
        return self


class Machine(Kept):
    """Where the judge worked."""

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    sandbox: str | None = None
    """What confined candidates, in records of when their Python was run."""
    packages: dict[str, str | None] = {}

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """The machine that a verdict names."""
        about = verdict.environment
        return cls(
            device=about.get("device", "cpu"), gpu=about.get("gpu", {}).get("name"),
            packages=about.get("packages", {}),
        )  # fmt: skip


def gpu_seconds(verdict: Verdict) -> float:
    """Seconds of the gates that ran on a GPU, without compiling."""
    if verdict.environment.get("device") != "cuda":
        return 0.0
    return sum(g.seconds for g in verdict.gates if g.name in ("numerics", "performance"))


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None
