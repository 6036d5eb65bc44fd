"""Staleness: what of a stored verdict would have to be decided anew.

A verdict is stale where a gate decides by another version now (`judge.records.VERSIONS`), and a
trial record where its spec is another, too. A stale record keeps its figures, and what shows them
marks them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from coda_agent.agent.judge.records import VERSIONS
from coda_agent.agent.workspace import Workspace
from coda_agent.evals.definitions import Suite
from coda_agent.evals.records import TrialRecord
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import Spec

Stale = Callable[[TrialRecord], list[str]]
"""What is stale of a trial record: gates, and its spec."""
SCORED = ("compile", "numerics")
"""The gates that the judge's scores are of."""


def of_scores(record: Mapping[str, Any]) -> list[str]:
    """The gates that a score record was made by other versions of."""
    return [gate for gate, now in scored_versions().items() if record["versions"].get(gate) != now]


def scored_versions() -> dict[str, int]:
    """The versions that a score record names."""
    return {gate: VERSIONS[gate] for gate in SCORED}


def of_trials(workspace: Workspace, suites: Mapping[str, Suite]) -> Stale:
    """What says of a trial record what is stale of it; `suites` are the records', by digest."""

    @functools.cache
    def today(suite: str, spec: str) -> str | None:
        try:
            return suites[suite].spec(workspace, spec).digest
        except (CodaError, KeyError):
            return None

    def stale(record: TrialRecord) -> list[str]:
        same = today(record.suite.digest, record.spec.name) == record.spec.digest
        return [*_gates(record), *["spec"] * (not same)]

    return stale


def _gates(record: TrialRecord) -> list[str]:
    return record.verdict.stale if record.verdict else []


def needs_trial(record: TrialRecord, suite: Suite, spec: Spec) -> bool:
    """Whether a trial has to be done again: the fault was ours, or, unless the suite takes any
    judge, a gate or the spec is another by now."""
    if not record.counts:
        return True
    is_stale = _gates(record) or record.spec.digest != spec.digest
    return suite.judge != "any" and bool(is_stale)
