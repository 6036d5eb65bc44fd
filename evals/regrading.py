"""Judging the programs of stale trial records again, offline.

What was timed needs a GPU to be renewed; without one, such a record stays as it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coda_agent.agent.judgement import Judgement, Machine
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import definitions, staleness
from coda_agent.evals.definitions import Suite
from coda_agent.evals.record_files import file_name, read_records, record_path, write_record
from coda_agent.evals.records import SpecRef, Step, TrialRecord
from coda_agent.primitives.errors import CodaError


class Regraded(NamedTuple):
    """What came of a stale record: its new outcome or why it stays, its file's name, what was
    stale of it or why it cannot be judged."""

    outcome: str
    record: str
    why: str


def regrade(workspace: Workspace, folder: Path) -> Iterator[Regraded]:
    """Judges every stale record under `folder` again, and writes what is renewed in its place."""
    from coda_agent.agent.execution import usable_gpu

    suites = definitions.beside(folder)
    stale, gpu = staleness.of_trials(workspace, suites), usable_gpu("auto") is not None
    for record in read_records(folder).records:
        if not (why := stale(record)):
            continue
        try:
            new, outcome = _judged_again(workspace, suites[record.suite.digest], record, gpu)
        except CodaError as error:
            new, outcome, why = None, "cannot be judged", [" ".join(str(error).split())]
        if new is not None:
            place = record_path(folder, record)
            write_record(place.parent if place else folder / record.suite.name, new)
        yield Regraded(outcome, file_name(record.key), ", ".join(why))


def _judged_again(
    workspace: Workspace, suite: Suite, record: TrialRecord, gpu: bool
) -> tuple[TrialRecord | None, str]:
    """The record by today's judge, or None where it stays; and what came of it."""
    from coda_agent.agent.execution import executor
    from coda_agent.agent.judge import judge_candidate

    if record.program is None:
        return None, "without a program"
    spec = suite.spec(workspace, record.spec.name)
    device = "cuda" if record.machine.device == "cuda" and gpu else "cpu"
    verdict = judge_candidate(spec, record.program, executor(), device=device)
    if device != record.machine.device:
        return None, f"kept ({verdict.level or 'refused'} here; no GPU to time it)"
    judged = Judgement.of(verdict)
    step = Step.of(judged, record.spent, attempt=max(record.attempts, 1), submitted=True)
    renewed = record.model_copy(update={
        "spec": SpecRef(name=spec.name, digest=spec.digest, level=spec.level),
        "verdict": judged, "outcome": judged.level if judged.passed else "refused",
        "reason": judged.finding, "steps": (step,) if step else (), "machine": Machine.of(verdict),
    })  # fmt: skip
    # Through the validator: what is written must be readable.
    return TrialRecord.model_validate(renewed.model_dump()), renewed.outcome
