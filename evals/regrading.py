"""Judging the programs of stale trial records again, offline.

What was timed needs a GPU to be renewed; without one, such a record stays as it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from coda_agent.agent import execution, judge
from coda_agent.agent.judgement import Judgement, Machine
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import definitions, staleness
from coda_agent.evals.definitions import Suite
from coda_agent.evals.record_files import file_name, read_records, replace_record
from coda_agent.evals.records import SpecRef, Step, TrialRecord
from coda_agent.primitives.errors import CodaError


class Regraded(NamedTuple):
    """What came of a stale record: its new outcome or why it stays; its file's name; what was stale
    of it, or why it cannot be judged."""

    outcome: str
    record: str
    why: str


def regrade(workspace: Workspace, folder: Path) -> Iterator[Regraded]:
    """Judges every stale record under `folder` again, and writes what is renewed in its place."""
    suites = definitions.beside(folder)
    stale, gpu = staleness.of_trials(workspace, suites), execution.usable_gpu("auto") is not None
    for record in read_records(folder).records:
        if not (why := stale(record)):
            continue
        try:
            changes, outcome = _judged_again(workspace, suites[record.suite.digest], record, gpu)
            if changes:
                replace_record(folder, record, **changes)
        except CodaError as error:
            outcome, why = "cannot be judged", [" ".join(str(error).split())]
        yield Regraded(outcome, file_name(record.key), ", ".join(why))


def _judged_again(
    workspace: Workspace, suite: Suite, record: TrialRecord, gpu: bool
) -> tuple[dict[str, Any], str]:
    """What of the record changes by today's judge, nothing where it stays; and what came of it."""
    if record.program is None:
        return {}, "without a program"
    spec = suite.spec(workspace, record.spec.name)
    device = "cuda" if record.machine.device == "cuda" and gpu else "cpu"
    verdict = judge.judge_candidate(spec, record.program, execution.executor(), device=device)
    if device != record.machine.device:
        return {}, f"kept ({verdict.level or 'refused'} here; no GPU to time it)"
    judged = Judgement.of(verdict)
    step = Step.of(judged, record.spent, attempt=max(record.attempts, 1), submitted=True)
    outcome = judged.level if judged.passed and judged.level else "refused"
    return {
        "spec": SpecRef(name=spec.name, digest=spec.digest, level=spec.level),
        "verdict": judged, "outcome": outcome, "reason": judged.finding,
        "steps": (step,) if step else (), "machine": Machine.of(verdict.environment),
    }, outcome  # fmt: skip
