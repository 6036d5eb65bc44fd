"""The ladder: the composer for nothing, then models, each with what the others left."""

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bench import SPECS, log_of, quick_judge, run_of
from pydantic import TypeAdapter
from server import Reply, Serve, Server, call, error
from typer.testing import CliRunner

from coda_agent.agent import authors, judge, pipeline, run_page
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.client import Stopped
from coda_agent.agent.authors.claude.samples import Talks
from coda_agent.agent.authors.replay import Replay
from coda_agent.agent.cli import app
from coda_agent.agent.events import (
    AuthorStarted,
    GaveUp,
    Prompted,
    Requested,
    Responded,
    RunResumed,
    Switched,
    ToolFinished,
)
from coda_agent.agent.judge import GateResult, Verdict
from coda_agent.agent.judge.records import (
    VERSIONS,
    JsonObject,
    PerformanceReport,
    Rates,
    Ratio,
    Timed,
    Timing,
)
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.tiles import TileConfig

MAXOUT = SPECS / "catalogue" / "gemm_maxout.md"
SOLUTION = Path(__file__).parents[1] / "solutions" / "gemm_maxout.py"
HAIKU, SONNET = "claude-haiku-5-5", "claude-sonnet-5-5"


@pytest.fixture
def served(serve: Serve) -> Serve:
    """A server of every model, whose script may ask which one is called."""

    def start(script: Any) -> Server:
        made = serve(lambda body, number: replace(script(body, number), model=body["model"]))
        made.model = None
        return made

    return start


def made(where: Workspace, **options: Any) -> Author:
    return authors.make("ladder", Options(**options), where)


def climb(where: Workspace, who: Author, spec: Path = MAXOUT) -> pipeline.Outcome:
    return pipeline.generate(where, spec, who, lambda *_: None, device="cpu")


def test_what_the_composer_writes_costs_nothing(where: Workspace, served: Serve) -> None:
    server = served(lambda *_: pytest.fail("a model was asked"))
    outcome = climb(where, made(where), SPECS / "gemm_swiglu.md")
    assert outcome.passed and not server.bodies and outcome.cost == ""
    assert where.kernel("gemm_swiglu").evidence.author == "composer"


def test_a_stronger_model_goes_on_from_what_a_weaker_one_left(
    where: Workspace, served: Serve
) -> None:
    """Haiku has a candidate that fails, and gives up; Sonnet is shown it, and solves the spec."""
    solution = SOLUTION.read_text("utf-8")
    wrong = "import os\n" + solution
    script = [
        Reply([call("write_candidate", {"text": wrong}, "a"), call("submit", {}, "b")]),
        Reply([call("give_up", {"reason": "too hard"}, "c")]),
        Reply([call("edit_candidate", {"old": "import os\n", "new": ""}, "d"),
               call("submit", {}, "e")]),
    ]  # fmt: skip
    server = served(lambda body, number: script[number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET)))
    assert outcome.passed and outcome.commit
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{SONNET}"
    sent = server.requests()
    assert [body["model"] for body in sent] == [HAIKU, HAIKU, SONNET]
    haiku, sonnet = (
        "\n".join(b["text"] for b in sent[i]["messages"][0]["content"]) for i in (0, 2)
    )
    for first in (haiku, sonnet):
        assert "HOLE_1(acc + bias)" in first and "max_pool2d_with_indices" in first
    assert "The best that others have tried" not in haiku
    assert wrong.strip() in sonnet and "FAILED at static" in sonnet
    assert len(sent[2]["messages"]) == 1  # nothing of the other's transcript
    events = log_of(where)
    writers = [event.author for event in events if isinstance(event, AuthorStarted)]
    assert writers == ["ladder", "composer", f"claude:{HAIKU}", f"claude:{SONNET}"]
    composer, haiku = (event.reason for event in events if isinstance(event, GaveUp))
    assert "max_pool2d_with_indices" in composer and haiku == "too hard"
    assert ("Given up", composer) in [*run_page.sections(events)]


def test_the_last_one_to_give_up_ends_the_run(where: Workspace, served: Serve) -> None:
    served(lambda _, number: Reply([call("give_up", {"reason": f"no {number}"}, "a")]))
    outcome = climb(where, made(where, models=(HAIKU,), samples=2))
    assert (outcome.passed, outcome.reason) == (False, "gave up: no 1")


