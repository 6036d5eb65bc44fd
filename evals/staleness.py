"""Staleness: what of a stored verdict another judge, toolchain, spec or program would decide anew.

Every question of that kind is answered here. A stale record keeps its figures; what shows them
marks them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from coda_agent.agent.judge import provenance
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.workspace import Workspace
    from coda_agent.evals.definitions import Suite
    from coda_agent.evals.records import TrialRecord
    from coda_agent.specs import Spec

Stale = Callable[["TrialRecord"], list[str]]
"""What is stale of a trial record: of judge, toolchain and spec, those that are others by now."""


def moved(then: Mapping[str, str], now: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """Which of the digests under `keys` are not today's."""
    return [key for key in keys if then.get(key) != now.get(key)]


def of_trials(workspace: "Workspace", suites: "Mapping[str, Suite]") -> Stale:
    """What says of a trial record what is stale of it; `suites` are the records', by digest."""

    @functools.cache
    def today(suite: str, spec: str) -> dict[str, str]:
        try:
            return provenance.digests(suites[suite].spec(workspace, spec), "")
        except (CodaError, KeyError):
            return {}

    def stale(record: "TrialRecord") -> list[str]:
        then = {**(record.verdict.digests if record.verdict else {}), "spec": record.spec.digest}
        now = today(record.suite.digest, record.spec.name)
        return moved(then, now, [key for key in ("judge", "toolchain", "spec") if key in then])

    return stale


def needs_trial(record: "TrialRecord", suite: "Suite", spec: "Spec") -> bool:
    """Whether a trial has to be done again: the fault was ours, or, unless the suite takes any
    judge, the judge or the spec is another by now."""
    if not record.counts:
        return True
    then = {**(record.verdict.digests if record.verdict else {}), "spec": record.spec.digest}
    now = {"judge": provenance.judge_digest(), "spec": spec.digest}
    return suite.judge != "any" and bool(moved(then, now, [key for key in now if key in then]))
