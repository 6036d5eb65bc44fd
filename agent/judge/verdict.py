"""A gate's result and a verdict: the judge's word on a candidate."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from coda_agent.agent.judge.records import (
    CompileReport,
    Finding,
    JsonObject,
    Level,
    NumericsReport,
    PerformanceReport,
    RefusedTile,
    ReportT,
    Tuned,
)


class GateResult(BaseModel):
    """The outcome of one gate."""

    name: str
    passed: bool
    skipped: str | None = None
    """Why the gate did not run; a skipped gate neither passes nor fails the candidate."""
    seconds: float = 0.0
    version: int = 0
    """Which version of the gate decided; 0 where it has none."""
    findings: list[Finding] = []
    data: Annotated[
        CompileReport | NumericsReport | PerformanceReport | None,
        BeforeValidator(lambda given: given or None),
    ] = None
    """What it saw; None where it found nothing to report, or did not get as far."""

    @property
    def refused_tiles(self) -> tuple[RefusedTile, ...]:
        return getattr(self.data, "refused_tiles", ())


class Verdict(BaseModel):
    """The judge's word on a candidate."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    passed: bool
    level: Level | None
    gates: list[GateResult]
    tuned: dict[str, Tuned] | None = None
    """GPU name to the best configurations, where the performance gate ran."""
    environment: JsonObject = {}
    digests: dict[str, str] = {}
    not_shown: list[str] = []
    """Sentences: what this machine could not show."""

    @property
    def replay(self) -> str:
        """Name seed, case and sizes of the first fault of draws."""
        found = (finding.where for gate in self.gates for finding in gate.findings)
        if (where := next(found, {})).get("seed") is None:
            return ""
        sizes = " ".join(f"{dim}={size}" for dim, size in where.get("sizes", {}).items())
        parts = {"seed": where.get("seed"), "case": where.get("case"), "sizes": sizes}
        return ", ".join(f"{name} {x}" for name, x in parts.items() if x not in (None, ""))

    def report(self, kind: type[ReportT]) -> ReportT | None:
        """Find the report of one kind, if its gate got there."""
        return next((g.data for g in self.gates if isinstance(g.data, kind)), None)