def test_a_model_that_refuses_leaves_the_run_to_the_next(where: Workspace, served: Serve) -> None:
    refusal = Reply([], stop_reason="refusal", details={"type": "refusal", "category": "x"})
    give_up = Reply([call("give_up", {"reason": "too hard"}, "a")])
    server = served(lambda _, number: [refusal, give_up][number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET)))
    assert outcome.reason == "gave up: too hard" and len(server.requests()) == 2
    served(lambda _, number: refusal)
    with pytest.raises(Stopped, match="the model refused: x"):
        climb(where, made(where, models=(HAIKU,)), SPECS / "catalogue" / "gemm_probit.md")


def test_an_interrupted_climb_goes_on_with_its_rung(where: Workspace, served: Serve) -> None:
    solution = SOLUTION.read_text("utf-8")
    give_up = Reply([call("give_up", {"reason": "too hard"}, "a")])
    write = Reply([call("write_candidate", {"text": solution}, "b")])
    stop = error(400, "invalid_request_error")
    served(lambda _, number: [give_up, write, stop][number])
    who = made(where, models=(HAIKU, SONNET))
    with pytest.raises(Stopped):
        climb(where, who)
    server = served(lambda *_: Reply([call("submit", {}, "c")]))
    outcome = pipeline.resume(where, run_of(where), who, lambda *_: None)
    assert outcome.passed
    (body,) = server.requests()
    assert body["model"] == SONNET and len(body["messages"]) == 3
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{SONNET}"


def of_user(body: JsonObject) -> str:
    """All that a request says for us."""
    return json.dumps([m["content"] for m in body["messages"] if m["role"] == "user"])


def test_samples_of_a_cheap_model_are_held_at_once(where: Workspace, served: Serve) -> None:
    """They begin alike, wait for no other's answer, and keep their own candidates."""
    solution, opus = SOLUTION.read_text("utf-8"), "claude-opus-5-5"
    texts, both = [f"import {x}\n{solution}" for x in ("os", "re")], threading.Barrier(2)
    write = [Reply([call("write_candidate", {"text": text}, "a")]) for text in texts]
    submit = Reply([call("read_candidate", {}, "b"), call("submit", {}, "c")])
    give_up = Reply([call("give_up", {"reason": "no"}, "d")])

    def script(body: JsonObject, _: int) -> Reply:
        turn = len(body["messages"]) // 2
        if body["model"] != HAIKU:
            return give_up
        if turn < 2:
            place = both.wait(10)  # neither is answered before both have asked
            return replace(write[place] if turn == 0 else submit)
        return give_up

    server = served(script)
    who = made(where, models=(HAIKU, opus), samples=2)
    assert f"then {HAIKU} (2 times), {opus}: at most" in who.limits
    outcome = climb(where, who)
    assert (outcome.passed, outcome.reason) == (False, "gave up: no")
    sent = server.requests()
    assert [body["model"] for body in sent] == [HAIKU] * 6 + [opus]
    first, second = sent[:2]
    assert first["messages"] == second["messages"] and first["tools"] == second["tools"]
    ends = [body for body in sent if body["model"] == HAIKU and len(body["messages"]) == 5]
    for one, other in (texts, texts[::-1]):  # each read its own
        (mine,) = [of_user(body) for body in ends if json.dumps(one)[1:-1] in of_user(body)]
        assert json.dumps(other)[1:-1] not in mine and "FAILED at static" in mine
    assert any(text.strip() in sent[-1]["messages"][0]["content"][1]["text"] for text in texts)
    talks = Talks()
    for event in log_of(where):
        talks.apply(event)
    assert {talk.candidate for talk in talks.held[:2]} == {*texts} and len(talks.held) == 3
    assert [talk.spent.tokens for talk in talks.held] == [450, 450, 150]
    assert RunState.of(log_of(where)).spent.tokens == 1050
    again = Replay(log_of(where))
    climb(where, again)
    assert again.differences == []


def test_a_sample_that_passes_ends_the_others(where: Workspace, served: Serve) -> None:
    """The answer that the other waits for is booked, and what it asks for is not done."""
    passed = threading.Event()
    right = [call("write_candidate", {"text": SOLUTION.read_text("utf-8")}, "a"),
             call("submit", {}, "b")]  # fmt: skip

    def script(body: JsonObject, number: int) -> Reply:
        if number == 0:
            return Reply(right)
        assert passed.wait(60)
        return Reply([call("give_up", {"reason": "late"}, "c")])

    server = served(script)
    who = made(where, models=(HAIKU, SONNET), samples=2)

    def observer(kind: str, *_: object) -> None:
        if kind == "committed":
            passed.set()

    outcome = pipeline.generate(where, MAXOUT, who, observer, device="cpu")
    assert outcome.passed and outcome.commit and outcome.reason is None
    assert len(server.requests()) == 2
    state = RunState.of(log_of(where))
    assert state.steps == 2 and state.spent.tokens == 300 and state.under_way == {}
    assert not [event for event in log_of(where) if isinstance(event, GaveUp)][1:]
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{HAIKU}"


