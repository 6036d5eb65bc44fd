"""Staleness: what of a stored verdict would have to be decided anew.

A verdict is stale when its rules have other versions, or the spec, program or toolchain is another.
Sources that mean the same stale nothing (`agent/judge/rules.py`). Every question of that kind is
answered here. A stale record keeps its figures, and what shows them marks them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coda_agent.agent.judge import provenance, rules
from coda_agent.agent.judgement import Judgement
from coda_agent.agent.workspace import Workspace
from coda_agent.evals.definitions import Suite
from coda_agent.evals.records import TrialRecord
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import Spec

Stale = Callable[[TrialRecord], list[str]]
"""What is stale of a trial record: of rules, toolchain and spec, those that are others by now."""
EARLIER = "judge"
"""What is stale where a record names no rules: a judge before rules had versions gave it."""
SCORED = ("compile", "numerics")
"""The gates whose rules the judge's scores confirm."""


def moved(then: Mapping[str, str], now: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """Which of the digests under `keys` are not today's."""
    return [key for key in keys if then.get(key) != now.get(key)]


def of_scores(record: Mapping[str, Any]) -> list[str]:
    """The rules that a score record was not made by as they are worded now, so that it confirms
    nothing that was declared of them."""
    now, then = wordings(), record.get("rules", {})
    return moved(then, now, now) if then else [EARLIER]


def wordings() -> dict[str, str]:
    """The digest of each scored rule's sources, as a score record keeps them."""
    names = {name for gate in SCORED for name in rules.involved(gate)}
    return {name: digest for name, digest in rules.meanings().items() if name in names}


def of_trials(workspace: Workspace, suites: Mapping[str, Suite]) -> Stale:
    """What says of a trial record what is stale of it; `suites` are the records', by digest."""

    @functools.cache
    def today(suite: str, spec: str) -> dict[str, str]:
        try:
            return provenance.digests(suites[suite].spec(workspace, spec), "")
        except (CodaError, KeyError):
            return {}

    def stale(record: TrialRecord) -> list[str]:
        then = {**(record.verdict.digests if record.verdict else {}), "spec": record.spec.digest}
        now = today(record.suite.digest, record.spec.name)
        others = moved(then, now, [key for key in ("toolchain", "spec") if key in then])
        return [*_of_judgement(record.verdict), *others]

    return stale


def _of_judgement(judged: Judgement | None) -> list[str]:
    """The rules that have other versions than a verdict names, by gate."""
    if judged is None or not judged.rules:
        return [] if judged is None else [EARLIER]
    gates = judged.rules.items()
    found = (rules.moved(then, gate) if then else [EARLIER] for gate, then in gates)
    return list(dict.fromkeys(name for names in found for name in names))


def needs_trial(record: TrialRecord, suite: Suite, spec: Spec) -> bool:
    """Whether a trial has to be done again: the fault was ours, or, unless the suite takes any
    judge, a rule or the spec is another by now."""
    if not record.counts:
        return True
    is_stale = _of_judgement(record.verdict) or record.spec.digest != spec.digest
    return suite.judge != "any" and bool(is_stale)
