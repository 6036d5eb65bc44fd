"""The recorded runs of logs/trajectories, before today's judge.

Machine code is left out: a replay that compiles it takes up to half a minute a run, and
tests/agent/test_judge.py compiles. All else is real: admission, the static gate, tracing, the
signature, the interpreter's numerics.
"""

from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent import pipeline, workspace
from coda_agent.agent.authors.replay import Replay
from coda_agent.agent.events import Event, ToolStarted
from coda_agent.agent.judge import compile_gate
from coda_agent.agent.log import read_events
from coda_agent.agent.state import RunState

TRAJECTORIES = Path(__file__).parents[2] / "logs" / "trajectories"
RUNS = sorted(path.parent for path in TRAJECTORIES.glob("*/events.jsonl"))
ON_A_GPU = ("gpu", "benchmark")
FALSE_PASSES = {"3a059348f4d5", "3b5172112975", "04f5008da55f", "a754c64e893c"}
"""Candidates that passed when no instruction ran without a GPU, copysign's arguments swapped; when
inputs never left a spec's draw, log(1 + |z|), which loses small z; and when digits in float32 did
not count, 1 - 2 / (1 + e^z) for a tanh, which loses them too, and squares of numbers of 1e20."""
FALSE_REFUSALS = {"8ff9acb2ce7b"}
"""One that was refused when NaN of an infinity counted: a softmax of pairs as two sigmoids."""


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    monkeypatch.setattr(compile_gate, "jobs_for", lambda *_, **__: [])
    return workspace.init(tmp_path)[0]


def replayed(where: workspace.Workspace, spec: Path, events: list[Event]) -> tuple[Replay, Path]:
    """The replay of a recording without a GPU, and the log it made itself."""
    who = Replay(events)
    outcome = pipeline.generate(where, spec, who, lambda *_: None, device="cpu", commit=False)
    assert outcome.run
    return who, outcome.run / "events.jsonl"


def attempts(events: list[Event]) -> list[tuple[Any, ...]]:
    """Check, digest and verdict of each time the candidate was judged; a failure that was found
    again once, since such a check is no attempt today."""
    seen = [(a.check, a.candidate, a.passed) for a in RunState.of(events).attempts]
    first = [x for i, x in enumerate(seen) if x[2] or x not in seen[:i]]
    return [x for x in first if x[0] not in ON_A_GPU]


@pytest.mark.one_in(20)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_trajectory_gets_the_verdicts_it_got(where: workspace.Workspace, run: Path) -> None:
    events = read_events(run / "events.jsonl")
    who, log = replayed(where, run / "spec.md", events)
    was = attempts(events)
    now = [
        (check, text, (passed or text in FALSE_REFUSALS) and text not in FALSE_PASSES)
        for check, text, passed in was
    ]
    changed = [one for one, other in zip(was, now, strict=True) if one != other]
    said = [difference.partition(": attempt")[0] for difference in who.differences]
    words = {True: "was a pass, is a refusal", False: "was a refusal, is a pass"}
    assert said == [
        f"{'submit' if check == 'submit' else 'check'}: {words[passed]}"
        for check, _, passed in changed
    ]
    assert all(said.startswith(("check: ", "benchmark: ", "profile: ")) for said in who.skipped)
    assert attempts(read_events(log)) == now != []
    assert now[-1][0::2] == ("submit", now[-1][1] not in FALSE_PASSES)


def test_a_trajectory_with_another_program_does_not(where: workspace.Workspace) -> None:
    run = next(run for run in RUNS if run.name.startswith("gemm_rope-"))
    events = read_events(run / "events.jsonl")
    for event in events:
        if isinstance(event, ToolStarted) and event.name == "write_candidate":
            given = event.input
            given["text"] = given["text"].replace("rotate(x, y,", "rotate(y, x,")
    who, _ = replayed(where, run / "spec.md", events)
    assert [said.split(" is ")[0] for said in who.differences] == [
        "check: was a pass,", "submit: was a pass,"
    ]  # fmt: skip