def test_samples_share_what_is_left(where: Workspace, served: Serve) -> None:
    """Two samples and the last have a third each, however their calls fall."""
    pages = Reply([], usage={"output_tokens": 4000})
    served(lambda _, number: replace(pages, content=[call("list_demos", {}, f"d{number}")]))
    budget = authors.Budget(usd=1.5)
    outcome = climb(
        where, made(where, models=(SONNET, "claude-opus-5-5"), samples=2, budget=budget)
    )
    assert not outcome.passed and str(outcome.reason).startswith("budget: $0.6")
    talks = Talks()
    for event in log_of(where):
        talks.apply(event)
    usd = [talk.spent.usd or 0.0 for talk in talks.held]
    assert all(0.4 < one <= 0.5 for one in usd[:2]) and 1.3 < sum(usd) <= 1.5
    state = RunState.of(log_of(where))
    assert state.spent.usd == pytest.approx(sum(usd))


def test_a_step_of_all_counts_where_several_are_under_way(where: Workspace, served: Serve) -> None:
    server = served(lambda _, number: Reply([call("list_demos", {}, f"d{number}")]))
    budget = authors.Budget(usd=5.0, steps=5)
    climb(where, made(where, models=(HAIKU, SONNET), samples=3, budget=budget))
    assert len(server.requests()) == 5


def test_what_was_set_aside_for_calls_of_a_killed_run_is_spent() -> None:
    now, talks, state = datetime.now(UTC).isoformat(), Talks(), RunState(metered=True)
    prompt = Prompted(time=now, request={}, messages=[], characters=0)
    for event in (
        prompt, Requested(time=now, worst_usd=0.1), Switched(time=now, number=1), prompt,
        Requested(time=now, worst_usd=0.2), Switched(time=now, number=0), RunResumed(time=now),
    ):  # fmt: skip
        talks.apply(event)
        state.apply(event)
    assert [talk.spent.usd for talk in talks.held] == [0.1, 0.2] and talks.now == 0
    assert state.spent.usd == pytest.approx(0.3) and state.under_way == {}


def test_samples_go_on_where_they_were_interrupted(where: Workspace, served: Serve) -> None:
    """One was answered and the other's server fails; each goes on with its own messages."""
    solution, asked = SOLUTION.read_text("utf-8"), threading.Barrier(2)

    def script(body: JsonObject, number: int) -> Reply:
        if len(body["messages"]) == 1 and asked.wait(10) == 0:
            return Reply([call("write_candidate", {"text": "import os\n" + solution}, "a")])
        return error(400, "invalid_request_error")

    served(script)
    who = made(where, models=(HAIKU, SONNET), samples=2)
    with pytest.raises(Stopped):
        climb(where, who)
    submit = [
        call("edit_candidate", {"old": "import os\n", "new": ""}, "b"),
        call("submit", {}, "c"),
    ]

    def after(body: JsonObject, _: int) -> Reply:
        if len(body["messages"]) > 1:
            return Reply(submit)
        return Reply([call("give_up", {"reason": "no"}, "d")])

    server = served(after)
    assert pipeline.resume(where, run_of(where), who, lambda *_: None).passed
    assert sorted(len(body["messages"]) for body in server.requests()) == [1, 3]
    assert where.kernel("gemm_maxout").text == solution
    page = [*run_page.sections(log_of(where))]
    assert ("Conversation 2", "goes on, or begins") in page


def test_a_sample_that_is_refused_leaves_the_run_to_the_others(
    where: Workspace, served: Serve
) -> None:
    refusal = Reply([], stop_reason="refusal", details={"type": "refusal", "category": "x"})
    right = [call("write_candidate", {"text": SOLUTION.read_text("utf-8")}, "a"),
             call("submit", {}, "b")]  # fmt: skip
    both = threading.Barrier(2)
    served(lambda *_: Reply(right) if both.wait(10) else refusal)
    assert climb(where, made(where, models=(HAIKU, SONNET), samples=2)).passed


