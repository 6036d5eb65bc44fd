"""The tools one by one, as an author meets them."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent import execution, judge, pipeline, prompt, runs, workspace
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.cli import app
from coda_agent.agent.events import RunStarted
from coda_agent.agent.judge import GateResult, Verdict
from coda_agent.agent.judge.machine import Gpu
from coda_agent.agent.judge.records import (
    VERSIONS,
    CompiledKernel,
    CompileReport,
    PerformanceReport,
    Ratio,
)
from coda_agent.agent.log import read_events
from coda_agent.agent.tips import Tips
from coda_agent.agent.workbench import TOOLS, Result, Workbench, attribution, feedback, session
from coda_agent.agent.workbench.inspection import crowded
from coda_agent.agent.workbench.reading import vocabulary
from coda_agent.agent.workbench.registry import LIMIT, bounded
from coda_agent.primitives import ColVector, Tile, epilogue, erf, exp, tanh
from coda_agent.primitives.catalogue import entries
from coda_agent.primitives.errors import ProgramError
from coda_agent.specs import load_spec
from tests.agent.claude.bench import quick_judge
from tests.agent.test_evidence import timed
from tests.agent.verdicts import call

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()
REFUSED = (
    (ROOT / "specs" / "gemm_swiglu.md")
    .read_text()
    .replace("O: {shape: [M, N/2], dtype: T}", "O: {shape: [M, N/2], dtype: float32}")
)
"""A spec whose reference returns O in T."""
WRONG = "import os\n" + RIGHT
runner = CliRunner()


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    monkeypatch.setattr(judge, "judge_candidate", quick_judge)
    monkeypatch.chdir(tmp_path)
    made, _ = workspace.init(tmp_path)
    made.git("config", "user.name", "U")
    made.git("config", "user.email", "u@example.com")
    return made


@pytest.fixture
def bench(where: workspace.Workspace) -> Iterator[Workbench]:
    spec = ROOT / "specs" / "gemm_swiglu.md"
    begin = RunStarted(author="me", device="cpu")
    with pipeline.opened(where, spec, begin, lambda *_: None) as made:
        yield made


def say(bench: Workbench, tool: str, **given: Any) -> str:
    result = call(bench, tool, given)
    assert result.ok, result.text
    return result.text


def fail(bench: Workbench, tool: str, **given: Any) -> str:
    result = call(bench, tool, given)
    assert not result.ok, result.text
    return result.text


def test_reading(bench: Workbench) -> None:
    assert (
        "Programs to define:\n- gemm_swiglu: operands after acc: none\n"
        "Outputs of each, in this order: D, O\n"
        "Drawn for the checks: A normal(1), B normal(K**-0.5)\nJudged too: inputs of all magnitudes "
        "and signs in their domains, zeros, NaN, infinity" in say(bench, "read_spec")
    )
    listed = say(bench, "list_primitives")
    names = [name for line in listed.splitlines() for name in line.partition(": ")[2].split(", ")]
    assert len(listed) < 1200 and sorted(names) == sorted(entry.name for entry in entries())
    found = say(bench, "list_primitives", word="SWIGLU").splitlines()
    assert [line.partition("  ")[0] for line in found] == [
        "swiglu(gate, up)", "swiglu_oai(gate, up, alpha=1.702, limit=7.0)"]  # fmt: skip
    assert "no primitive has 'swigl '" in say(bench, "list_primitives", word="swigl ")
    assert "Cost:" in say(bench, "read_primitive", name="relu")
    assert "did you mean swiglu" in fail(bench, "read_primitive", name="swigl")
    assert len(named := say(bench, "list_demos")) < 800 and "gate, " in named
    assert "gate: The gated half of an MLP" in say(bench, "list_demos", word="swiglu")
    assert say(bench, "list_demos", word="philox_uniform").startswith("dropout: ")
    assert f"no demonstration has 'moon'; there are {named}" == say(
        bench, "list_demos", word="moon"
    )
    assert "def gate(acc):" in say(bench, "read_demo", name="gate")
    assert say(bench, "search_tips", query="rotation") == "no tip matches these words"


def test_writing_and_editing(bench: Workbench) -> None:
    assert "no candidate yet" in fail(bench, "check", level="static")
    say(bench, "write_candidate", text=WRONG)
    assert (bench.run.folder / "kernel.py").read_text() == WRONG
    assert "`old` occurs 0 times" in fail(bench, "edit_candidate", old="nope", new="x")
    assert "`old` occurs 4 times" in fail(bench, "edit_candidate", old="swiglu", new="x")
    say(bench, "edit_candidate", old="import os\n", new="")
    assert bench.state.candidate == RIGHT
    assert "at most" in fail(bench, "write_candidate", text="x" * 50_000)


def test_what_shows_at_once_is_said_at_once(bench: Workbench) -> None:
    def wrote(text: str) -> str:
        return say(bench, "write_candidate", text=text).partition(" lines")[2]

    assert wrote(RIGHT) == ", names and shapes fit the spec"
    assert "only imports and @epilogue" in wrote(WRONG)
    line = RIGHT[: RIGHT.index("swiglu(gate, up)")].count("\n") + 1
    nothing = 'ptx("nothing", "neg.f32 $0, $1;", gate)'
    lost = RIGHT.replace("swiglu(gate, up)", nothing).replace("swiglu\n", "ptx\n")
    said = wrote(lost)
    assert "\nptx() gives no meaning torch.nothing" in said and said.endswith(f"line {line}")
    assert "spec declares ['D', 'O']" in wrote(RIGHT.replace('"D"', '"E"').replace("D=", "E="))
    bench.withheld = ("diagnosis",)
    assert wrote(WRONG) == ", refused"
    assert bench.state.attempts == []


def test_attempts_are_numbered_and_the_best_is_known(bench: Workbench) -> None:
    for text, level in [(WRONG, "static"), (RIGHT, "interpret"), (RIGHT + "\n", "static")]:
        say(bench, "write_candidate", text=text)
        call(bench, "check", {"level": level})
    assert [(a.number, a.check, a.passed) for a in bench.state.attempts] == [
        (1, "static", False), (2, "interpret", True), (3, "static", True),
    ]  # fmt: skip
    assert bench.state.best and bench.state.best.number == 2 and bench.state.best.text == RIGHT
    whole = json.loads((bench.run.folder / "artifacts" / "verdict-1.json").read_text())
    assert whole["gates"][0]["findings"][0]["message"] == bench.state.attempts[0].judgement.finding


def test_an_unchanged_candidate_is_not_judged_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(bench, "write_candidate", text=WRONG)
    first = call(bench, "check", {"level": "static"})
    say(bench, "write_candidate", text=RIGHT)
    say(bench, "write_candidate", text=WRONG)
    for tool, given in [
        ("check", {"level": "static"}),
        ("check", {"level": "interpret"}),
        ("submit", {}),
    ]:
        again = call(bench, tool, given)
        assert again.failed and again.data == first.data
        assert again.text == f"{first.text}\n    not run again: the candidate is that of attempt 1"
    assert len(bench.state.attempts) == 1
    say(bench, "edit_candidate", old="import os\n", new="import sys\n")
    call(bench, "check", {"level": "static"})
    assert [a.passed for a in bench.state.attempts] == [False, False]
    monkeypatch.setitem(VERSIONS, "static", VERSIONS["static"] + 1)
    call(bench, "check", {"level": "static"})  # another judge may find otherwise
    assert len(bench.state.attempts) == 3


def test_what_a_stronger_check_found_does_not_refuse_a_weaker_one(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(spec: Any, text: str, executor: Any, **options: Any) -> Verdict:
        verdict = quick_judge(spec, text, executor, **options)
        failed = GateResult(
            name="numerics", passed=False, version=VERSIONS["numerics"],
            findings=[judge.Finding(message="no")],
        )  # fmt: skip
        if "performance" in options["terms"].gates:
            verdict = verdict.model_copy(
                update={"gates": [*verdict.gates[:2], failed], "passed": False, "level": None}
            )
        return verdict

    monkeypatch.setattr(judge, "judge_candidate", strict)
    say(bench, "write_candidate", text=RIGHT)
    assert call(bench, "submit", {}).failed and call(bench, "submit", {}).failed
    assert not call(bench, "check", {"level": "interpret"}).failed
    assert [a.check for a in bench.state.attempts] == ["submit", "interpret"]


def test_a_gpu_is_needed_where_it_is(bench: Workbench) -> None:
    say(bench, "write_candidate", text=RIGHT)
    for name, given in [("check", {"level": "gpu"}), ("benchmark", {}), ("profile", {})]:
        assert "needs a Hopper GPU" in fail(bench, name, **given)


def test_gpu_seconds_have_an_end(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "usable_gpu", lambda _: Gpu("GPU-1", "H200", "9.0"))
    bench.state.device, bench.gpu_limit_s = "auto", 100.0
    say(bench, "write_candidate", text=RIGHT)
    say(bench, "check", level="gpu")
    bench.answer("", "check", Result(text="", gpu=True), 500.0)  # compiling, for the most part
    bench.answer("", "profile", Result(text="", gpu=True), 99.0)
    say(bench, "check", level="gpu")
    bench.answer("", "profile", Result(text="", gpu=True), 2.0)
    assert "the GPU budget of 100 s is used up" in fail(bench, "check", level="gpu")
    say(bench, "submit")


def test_a_profile_is_of_the_tile_and_the_shape_that_were_timed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the slowest beside the bare product, in the candidate's last benchmark."""
    fast = timed(90.0)
    slow = fast.model_copy(update={
        "of_gemm": Ratio(ratio=0.8, low=0.7, high=0.9), "sizes": {"M": 16, "N": 32},
    })  # fmt: skip
    report = PerformanceReport(program="gemm_swiglu", cells=(fast, slow))
    gate = GateResult(name="performance", passed=False, data=report)
    gate.findings = [judge.Finding(message="0.8 of the bare product's speed, target 0.95")]

    def slowly(spec: Any, text: str, executor: Any, **options: Any) -> Verdict:
        found = quick_judge(spec, text, executor, **options)
        return found.model_copy(update={"gates": [*found.gates, gate], "passed": False})

    monkeypatch.setattr(judge, "judge_candidate", slowly)
    monkeypatch.setattr(execution, "usable_gpu", lambda _: Gpu("GPU-1", "H200", "9.0"))
    monkeypatch.setattr(attribution, "attributed", lambda *given: f"{given[2].of_gemm.ratio} said")
    bench.state.device = "auto"
    say(bench, "write_candidate", text=RIGHT)
    assert "was not timed yet (benchmark picks tile and shape)" in fail(bench, "profile")
    told = call(bench, "benchmark", {}).text
    assert told.endswith("\n    its time in the slowest cell: 0.8 said")
    bench.tools = {x: tool for x, tool in bench.tools.items() if x != "profile"}
    assert "profile" not in bench.told(bench.state.attempts[-1]).text
    bench.tools = dict(TOOLS)
    assert say(bench, "profile") == f"gemm_swiglu, bfloat16 16x32 at {slow.tile}\n0.8 said"
    say(bench, "write_candidate", text=RIGHT + "\n")
    assert "was not timed yet" in fail(bench, "profile")


