"""What the judge says: one record a gate, one verdict a candidate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

GATES = ("static", "compile", "numerics", "performance")
SANITIZERS = ("memcheck", "racecheck", "initcheck")
"""Gates beside the usual ones: tools of compute-sanitizer."""
Level = Literal["proved", "verified", "accepted"]
LEVELS: tuple[Level, ...] = ("proved", "verified", "accepted")
"""What a kernel can be shown to be, from the least to the most."""
Observer = Callable[[str, dict[str, Any]], None]


def rank(level: str | None) -> int:
    """The place of a level in `LEVELS`; -1 of what is none: nothing shown, or revoked."""
    return LEVELS.index(level) if level in LEVELS else -1


class Finding(BaseModel):
    """One thing wrong with a candidate: what, where, and what to try."""

    message: str
    where: dict[str, Any] = {}
    hint: str = ""


class GateResult(BaseModel):
    """The outcome of one gate."""

    name: str
    passed: bool
    skipped: str | None = None
    """Why the gate did not run; a skipped gate neither passes nor fails the candidate."""
    seconds: float = 0.0
    rules: dict[str, str] = {}
    """Versions of the rules it was given by (`rules.given`)."""
    findings: list[Finding] = []
    data: dict[str, Any] = {}


class Verdict(BaseModel):
    """The judge's word on a candidate."""

    passed: bool
    level: Level | None
    gates: list[GateResult]
    tuned: dict[str, Any] | None = None
    """Best configuration for each dtype and shape, where the performance gate ran."""
    environment: dict[str, Any] = {}
    digests: dict[str, str] = {}
    not_shown: list[str] = []
    """Sentences: what this machine could not show."""
