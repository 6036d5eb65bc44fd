"""Entries: runs of agents at the tools, which nobody but the agent began, as trials of a suite."""

import shutil
from pathlib import Path

from coda_agent.agent import authors
from coda_agent.agent.device import Device
from coda_agent.agent.runs import history
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.evals.definitions import Suite
from coda_agent.evals.record_files import read_records, write_definition, write_record
from coda_agent.evals.records import TrialKey, TrialRecord
from coda_agent.evals.tally import record_of
from coda_agent.primitives.errors import CodaError


def enter(workspace: Workspace, suite: Suite, run: Run, folder: Path) -> tuple[TrialRecord, Path]:
    """Writes the record of a run into a suite's folder; the record and its file.

    It is the agent's next trial of that spec. A run of another workspace is copied into this one.
    The suite's budget bound no such run, and nobody knows what its model cost.

    Raises:
        CodaError: it is no agent's run or has not ended, its spec is not the suite's, or it was
            entered before.
    """
    events, state = history(run.folder)
    name, author = str(state.spec), authors.agents_name(str(state.author))
    if state.kind != "generate" or not (state.over and state.finished):
        hint = "submit until it passes, or give_up with the reason"
        raise CodaError(f"{run.id} is no run of an author that has ended", hint=hint)
    if name not in suite.spec_names(workspace):
        raise CodaError(f"{name} is not in suite {suite.name}")
    spec = suite.spec(workspace, name)
    if spec.digest != state.admitted:
        raise CodaError(f"{run.id} had another text of {name} than suite {suite.name} has")
    device: Device = state.attempts[-1].machine.device if state.attempts else "cpu"
    tried = 0
    for record in read_records(folder).records:
        if record.run.id == run.id:
            raise CodaError(f"{run.id} was entered before, as trial {record.trial}")
        asked = (suite.digest, device, name, author)
        if (record.suite.digest, record.machine.device, record.spec.name, record.author) == asked:
            tried = max(tried, record.trial)
    kept = Path("logs", "runs", run.id)
    if not (workspace.root / kept).exists():
        shutil.copytree(run.folder, workspace.root / kept)
    key = TrialKey(suite.name, suite.digest, device, name, author, tried + 1, ())
    goal = "proved" if device == "cpu" else suite.goal
    record = record_of(events, key, spec, goal, kept / "events.jsonl")
    write_definition(folder, suite.definition)
    return record, write_record(folder, record)