def test_inspecting(bench: Workbench) -> None:
    say(bench, "write_candidate", text=RIGHT)
    roofline = say(bench, "inspect", what="roofline")
    # 2 · 4096³ flops; A, B and D of 4096² and O of half, two bytes each.
    assert "4096x4096x4096: GEMM 137.4 GFLOP" in roofline and "117.4 MB" in roofline
    assert "= acc(" in say(bench, "inspect", what="graph")
    result = call(bench, "inspect", {"what": "ptx"})
    head, *lines = result.text.splitlines()
    assert head.endswith("the epilogue, its first subtile")
    assert lines[0].split() == ["wgmma.wait_group.sync.aligned", "0;"]
    (path,) = result.artifacts  # the text is short enough
    whole = (bench.run.folder / path).read_text()
    assert "ex2.approx" in result.text and "kernel_cutlass" not in result.text
    assert result.text.count("bulk.commit_group") == 1
    assert ".visible .entry" in whole and len(whole) > 5 * len(result.text)
    say(bench, "write_candidate", text=WRONG)
    assert "only imports and @epilogue" in fail(bench, "inspect", what="graph")


@pytest.mark.slow
def test_tiles_are_compiled_on_request(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    from coda_agent.agent.judge import compile_gate
    from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig

    some = (DEFAULT_CONFIGS["sm_90a"], TileConfig(128, 64, 1, 1, True))
    monkeypatch.setattr(compile_gate, "offered", lambda *_: some)
    say(bench, "write_candidate", text=RIGHT)
    said = say(bench, "inspect", what="tiles")
    assert said.count("\n") == 2, said
    head, first, second = said.splitlines()
    assert head == "gemm_swiglu, bfloat16, sm_90a, at the tiles for the bench shapes:"
    assert re.fullmatch(r"128x128 pp 2x1: \d+ registers, 0 spill stores, the default", first)
    assert re.fullmatch(r"128x64 pp 1x1: \d+ registers, 0 spill stores", second)


def test_where_values_crowd_is_said() -> None:
    @epilogue(D=Tile, O=Tile)
    def k(acc, r: ColVector):
        d = acc * r
        a, b, c = exp(d), tanh(d), erf(d)
        return {"D": d, "O": a * b + c}

    # r is one number a row, and acc is not used any more.
    assert crowded(k.graph) == (
        "As written, most values are alive once `erf(acc · r)` is computed: `acc · r`, "
        "`exp(acc · r)`, `tanh(acc · r)`, `erf(acc · r)`. What is used up soon after it is computed "
        "spills less."
    )


def test_what_ptx_takes_is_listed(bench: Workbench) -> None:
    said = say(bench, "read_primitive", name="ptx")
    assert "atan2(x, y)" in said and "\ntanh.approx.f32\n" in said
    assert all(mnemonic in said for mnemonic in ("copysign.f32", "fma(.rn", "selp("))


def test_a_tip_needs_two_attempts_of_the_run(bench: Workbench) -> None:
    say(bench, "write_candidate", text=WRONG)
    call(bench, "check", {"level": "static"})
    given = {"text": "Imports come from one place.", "failing": 1, "passing": 2}
    assert "a later one that passed; there are: 1 failed" in fail(bench, "log_tip", **given)
    say(bench, "write_candidate", text=RIGHT)
    call(bench, "check", {"level": "static"})
    assert "kept" in say(bench, "log_tip", **given)
    body = RIGHT[RIGHT.index("gate, up") :].replace("\n", " ")
    assert "no code" in fail(bench, "log_tip", **{**given, "text": f"Write {body}"})
    (tip,) = Tips.of(bench.workspace).all().values()
    assert tip.run == bench.run.id and tip.author == "me"
    assert tip.evidence.startswith(f"{bench.run.id}: check 1, static: only imports")
    # Its own run is not shown it, and is not counted for it.
    assert say(bench, "search_tips", query="imports") == "no tip matches these words"
    call(bench, "submit", {})
    bench.finish()
    (tip,) = Tips.of(bench.workspace).all().values()
    assert tip.shown.runs == 0 and bench.state.over == "proved"


@pytest.mark.parametrize("holdout", [0.0, 1.0])
def test_a_tip_comes_back_with_its_fault(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch, holdout: float
) -> None:
    """In the next run of the spec, at the same fault, once, as a quotation; and it is counted."""
    monkeypatch.setattr(session, "HOLDOUT", holdout)
    spec, text = ROOT / "specs" / "gemm_swiglu.md", "Imports come from one place."

    def opened() -> Any:
        begin = RunStarted(author="me", device="cpu", commit=False)
        return pipeline.opened(where, spec, begin, lambda *_: None)

    with opened() as bench:
        for program in (WRONG, RIGHT):
            say(bench, "write_candidate", text=program)
            assert text not in call(bench, "check", {"level": "static"}).text
        say(bench, "log_tip", text=text, failing=1, passing=2)
    with opened() as bench:
        say(bench, "write_candidate", text=RIGHT.replace("swiglu(gate", "nope(gate"))
        assert text not in call(bench, "check", {"level": "static"}).text  # another fault
        for again in ("", "\n"):
            say(bench, "write_candidate", text=WRONG + again)
            said = call(bench, "check", {"level": "static"}).text
            assert (f"> [{tip_id(where)}] {text}" in said) is (holdout == 0 and not again)
        say(bench, "write_candidate", text=RIGHT)
        call(bench, "submit", {})
        bench.finish()
    (tip,) = Tips.of(where).all().values()
    assert (tip.shown.runs, tip.held.runs) == ((1, 0) if holdout == 0 else (0, 1))


def tip_id(where: workspace.Workspace) -> str:
    (id,) = Tips.of(where).all()
    return id


def test_submit_commits_once_and_ends_the_run(bench: Workbench) -> None:
    say(bench, "write_candidate", text=WRONG)
    refused = call(bench, "submit", {})
    assert refused.ok and refused.data["passed"] is False and bench.state.over is None
    say(bench, "write_candidate", text=RIGHT)
    assert "accepted as proved, commit" in say(bench, "submit")
    assert "this run is over: proved" in fail(bench, "submit")
    assert "this run is over: proved" in fail(bench, "write_candidate", text=WRONG)
    assert bench.workspace.git("rev-list", "--count", "HEAD") == "1"


def test_long_results_are_cut_and_kept(bench: Workbench) -> None:
    short = bounded("\n".join(f"line {i}" for i in range(10_000)))
    assert len(short) < LIMIT and short.startswith("line 0\n") and short.endswith("line 9999")
    say(bench, "write_candidate", text="# " + "\n# ".join("x" * 30 for _ in range(1000)))
    result = call(bench, "edit_candidate", {"old": "nope", "new": ""})
    assert len(result.text) < LIMIT


def test_tools_are_described_for_others() -> None:
    assert list(TOOLS) == [
        "read_spec", "list_primitives", "read_primitive", "list_demos", "read_demo", "search_tips",
        "write_candidate", "read_candidate", "compose", "edit_candidate", "check", "evaluate", "read_artifact", "benchmark", "profile", "inspect", "log_tip",
        "submit", "give_up", "use",
    ]  # fmt: skip
    for tool in TOOLS.values():
        assert tool.description.endswith(".") and tool.schema()["additionalProperties"] is False


def test_the_prompt_is_whole_and_the_same_each_time(
    where: workspace.Workspace, bench: Workbench
) -> None:
    spec = load_spec(ROOT / "specs" / "gemm_rope.md")
    first, second = (json.dumps(prompt.request(spec)) for _ in range(2))
    assert first == second
    said = json.loads(first)
    system, opening = said["system"][0]["text"], said["messages"][0]["content"][0]["text"]
    for name in (
        "swiglu(gate, up)",
        "RowLogSumExp",
        "# The language",
        "one returned dict. No",
    ):
        assert name in system
    # The list of the vocabulary is in the text, and details are read by a tool: nothing is both.
    assert "columns interleaved" not in system and "columns interleaved" in say(
        bench, "read_primitive", name="swiglu"
    )
    offered = [tool["name"] for tool in said["tools"]]
    assert [name for name in TOOLS if name not in offered] == ["list_primitives", "compose", "use"]
    assert vocabulary() in system
    assert (
        spec.text.strip() in opening and "# Demonstration: rot" in opening and "rotation" in opening
    )
    assert str(where.root) not in first


def test_the_prompt_is_printed_with_its_tokens(where: workspace.Workspace) -> None:
    shown = runner.invoke(app, ["prompt", "gemm_rope"]).stdout
    assert "tokens, estimated: no key is set to count them]" in shown
    document = json.loads(runner.invoke(app, ["prompt", "gemm_rope", "--json"]).stdout)
    assert document["counted"] is False and 3000 < document["tokens"] < 60_000
    cost = json.loads(runner.invoke(app, ["prompt", "gemm_rope", "--cost", "--json"]).stdout)
    *parts, whole = cost["parts"]
    assert [part["part"] for part in parts[:6]] == [
        "tools", "task", "language", "what the judge says", "vocabulary", "spec"]  # fmt: skip
    assert whole["characters"] == sum(part["characters"] for part in parts)
    assert whole["tokens"] == document["tokens"] and cost["counted"] is False
    text = document["system"][0]["text"]
    assert sum(part["characters"] for part in parts[1:5]) == len(text) - 3 * len("\n\n")


def test_an_agent_has_a_name_that_is_no_authors_here(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ["tool", "read_spec", "--spec", "gemm_swiglu", "--device", "cpu"]
    monkeypatch.setenv("CODA_AGENT_AUTHOR", "agent:some-model")
    assert runner.invoke(app, begin).exit_code == 0
    state = runs.state(runs.find(where, "last"))
    assert state.author == "agent:some-model"
    assert (state.spent.usd, state.spent.tokens) == (None, None)
    refused = runner.invoke(app, [*begin, "--author", "claude:x"])
    assert refused.exit_code == 2 and "cannot be the name of an agent" in refused.stderr
    assert len(runs.everything(where)) == 1
    assert "unknown" in runner.invoke(app, ["runs"]).stdout


def test_a_call_that_opens_a_run_says_which_others_are_open(where: workspace.Workspace) -> None:
    def opened(spec: str) -> str:
        result = runner.invoke(app, ["tool", "read_spec", "--spec", spec, "--device", "cpu"])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "open too" not in opened("gemm_swiglu")
    (first,) = runs.everything(where)
    assert f"open too: {first.id}; --run NAME goes on with one" in opened("gemm_rmsnorm")
    (second,) = (run.id for run in runs.everything(where) if run.id != first.id)
    assert runner.invoke(app, ["tool", "give_up", "reason=done", "--run", second]).exit_code == 0
    said = opened("gemm_rmsnorm")
    assert f"open too: {first.id}; --run" in said  # the one that is over is not open
    assert "open too" not in runner.invoke(app, ["tool", "read_demo", "name=gate"]).stdout


def test_the_command_line_works_at_the_same_bench(where: workspace.Workspace) -> None:
    def run(*args: str, code: int = 0) -> Any:
        result = runner.invoke(app, [*args, "--json"])
        assert result.exit_code == code, (result.stdout, result.stderr)
        return json.loads(result.stdout)

    (where.root / "mine.py").write_text(WRONG)
    started = run(
        "tool", "read_spec", "--spec", "gemm_swiglu", "--author", "someone", "--device", "cpu"
    )["run"]
    run("tool", "write_candidate", "text=@mine.py", "--run", started)
    assert run("tool", "check", "level=static", "--run", started, code=1)["data"]["passed"] is False
    run("tool", "edit_candidate", "old=import os\n", "new=", "--run", "last")
    tip = ["text=Mind the imports.", "failing=1", "passing=2"]
    run("tool", "check", "level=static", "--run", started[-4:])
    run("tool", "log_tip", *tip, "--run", started)
    assert run("tool", "submit", "--run", started)["ok"]
    assert (
        "kept" in run("tool", "log_tip", "text=After the end.", *tip[1:], "--run", started)["text"]
    )
    assert "no run is open" in run("tool", "submit", code=2)["error"]["message"]
    assert where.kernel("gemm_swiglu").evidence.author == "someone"
    (listed,) = run("runs")
    assert (listed["outcome"], listed["reason"], listed["author"]) == (
        "passed",
        "proved",
        "someone",
    )
    assert "this run is over" in run("tool", "submit", "--run", started, code=2)["text"]
    assert run("tool", "check", "--run", "nope", code=2)["error"]["message"].startswith("no runs")

    shown = runner.invoke(app, ["runs", "last"]).stdout
    assert "log_tip" in shown and "committed" in shown
    assert "gemm_swiglu by someone: passed, proved, commit" in shown
    runner.invoke(app, ["runs", "last", "--html", "page.html"])
    assert "write_candidate" in (where.root / "page.html").read_text()
    assert "Mind the imports." in runner.invoke(app, ["tips"]).stdout

    again = run("replay", started)
    assert again["differences"] == [] and again["commit"] is None and again["passed"]
    assert len(run("runs")) == 2 and len(Tips.of(where).all()) == 2
    assert [e["type"] for e in run("runs", "last")].count("run.finished") == 1
    assert runs.find(where, "last").id == started  # and no replay
    assert max(map(len, shown.splitlines())) <= 100

    head = where.git("rev-parse", "HEAD")
    (where.root / "mine.py").write_text(RIGHT + "\n# another text\n")
    run("tool", "read_spec", "--spec", "gemm_swiglu", "--device", "cpu")
    run("tool", "write_candidate", "text=@mine.py")
    assert run("tool", "submit", "--no-commit")["data"]["passed"]  # of a run that commits else
    assert where.git("rev-parse", "HEAD") == head


def run_tool(*args: str) -> tuple[int, str]:
    """Exit code of `coda-agent tool` and all it printed."""
    result = runner.invoke(app, ["tool", *args])
    return result.exit_code, result.stdout + result.stderr


def test_a_call_that_does_not_fit_exits_2_and_starts_no_run(where: workspace.Workspace) -> None:
    for args, said in [
        (["write_candidate"], "the input of write_candidate does not fit: text: Field required"),
        (["write_candidate", "text=@nope.py"], "nope.py cannot be read as text"),
        (["check", "level=deep"], "Input should be 'static', 'compile'"),
        (["chek"], "no tool named 'chek' (did you mean check?)"),
    ]:
        result = runner.invoke(app, ["tool", *args, "--spec", "gemm_swiglu", "--device", "cpu"])
        assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr, result.stderr
    assert runs.everything(where) == []
    started = ["--spec", "gemm_swiglu", "--device", "cpu"]
    assert run_tool("check", "level=static", *started)[0] == 2  # there is no candidate yet
    assert run_tool("write_candidate", f"text={RIGHT}", "--run", "last")[0] == 0
    assert run_tool("check", "level=gpu", "--run", "last")[0] == 3


def test_a_refused_spec_opens_no_run(where: workspace.Workspace) -> None:
    spec = where.specs / "mine.md"
    spec.write_text(REFUSED.replace("gemm_swiglu", "mine"))
    code, said = run_tool("read_spec", "--spec", "mine", "--device", "cpu")
    assert code == 2 and "output 'O' is bfloat16 [77, 136]; expected float32" in said
    assert runs.everything(where) == []
    assert run_tool("submit", "--run", "last")[0] == 2


def test_a_run_whose_spec_was_not_admitted_is_not_taken_up(where: workspace.Workspace) -> None:
    shutil.copy(ROOT / "specs" / "gemm_swiglu.md", where.specs)
    assert run_tool("read_spec", "--spec", "gemm_swiglu", "--device", "cpu")[0] == 0
    (run,) = runs.everything(where)
    frozen = run.folder / "spec.md"
    frozen.write_text(frozen.read_text().replace("multiple: 2.0", "multiple: 200.0"))
    code, said = run_tool("write_candidate", f"text={RIGHT}", "--run", "last")
    assert code == 2 and "spec.md was not admitted (start another run)" in said

    log = run.folder / "events.jsonl"  # as a kill before the admission is written down leaves it
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    frozen.write_text(REFUSED)
    code, said = run_tool("write_candidate", f"text={RIGHT}", "--run", "last")
    assert code == 2 and "expected float32" in said
    frozen.write_text((where.specs / "gemm_swiglu.md").read_text())
    assert run_tool("write_candidate", f"text={RIGHT}", "--run", "last")[0] == 0
    types = [event.type for event in read_events(log)]
    assert types[:2] == ["run.started", "spec.admitted"]


def test_a_submit_is_of_the_spec_that_specs_holds(where: workspace.Workspace) -> None:
    kept = where.specs / "gemm_swiglu.md"
    shutil.copy(ROOT / "specs" / "gemm_swiglu.md", kept)
    assert run_tool("read_spec", "--spec", "gemm_swiglu", "--device", "cpu")[0] == 0
    assert run_tool("write_candidate", f"text={RIGHT}", "--run", "last")[0] == 0
    old = kept.read_text()
    kept.write_text(old.replace("target: 0.97", "target: 0.98"))
    code, said = run_tool("submit", "--run", "last")
    assert code == 2 and f"this run's spec gemm_swiglu is not what {kept} holds" in said
    assert where.kernels() == [] and runs.state(runs.find(where, "last")).outcome == "running"
    kept.write_text(old.replace("\n", "\r\n"))  # the same text, as another editor ends lines
    assert "accepted as proved" in run_tool("submit", "--run", "last")[1]

    def listed() -> str:
        found = runner.invoke(app, ["show"]).stdout.splitlines()
        return next(line for line in found if line.startswith("gemm_swiglu "))

    def verified() -> str:
        return runner.invoke(app, ["verify", "gemm_swiglu", "--device", "cpu"]).stdout

    note = f"its spec.md differs from {kept}"
    assert note not in listed() and note not in verified()
    kept.write_text(old.replace("target: 0.97", "target: 0.98"))
    assert listed().endswith(note) and f"gemm_swiglu: {note}; generate makes" in verified()
    (where.root / "mine.md").write_text(old)
    code, said = run_tool("read_spec", "--spec", "./mine.md")
    assert code == 2 and f"is not what {kept} holds (start a run of that, or give" in said


def test_a_replay_says_what_differs(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = runner.invoke(app, ["generate", "gemm_swiglu", "--author", "composer", "--json"])
    assert result.exit_code == 0, result.stderr
    log = runs.find(where, "last").folder
    assert runner.invoke(app, ["replay", str(log)]).exit_code == 0

    def strict(spec: Any, text: str, executor: Any, **options: Any) -> Verdict:
        return quick_judge(spec, WRONG, executor, **options)

    monkeypatch.setattr(judge, "judge_candidate", strict)
    replayed = runner.invoke(app, ["replay", log.name])
    assert replayed.exit_code == 1 and "submit: was a pass, is a refusal" in replayed.stdout


def test_a_summary_names_each_kernel_once_and_one_that_spills_first() -> None:
    stores = {"bfloat16": 8, "float16": 0, "float8_e4m3fn": 0}
    kernels = tuple(
        CompiledKernel(
            program="k",
            arch="sm_90a",
            dtype=d,
            tile="t",
            registers=1,
            local_stores=n,
            stack_bytes=4 * n,
        )
        for d, n in reversed(stores.items())
    )
    lines = [*feedback._figures(CompileReport(kernels=kernels, programs={}))]
    assert lines[0] == "3 kernels for sm_90a"
    assert [line.split()[2] for line in lines[1:3]] == ["bfloat16", "float8_e4m3fn"]
    assert lines[1].endswith("1 registers, 8 spill stores to 32 bytes a thread")
    assert lines[3:] == ["1 more", "what spills: inspect tiles"]
    newer = kernels[0].model_copy(update={"arch": "sm_100a"})
    lost = kernels[0].model_copy(update={"arch": "sm_120a", "error": "does not compile"})
    report = CompileReport(kernels=(kernels[0], newer, lost), programs={})
    assert next(iter(feedback._figures(report))) == "2 kernels for sm_90a, sm_100a"


def test_what_the_composer_refused_is_no_run_to_go_on_with(where: workspace.Workspace) -> None:
    spec = ROOT / "specs" / "catalogue" / "gemm_probit.md"
    with pytest.raises(ProgramError):
        pipeline.generate(where, spec, Composer(), lambda *_: None, device="cpu", commit=False)
    assert len(runs.everything(where)) == 1 and list(runs.open_ones(where)) == []