def timed_judge(spec: Any, text: str, *given: Any, **more: Any) -> Verdict:
    """The quick one, and times: the kernel's are what the text's last line says, cuBLAS's 100 us."""
    verdict = quick_judge(spec, text, *given, **more)
    if not verdict.passed:
        return verdict
    us = {"ours": float(text.rpartition("# ")[2]), "gemm": 100.0, "compile": 300.0}
    times = {name: Timing(median_us=t, interval_us=(t, t), times_us=(t,)) for name, t in us.items()}
    of_gemm, over_compile = (
        Ratio(ratio=us[other] / us["ours"], low=0.1, high=9.0) for other in ("gemm", "compile")
    )
    cell = Timed(
        dtype="bfloat16", sizes={"M": 128}, config=TileConfig(128, 128), tile="128x128", tflops=1.0,
        floor_us=70.0, ceiling=Rates(tflops=1.0, gbytes_s=1.0), launches=(1,), mismatches=0,
        finalists_us={}, gpu={}, times=times, of_gemm=of_gemm,
        over_compile=over_compile,
    )  # fmt: skip
    report = PerformanceReport(program=spec.name, cells=(cell,))
    version = VERSIONS["performance"]
    gate = GateResult(name="performance", passed=True, version=version, data=report)
    return verdict.model_copy(update={"level": "accepted", "gates": [*verdict.gates, gate]})


def submitted(us: int) -> Reply:
    """A right program of that time, handed in."""
    text = f"{SOLUTION.read_text('utf-8')}# {us}\n"
    return Reply([call("write_candidate", {"text": text}, "w"), call("submit", {}, "s")])


def test_with_a_gpu_it_goes_on_for_speed_and_keeps_the_faster(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a time is within a tenth of cuBLAS's: 130 us, a slower 140, 105; nobody is asked more."""
    monkeypatch.setattr(judge, "judge_candidate", timed_judge)
    opus, script = "claude-opus-5-5", [submitted(130), submitted(140), submitted(105)]
    server = served(lambda _, number: script[number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET, opus, "claude-fable-5-2")))
    assert outcome.passed and outcome.level == "accepted" and outcome.reason is None
    assert [body["model"] for body in server.requests()] == [HAIKU, SONNET, opus]
    told = [body["messages"][0]["content"][1]["text"] for body in server.requests()]
    assert "can be faster" not in told[0]
    assert all("# What passed and can be faster" in text and "# 130" in text for text in told[1:])
    assert "130" in told[2].partition("performance")[2]
    (_, refused, _) = [event for event in log_of(where)
                       if isinstance(event, ToolFinished) and event.name == "submit"]  # fmt: skip
    assert "not taken: attempt 1 is no slower" in refused.text
    assert where.git("log", "--format=%s").count("Store gemm_maxout (accepted)") == 2
    kernel = where.kernel("gemm_maxout")
    assert kernel.text.endswith("# 105\n") and kernel.evidence.author == f"claude:{opus}"


