"""A workspace, a quick judge and the author's loop, for tests that drive it with a script."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coda_agent.agent import pipeline, workspace
from coda_agent.agent.authors import Options
from coda_agent.agent.authors.claude import model_named
from coda_agent.agent.authors.claude.loop import Claude
from coda_agent.agent.events import Event
from coda_agent.agent.judge import GateResult, Terms, Verdict
from coda_agent.agent.judge import judge_candidate as whole_judge
from coda_agent.agent.judge.records import VERSIONS
from coda_agent.agent.log import read_events
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Run, Workspace

KEY = "sk-ant-canary-0123456789"
SPECS = Path(__file__).parents[3] / "specs"
RIGHT = (SPECS.parent / "generated" / "gemm_swiglu" / "kernel.py").read_text()
WRONG = "import os\n" + RIGHT


def quick_judge(spec: Any, text: str, executor: Any, *, terms: Terms, **options: Any) -> Verdict:
    """The judge's real static gate; what passes it is taken for proved. The other gates take half
    a minute, and are not what these tests are about."""
    static = replace(terms, device="cpu", gates=("static",))
    verdict = whole_judge(spec, text, executor, terms=static, **options)
    if verdict.passed and "numerics" in terms.gates:
        names = ("compile", "numerics")
        more = [GateResult(name=name, passed=True, version=VERSIONS[name]) for name in names]
        verdict = verdict.model_copy(update={"level": "proved", "gates": verdict.gates + more})
    return verdict


def make_workspace(folder: Path) -> Workspace:
    made, _ = workspace.init(folder)
    made.git("config", "user.name", "U")
    made.git("config", "user.email", "u@example.com")
    made.git("config", "gc.auto", "0")
    return made


def author(options: Options | None = None, **clocks: Any) -> Claude:
    options = options or Options()
    return Claude(replace(options, model=model_named(options.model)), **clocks)


def generate(
    where: Workspace, who: Claude, observer: Callable[..., None] = lambda *_: None
) -> pipeline.Outcome:
    return pipeline.generate(where, SPECS / "gemm_swiglu.md", who, observer, device="cpu")


def resume(where: Workspace, who: Claude) -> pipeline.Outcome:
    return pipeline.resume(where, run_of(where), who, lambda *_: None)


def run_of(where: Workspace) -> Run:
    (log,) = (where.root / "logs" / "runs").glob("*/events.jsonl")
    return Run(log.parent.name, log.parent)


def log_of(where: Workspace) -> list[Event]:
    return read_events(run_of(where).folder / "events.jsonl")


def spent_usd(where: Workspace) -> float:
    usd = RunState.of(log_of(where)).spent.usd
    assert usd is not None
    return usd


def types(where: Workspace, *wanted: str) -> list[str]:
    return [event.type for event in log_of(where) if not wanted or event.type in wanted]
