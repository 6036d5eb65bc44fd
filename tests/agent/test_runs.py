"""Past runs: how one stands whose process may be gone."""

from pathlib import Path

import pytest

from coda_agent.agent import events as e
from coda_agent.agent import runs
from coda_agent.agent.log import RunLog
from coda_agent.agent.workspace import Run

BEGUN = e.RunStarted(run="r", kind="generate", spec="s", author="composer")
AT_WORK = e.AuthorStarted(author="composer")


@pytest.mark.parametrize(
    ("events", "held", "left"),
    [
        ([BEGUN], "running", "open"),
        ([BEGUN, AT_WORK], "running", "interrupted"),
        ([BEGUN, AT_WORK, e.RunFinished(reason="budget: $1.00")], "stopped", "stopped"),
    ],
)
def test_a_run_that_nobody_writes_is_not_running(
    tmp_path: Path, events: list[e.Event], held: str, left: str
) -> None:
    run = Run("r", tmp_path)
    with RunLog(tmp_path / "events.jsonl") as log:
        for event in events:
            log.append(event)
        assert runs.outcome(run, runs.state(run)) == held
    assert runs.outcome(run, runs.state(run)) == left