def test_what_passed_stands_whatever_comes_after_it(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused candidate, one who gives up, and a server that serves no more."""
    monkeypatch.setattr(judge, "judge_candidate", timed_judge)
    wrong = [call("write_candidate", {"text": "import os\n"}, "a"), call("submit", {}, "b")]
    give_up = call("give_up", {"reason": "fast enough"}, "c")
    script = [submitted(130), Reply([*wrong, give_up]), error(400, "invalid_request_error")]
    served(lambda _, number: script[number])
    outcome = climb(where, made(where, models=(HAIKU, SONNET, "claude-opus-5-5")))
    assert outcome.passed and outcome.level == "accepted" and outcome.commit
    assert outcome.verdict and outcome.verdict.passed
    state = RunState.of(log_of(where))
    assert (state.outcome, state.reason, state.commit) == ("passed", "accepted", outcome.commit)
    assert state.best and state.best.text.endswith("# 130\n")
    assert where.kernel("gemm_maxout").evidence.author == f"claude:{HAIKU}"


def test_a_climb_for_speed_is_resumed(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while its second candidate is judged, which is then handed in again."""

    def interrupted(spec: Any, text: str, *given: Any, **more: Any) -> Verdict:
        if text.endswith("# 105\n"):
            raise KeyboardInterrupt
        return timed_judge(spec, text, *given, **more)

    monkeypatch.setattr(judge, "judge_candidate", interrupted)
    script = [submitted(130), submitted(105)]
    served(lambda _, number: script[number])
    who = made(where, models=(HAIKU, SONNET))
    with pytest.raises(KeyboardInterrupt):
        climb(where, who)
    monkeypatch.setattr(judge, "judge_candidate", timed_judge)
    server = served(lambda *_: Reply([call("submit", {}, "again")]))
    assert pipeline.resume(where, run_of(where), who, lambda *_: None).passed
    assert [body["model"] for body in server.requests()] == [SONNET]
    assert where.kernel("gemm_maxout").text.endswith("# 105\n")
    assert where.git("log", "--format=%s").count("Store gemm_maxout (accepted)") == 2


def test_each_rung_has_its_share(where: Workspace, served: Serve) -> None:
    """What is left is shared by the conversations to come, and no more than all of it is spent."""
    pages = Reply([call("list_demos", {}, "d")], usage={"output_tokens": 4000})
    server = served(
        lambda _, number: replace(pages, content=[call("list_demos", {}, f"d{number}")])
    )
    budget = authors.Budget(usd=1.5)
    outcome = climb(where, made(where, models=(SONNET, "claude-opus-5-5"), budget=budget))
    assert not outcome.passed and str(outcome.reason).startswith("budget: $0.8")
    usd = {SONNET: 0.0, "claude-opus-5-5": 0.0}
    for event in log_of(where):
        if isinstance(event, Responded):
            usd[event.model] += event.usd or 0.0
    assert 0.6 < usd[SONNET] <= 0.75 and 1.35 < sum(usd.values()) <= 1.5
    assert len(server.requests()) > 10


def test_a_rung_is_told_what_it_has_itself(where: Workspace, served: Serve) -> None:
    """The first takes a dollar of three; the second is told of the two that are left."""
    opus, dollar = "claude-opus-5-5", {"output_tokens": 100_000}
    give_up = call("give_up", {"reason": "too hard"}, "b")
    script = [Reply([give_up], usage=dollar), Reply([call("list_demos", {}, "a")]),
              Reply([{**give_up, "id": "c"}])]  # fmt: skip
    server = served(lambda _, number: script[number])
    climb(where, made(where, models=(SONNET, opus), budget=authors.Budget(usd=3.0)))
    sent = server.requests()
    first, second = sent[:2]
    assert [body["output_config"]["task_budget"]["total"] for body in (first, second)] == [
        150_000, 99_990,  # of the dollar and 100 tokens of prompt
    ]  # fmt: skip
    told = [body["messages"][0]["content"][-1]["text"] for body in (first, second)]
    assert "$1.50, at $10 for a million tokens of answers; 1000 turns; 120 minutes" in told[0]
    assert "$2.00, at $20 for a million tokens of answers; 999 turns; 120 minutes" in told[1]
    assert sent[2]["messages"][-1]["content"][-1]["text"] == "[$0.00 of $2.00 spent]"


def test_a_ladder_of_an_unknown_model_is_refused_at_once(where: Workspace, served: Serve) -> None:
    served(lambda *_: None)
    with pytest.raises(CodaError, match="use claude-sonnet-5-5"):
        made(where, models=("claude-sonnet-3",))
    with pytest.raises(CodaError, match="--models"):
        authors.make("ladder:x", Options(), where)


def test_one_model_is_the_whole_ladder(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by --model, or by the user's variable; models that are named go before that."""
    served(lambda *_: None)
    assert made(where, model=HAIKU).limits.startswith(f"the composer, then {HAIKU}: at most")
    monkeypatch.setenv("CODA_AGENT_MODEL", SONNET)
    alone = made(where)
    assert alone.limits.startswith(f"the composer, then {SONNET}: at most")
    assert made(where, models=(HAIKU,)).limits.startswith(f"the composer, then {HAIKU}: at most")
    monkeypatch.setenv("CODA_AGENT_MODEL", HAIKU)  # a run that is resumed keeps its own
    kept = TypeAdapter(Options).validate_python(alone.settings()["options"])
    assert authors.make("ladder", kept, where).limits == alone.limits
    with pytest.raises(CodaError, match="--model and --models exclude each other"):
        made(where, model=HAIKU, models=(SONNET,))


def test_what_only_a_ladder_takes_is_refused_by_others(
    where: Workspace, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(lambda *_: None)
    monkeypatch.chdir(where.root)

    def said(*args: str) -> str:
        found = CliRunner().invoke(app, ["generate", "gemm_swiglu", "--device", "cpu", *args])
        assert found.exit_code == 2, found.output
        return found.stderr

    assert "the author claude takes no --samples (--author ladder does" in said(
        "--author", "claude", "--samples", "3"
    )
    assert "the author composer takes no --models" in said(
        "--author", "composer", "--samples", "3", "--models", "a,b"
    )
    assert "the price of unheard-of is not known" in said("--models", f"{HAIKU} , unheard-of")
